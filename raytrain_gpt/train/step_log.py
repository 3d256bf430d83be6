"""Rows from step results: reduced over the ranks, checked against the plan and judged.

Results stay on the device until `flush`, which reduces losses over the ranks, checks the delivered
sequences, extends the order hash by one batch per step, and judges every step: a step that is not finite
was skipped, a spike is marked, and too many bad steps in a row roll back. A late flush reads the steps of
the previous flush, so that the device never waits.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raytrain_gpt.checkpoint.collectives import Collectives
from raytrain_gpt.columns import Row, finite
from raytrain_gpt.core.device import DeviceTimestamp, Span, peak_memory_bytes
from raytrain_gpt.core.loop import StepResult
from raytrain_gpt.core.spikes import BadStreak, SpikeDetector
from raytrain_gpt.data.mixed_order import MixedOrder
from raytrain_gpt.data.order import batch_before
from raytrain_gpt.ingest.feed import TrainFeed
from raytrain_gpt.ingest.ray_dataset import IngestSpec


@dataclass(frozen=True)
class _Window:
    """Steps between two flushes, whose `scalars` are on the host once `end` has passed.

    Attributes:
        forward: The forward passes of each step.
        scalars: Losses, gradient norms and, with fp16, loss scales, float64 (2 or 3, steps).
        seconds_excluded: Seconds since the previous window that were not training.
    """

    steps: list[StepResult]
    forward: list[Sequence[Span]]
    scalars: Tensor
    end: DeviceTimestamp
    seconds_excluded: float


class StepLog:
    """Finished steps that are not reported yet.

    Args:
        rows_before: Last rows before this attempt, so that the detector judges as in an unbroken run.
        peak_flops: FLOP/s of one worker's device, or None if unlisted.
        slowed: Steps slowed by a profile, whose speed is not reported.

    Attributes:
        bad_streak: Bad steps in a row that require a rollback, or None.
    """

    def __init__(
        self,
        ingest: IngestSpec,
        rows_before: list[Row],
        collectives: Collectives,
        feed: TrainFeed,
        *,
        flops_per_token: float,
        peak_flops: float | None,
        device: torch.device,
        slowed: range,
    ) -> None:
        config = ingest.plan.config
        self._ingest, self._order = ingest, ingest.order()
        self._collectives, self._feed = collectives, feed
        self._batch_tokens = config.train.global_batch_tokens
        before = [
            (row["step"], row["train/loss"], row["optim/grad_norm"], row.get("optim/loss_scale"))
            for row in rows_before
        ]
        self._detector = SpikeDetector(config.spikes, before)
        self._flops_per_token = flops_per_token
        self._peak_flops = (peak_flops or math.nan) * collectives.world_size
        self._device, self._slowed = device, slowed
        self._pending: list[tuple[StepResult, Sequence[Span]]] = []
        self._unread: deque[_Window] = deque()
        self._seconds_excluded, self._steps_done = 0.0, 0
        self.position = ingest.position
        self.bad_streak: BadStreak | None = None
        self.start_clock()

    @property
    def in_bad_stretch(self) -> bool:
        """Whether the newest judged step had a bad loss."""
        return bool(self._detector.streak)

    def reject_weights(self, step: int) -> None:
        """Roll back from a reported step with weights that are not finite.

        The update before the first bad loss made them so, and its batch is skipped too.
        """
        streak = self._detector.streak
        batch = batch_before(self.position.next_batch, 1, self.position.skipped)
        self._roll_back(streak[0] - 1 if streak else step, step, batch)

    def _roll_back(self, first_step: int, step: int, batch: int) -> None:
        first_batch = batch_before(batch, step - first_step, self.position.skipped)
        self.bad_streak = BadStreak(first_step, step, first_batch, batch)

    def start_clock(self) -> None:
        """Start measuring; the first step follows."""
        self._clock_from = self._began = self._epoch_began = DeviceTimestamp(self._device)

    def exclude_time(self, seconds: float) -> None:
        """Exclude seconds that were not training from the steps until the next `flush`."""
        self._seconds_excluded += seconds

    def add(self, result: StepResult, forward: Sequence[Span] = ()) -> None:
        """Add a result, and its forward passes, without reading it from the device."""
        self._pending.append((result, forward))

    def flush(self, late: bool = False) -> list[Row]:
        """Return rows for unreported steps, stopping at a streak of bad ones.

        A `late` flush reports only steps up to the last one, without waiting for the device.
        """
        if self._pending:
            self._unread.append(self._copied())
        rows: list[Row] = []
        while len(self._unread) > late and self.bad_streak is None:
            rows += self._read(self._unread.popleft())
        return rows

    def _copied(self) -> _Window:
        """Start copying the pending results to the host (from a GPU: to pinned memory)."""
        steps, forward = map(list, zip(*self._pending, strict=True))
        losses, norms = [step.loss for step in steps], [step.grad_norm.float() for step in steps]
        scales = [step.loss_scale for step in steps if step.loss_scale is not None]  # all or none
        scalars = [torch.stack(each).double() for each in (losses, norms, scales) if each]
        on_host = torch.stack(scalars).to("cpu", non_blocking=True)
        end = DeviceTimestamp(self._device)
        window = _Window(steps, forward, on_host, end, self._seconds_excluded)
        self._pending, self._seconds_excluded = [], 0.0
        return window

    def _read(self, window: _Window) -> list[Row]:
        """Reduce a window's steps over the ranks, check and judge them; returns their rows."""
        steps, ranks = window.steps, self._collectives.world_size
        # Waits until the window's values are on the host. The host runs ahead of the device, so only the
        # mean over a window is meaningful.
        seconds = window.end.seconds_since(self._clock_from) - window.seconds_excluded
        self._clock_from, step_time_s = window.end, seconds / len(steps)
        self._steps_done += len(steps)
        in_all_s = window.end.seconds_since(self._began)
        sums = [self._feed.take_hash_sums() for _ in steps]
        of_ranks = self._gathered(window, [delivered for delivered, _ in sums])
        # Every rank sums in rank order and gets the same bits. The float64 mean of equal losses (exact sums)
        # is exactly that loss.
        losses, waits = ((of_ranks[key].sum(0) / ranks).tolist() for key in ("loss", "wait_s"))
        delivered, skips = (of_ranks[key].sum(0).tolist() for key in ("delivered", "skips"))
        _, norms, *scaled = window.scalars.tolist()
        scales = scaled[0] if scaled else [None] * len(steps)
        rows: list[Row] = []
        for i, result in enumerate(steps):
            # Ray Data promises no assignment of rows to ranks, so delivery is checked here.
            if delivered[i] != sums[i][1]:
                raise RuntimeError(
                    f"step {result.step}: the ranks did not receive the sequences of the plan"
                )
            batch = self.position.upcoming_batch
            self.position = self.position.after(sums[i][1])
            is_slowed = result.step in self._slowed
            tokens_per_s = math.nan if is_slowed else self._batch_tokens / step_time_s
            row: Row = {
                "step": result.step,
                "train/loss": finite(losses[i]),
                "optim/lr": result.lr,
                "optim/grad_norm": finite(norms[i]),
                "perf/tokens_per_s": finite(tokens_per_s),
                "perf/step_time_s": step_time_s,
                "perf/data_wait_s": waits[i],
                "perf/mfu": finite(tokens_per_s * self._flops_per_token / self._peak_flops),
                "data/epoch": self._order.epoch(batch),
                "data/tokens_seen": result.step * self._batch_tokens,
                "data/order_hash": self.position.order_hash,
                **self._tokens_by_dataset(result.step),
                "perf/tokens_per_s_overall": self._steps_done * self._batch_tokens / in_all_s,
                "perf/peak_memory_bytes": int(of_ranks["peak_bytes"].max()),
            }
            if scales[i] is not None:
                row["optim/loss_scale"] = scales[i]
            rows.append(row)
            if self._order.epoch(self.position.upcoming_batch) > row["data/epoch"]:
                rows.append(self._end_of_epoch(row, window.end))
            rows += self._judged(result.step, batch, losses[i], norms[i], scales[i], skips[i])
            if self.bad_streak is not None:
                return rows  # later steps are repeated after the rollback
        if ranks > 1 and not is_slowed:
            row["perf/rank_forward_s"] = _means(of_ranks["forward_s"])
            row["perf/rank_data_wait_s"] = _means(of_ranks["wait_s"])
        return rows

    def _gathered(self, window: _Window, delivered: list[int]) -> dict[str, Tensor]:
        """Gather 64-bit values of every rank's steps, (ranks, steps): one collective carries all bits."""
        forward_s = [sum(end.seconds_since(at) for at, end in spans) for spans in window.forward]
        columns = {
            "loss": window.scalars[0],
            "wait_s": torch.tensor([s.data_wait_s for s in window.steps], dtype=torch.float64),
            "forward_s": torch.tensor(forward_s, dtype=torch.float64),
            "delivered": torch.tensor(delivered),
            "skips": (~torch.isfinite(window.scalars[1])).long(),
            "peak_bytes": torch.full((len(delivered),), peak_memory_bytes(self._device)),
        }
        sent = torch.stack([column.view(torch.int64) for column in columns.values()])
        received = self._collectives.all_gather_rows(sent.flatten()).view(-1, *sent.shape)
        return {
            name: bits.contiguous().view(column.dtype)
            for (name, column), bits in zip(columns.items(), received.unbind(1), strict=True)
        }

    def _judged(
        self, step: int, batch: int, loss: float, norm: float, scale: float | None, skips: int
    ) -> list[Row]:
        """Judge a step: return the event of a bad one, and roll back if it exhausts the patience."""
        bad = self._detector.judge(step, loss, norm, scale)
        if self._detector.out_of_patience:
            self._roll_back(self._detector.streak[0], step, batch)
        if bad is None:
            return []
        row: Row = {
            "step": step,
            "event": "spike" if bad.finite else "nonfinite",
            "time": time.time(),
            "batch": batch,
            "loss": finite(loss),
            "grad_norm": finite(norm),
        }
        if not bad.finite:
            return [{**row, "skipped_on_ranks": skips}]
        zscores = {"loss_zscore": bad.loss_zscore, "grad_norm_zscore": bad.grad_norm_zscore}
        return [row | {k: None if z is None else round(z, 2) for k, z in zscores.items()}]

    def _end_of_epoch(self, row: Row, now: DeviceTimestamp) -> Row:
        began, self._epoch_began = self._epoch_began, now
        return {
            "step": row["step"],
            "event": "epoch",
            "time": time.time(),
            "epoch": row["data/epoch"],
            "tokens": row["data/tokens_seen"],
            "seconds": round(now.seconds_since(began), 3),
        }

    def _tokens_by_dataset(self, step: int) -> Row:
        if not isinstance(self._order, MixedOrder):
            return {}
        trained = self._order.trained(step, self.position.skipped)
        return {
            f"data/tokens/{name}": sequences * self._ingest.seq_len
            for name, sequences in zip(self._ingest.data.names, trained, strict=True)
        }


def _means(of_ranks: Tensor) -> list[float]:
    """Return the mean of each rank's steps, in seconds, rounded to 1 µs."""
    means: list[float] = of_ranks.numpy().mean(1).round(6).tolist()
    return means
