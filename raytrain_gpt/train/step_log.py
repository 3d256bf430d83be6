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

from raytrain_gpt.checkpoint.catalog import Checkpoint
from raytrain_gpt.checkpoint.collectives import Collectives
from raytrain_gpt.columns import Row, finite
from raytrain_gpt.config.sections import SpikesSection
from raytrain_gpt.core.device import Moment, Span, peak_memory_bytes
from raytrain_gpt.core.loop import StepResult
from raytrain_gpt.core.spikes import BadStep, BadStreak, SpikeDetector
from raytrain_gpt.data.mixed_order import MixedOrder
from raytrain_gpt.data.order import BatchRanges, batch_before, extend_order_hash, skip_past
from raytrain_gpt.ingest.feed import TrainFeed
from raytrain_gpt.ingest.ray_dataset import IngestSpec


@dataclass
class Position:
    """Data position of a run, stored in every checkpoint: its next batch and order hash."""

    next_batch: int
    order_hash: str
    skipped: BatchRanges


@dataclass(frozen=True)
class _Window:
    """Steps between two flushes, with values that are on the host once `end` has passed.

    Attributes:
        forward: The forward passes of each step.
        seconds_excluded: Seconds since the previous window that were not training.
    """

    steps: list[StepResult]
    forward: list[Sequence[Span]]
    losses: Tensor
    norms: Tensor
    scales: Tensor | None
    end: Moment
    seconds_excluded: float


class StepLog:
    """Finished steps that are not reported yet.

    Args:
        rows_before: Last rows before this attempt, so that the detector judges as in an unbroken run.
        flops_per_token: FLOPs of a token's forward and backward pass.
        peak_flops: FLOP/s of one worker's device, or None if unlisted.
        slowed: Steps slowed by a profile, whose speed is not reported.

    Attributes:
        bad_streak: Bad steps in a row that require a rollback, or None.
    """

    def __init__(
        self,
        ingest: IngestSpec,
        resumed: Checkpoint | None,
        rows_before: list[Row],
        collectives: Collectives,
        feed: TrainFeed,
        *,
        spikes: SpikesSection,
        flops_per_token: float,
        peak_flops: float | None,
        device: torch.device,
        slowed: range,
    ) -> None:
        self._order, self._collectives, self._feed = ingest.order(), collectives, feed
        self._datasets, self._seq_len = ingest.data.names, ingest.seq_len
        self._batch_tokens = ingest.plan.config.train.global_batch_tokens
        before = [
            (row["step"], row["train/loss"], row["optim/grad_norm"], row.get("optim/loss_scale"))
            for row in rows_before
        ]
        self._detector = SpikeDetector(spikes, before)
        self._flops_per_token = flops_per_token
        self._peak_flops = (peak_flops or math.nan) * collectives.world_size
        self._device, self._slowed = device, slowed
        self._pending: list[tuple[StepResult, Sequence[Span]]] = []
        self._unread: deque[_Window] = deque()
        self._clock_from = self._began = self._epoch_began = Moment(device)
        self._seconds_excluded = 0.0
        self._steps_done = 0
        order_hash = resumed.state.order_hash if resumed else ingest.data.hash
        self.position = Position(ingest.first_batch, order_hash, ingest.skipped)
        self.bad_streak: BadStreak | None = None

    @property
    def in_bad_stretch(self) -> bool:
        """Whether the newest judged step had a bad loss."""
        return bool(self._detector.streak)

    def reject_weights(self, step: int) -> None:
        """Roll back from a reported step with weights that are not finite.

        The update before the first bad loss made them so, and its batch is skipped too.
        """
        skipped, streak = self.position.skipped, self._detector.streak
        first = streak[0] - 1 if streak else step
        batch = batch_before(self.position.next_batch, 1, skipped)
        self.bad_streak = BadStreak(first, step, batch_before(batch, step - first, skipped), batch)

    def start_clock(self) -> None:
        """Start measuring; the first step follows."""
        self._clock_from = self._began = self._epoch_began = Moment(self._device)

    def exclude_time(self, seconds: float) -> None:
        """Exclude seconds that were not training from the steps until the next `flush`."""
        self._seconds_excluded += seconds

    def add(self, result: StepResult, forward: Sequence[Span] = ()) -> None:
        """Add a result, and its forward passes, without reading it from the device."""
        self._pending.append((result, forward))

    def flush(self, late: bool = False) -> list[Row]:
        """Return rows for unreported steps, stopping at a streak of bad ones.

        Args:
            late: Report only steps up to the last flush, without waiting for the device.
        """
        if self._pending:
            self._unread.append(self._copied())
        rows: list[Row] = []
        while len(self._unread) > late and self.bad_streak is None:
            rows += self._read(self._unread.popleft())
        return rows

    def _copied(self) -> _Window:
        """Start copying the pending results to the host (from a GPU: to pinned memory)."""
        pending, self._pending = self._pending, []
        steps = [result for result, _ in pending]
        scales = [step.loss_scale for step in steps if step.loss_scale is not None]
        excluded, self._seconds_excluded = self._seconds_excluded, 0.0
        return _Window(
            steps,
            [forward for _, forward in pending],
            losses=_to_host([step.loss for step in steps]),
            norms=_to_host([step.grad_norm.float() for step in steps]),
            scales=_to_host(scales) if scales else None,  # all steps of a run have one, or none
            end=Moment(self._device),
            seconds_excluded=excluded,
        )

    def _read(self, window: _Window) -> list[Row]:
        steps = window.steps
        # Waits until the window's values are on the host. The host runs ahead of the device, so only the
        # mean over a window is meaningful.
        seconds = window.end.seconds_since(self._clock_from) - window.seconds_excluded
        sums = [self._feed.take_hash_sums() for _ in steps]
        forward_s = [sum(end.seconds_since(at) for at, end in spans) for spans in window.forward]
        # Every rank sums in rank order and gets the same bits. The float64 mean of equal losses (exact sums)
        # is exactly that loss.
        of_ranks = self._gathered(
            loss=window.losses.double(),
            wait_s=torch.tensor([step.data_wait_s for step in steps], dtype=torch.float64),
            forward_s=torch.tensor(forward_s, dtype=torch.float64),
            delivered=torch.tensor([delivered for delivered, _ in sums]),
            skips=(~torch.isfinite(window.norms)).long(),
            peak_bytes=torch.full((len(steps),), peak_memory_bytes(self._device)),
        )
        losses, waits = (of_ranks[key].sum(0) / len(of_ranks[key]) for key in ("loss", "wait_s"))
        delivered, skips = of_ranks["delivered"].sum(0), of_ranks["skips"].sum(0)
        scales = [None] * len(steps) if window.scales is None else window.scales.tolist()
        self._clock_from = window.end
        self._steps_done += len(steps)
        in_all_s = window.end.seconds_since(self._began)
        step_time_s = seconds / len(steps)
        rows: list[Row] = []
        for i, result in enumerate(steps):
            # Ray Data promises no assignment of rows to ranks, so delivery is checked here.
            if int(delivered[i]) != sums[i][1]:
                raise RuntimeError(
                    f"step {result.step}: the ranks did not receive the sequences of the plan"
                )
            batch = skip_past(self.position.next_batch, self.position.skipped)
            self.position.order_hash = extend_order_hash(self.position.order_hash, sums[i][1])
            self.position.next_batch = batch + 1
            loss, norm = float(losses[i]), float(window.norms[i])
            is_slowed = result.step in self._slowed
            tokens_per_s = math.nan if is_slowed else self._batch_tokens / step_time_s
            row: Row = {
                "step": result.step,
                "train/loss": finite(loss),
                "optim/lr": result.lr,
                "optim/grad_norm": finite(norm),
                "perf/tokens_per_s": finite(tokens_per_s),
                "perf/step_time_s": step_time_s,
                "perf/data_wait_s": float(waits[i]),
                "perf/mfu": finite(tokens_per_s * self._flops_per_token / self._peak_flops),
                "data/epoch": self._order.epoch(batch),
                "data/tokens_seen": result.step * self._batch_tokens,
                "data/order_hash": self.position.order_hash,
                **self._tokens_by_dataset(result.step),
                "perf/tokens_per_s_overall": self._steps_done * self._batch_tokens / in_all_s,
                "perf/peak_memory_bytes": int(of_ranks["peak_bytes"].max()),
            }
            rows.append(row if scales[i] is None else {**row, "optim/loss_scale": scales[i]})
            if self._order.epoch(skip_past(batch + 1, self.position.skipped)) > row["data/epoch"]:
                rows.append(self._end_of_epoch(row, window.end))
            bad = self._detector.judge(result.step, loss, norm, scales[i])
            if bad is not None:
                rows.append(_event(bad, loss, norm, batch, int(skips[i])))
            if self._detector.out_of_patience:
                streak = self._detector.streak
                first = batch_before(batch, result.step - streak[0], self.position.skipped)
                self.bad_streak = BadStreak(streak[0], result.step, first, batch)
                break  # later steps are repeated after the rollback
        if self._collectives.world_size > 1 and self.bad_streak is None and not is_slowed:
            last = next(row for row in reversed(rows) if "event" not in row)
            last["perf/rank_forward_s"] = _means(of_ranks["forward_s"])
            last["perf/rank_data_wait_s"] = _means(of_ranks["wait_s"])
        return rows

    def _gathered(self, **columns: Tensor) -> dict[str, Tensor]:
        """Gather columns of 64-bit numbers, (steps,), as (ranks, steps): one collective carries all bits."""
        sent = torch.stack([column.view(torch.int64) for column in columns.values()])
        received = self._collectives.all_gather_rows(sent.flatten()).view(-1, *sent.shape)
        return {
            name: bits.contiguous().view(column.dtype)
            for (name, column), bits in zip(columns.items(), received.unbind(1), strict=True)
        }

    def _end_of_epoch(self, row: Row, now: Moment) -> Row:
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
            f"data/tokens/{name}": sequences * self._seq_len
            for name, sequences in zip(self._datasets, trained, strict=True)
        }


def _to_host(scalars: list[Tensor]) -> Tensor:
    """Copy scalars to the host at once, from a GPU asynchronously to pinned memory."""
    return torch.stack(scalars).to("cpu", non_blocking=True)


def _means(of_ranks: Tensor) -> list[float]:
    """Return the mean of each rank's steps, in microseconds."""
    means: list[float] = of_ranks.numpy().mean(1).round(6).tolist()
    return means


def _event(bad: BadStep, loss: float, norm: float, batch: int, skipping_ranks: int) -> Row:
    row: Row = {
        "step": bad.step,
        "event": "spike" if bad.finite else "nonfinite",
        "time": time.time(),
        "batch": batch,
        "loss": finite(loss),
        "grad_norm": finite(norm),
    }
    if bad.finite:
        zscores = {"loss_zscore": bad.loss_zscore, "grad_norm_zscore": bad.grad_norm_zscore}
        return {**row, **{k: None if z is None else round(z, 2) for k, z in zscores.items()}}
    return {**row, "skipped_on_ranks": skipping_ranks}
