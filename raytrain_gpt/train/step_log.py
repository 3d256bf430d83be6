"""Rows from step results: reduced over the ranks, checked against the plan and judged.

Results stay on the device until `flush`, which reduces losses over the ranks, checks the delivered
sequences, extends the order hash by one batch per step, and judges every step: a step that is not finite
changed nothing, a spike is marked, and too many bad steps in a row roll back. A late flush reads the steps of
the flush before, so that the device never waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raytrain_gpt.checkpoint.catalog import Checkpoint
from raytrain_gpt.checkpoint.collectives import Collectives
from raytrain_gpt.config.sections import SpikesSection
from raytrain_gpt.core.device import Moment, Span, peak_memory_bytes
from raytrain_gpt.core.loop import StepResult
from raytrain_gpt.core.spikes import BadStep, BadStreak, SpikeDetector
from raytrain_gpt.data.mixed_order import MixedOrder
from raytrain_gpt.data.order import BatchRanges, batch_before, extend_order_hash, skip_past
from raytrain_gpt.ingest.feed import TrainFeed
from raytrain_gpt.ingest.ray_dataset import IngestSpec
from raytrain_gpt.tracking.run_files import Row, finite


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
        seconds_excluded: Seconds since the window before that were not training.
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
        self._batch_tokens = ingest.batch_sequences * ingest.seq_len
        before = [
            (row["step"], row["train/loss"], row["optim/grad_norm"], row.get("optim/loss_scale"))
            for row in rows_before
        ]
        self._detector = SpikeDetector(spikes, before)
        self._flops_per_token, self._peak_flops = flops_per_token, peak_flops
        self._device, self._slowed = device, slowed
        self._pending: list[tuple[StepResult, Sequence[Span]]] = []
        self._unread: deque[_Window] = deque()
        self._clock_from = self._began = Moment(device)
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
        self._clock_from = self._began = Moment(self._device)

    def exclude_time(self, seconds: float) -> None:
        """Exclude seconds that were not training from the steps until the next `flush`."""
        self._seconds_excluded += seconds

    def add(self, result: StepResult, forward: Sequence[Span] = ()) -> None:
        """Add a result, and its forward passes, without reading it from the device."""
        self._pending.append((result, forward))

    def flush(self, late: bool = False) -> list[Row]:
        """Rows of all steps that have none yet, up to a streak of bad steps.

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
            scales=_to_host(scales) if scales else None,  # in a run all steps have one or none has
            end=Moment(self._device),
            seconds_excluded=excluded,
        )

    def _read(self, window: _Window) -> list[Row]:
        # Float64 values travel as the bits of int64, so one collective carries losses, waits, hashes and
        # flags of all steps. Every rank then sums in rank order and gets the same bits.
        steps = window.steps
        # Waits until the window's values are on the host.
        seconds = window.end.seconds_since(self._clock_from) - window.seconds_excluded
        # The host runs ahead of the device, so only the mean over a window is meaningful.
        step_time_s = seconds / len(steps)
        sums = [self._feed.take_hash_sums() for _ in steps]
        scales = [None] * len(steps) if window.scales is None else window.scales.tolist()
        # The float64 mean of equal losses (exact sums) is exactly that loss.
        losses = window.losses.double()
        waits = torch.tensor([step.data_wait_s for step in steps], dtype=torch.float64)
        forward = torch.tensor([_seconds(spans) for spans in window.forward], dtype=torch.float64)
        delivered = torch.tensor([hash_sum for hash_sum, _ in sums])
        skips = (~torch.isfinite(window.norms)).long()
        peak_bytes = torch.tensor([peak_memory_bytes(self._device)])
        fields = [
            *(values.view(torch.int64) for values in (losses, waits, forward)),
            *(delivered, skips, peak_bytes),
        ]
        gathered = self._collectives.all_gather_rows(torch.cat(fields))
        losses, waits, forward, delivered, skips, peak_bytes = torch.split(
            gathered, [*map(len, fields)], 1
        )
        losses, waits, forward = (
            bits.contiguous().view(torch.float64) for bits in (losses, waits, forward)
        )
        forward_s, data_wait_s = forward.numpy(), waits.numpy()
        losses, waits = (values.sum(0) / len(gathered) for values in (losses, waits))
        delivered, skips = delivered.sum(0), skips.sum(0)
        self._clock_from = window.end
        self._steps_done += len(steps)
        tokens_done = self._steps_done * self._batch_tokens
        since_start = {
            "perf/tokens_per_s_overall": tokens_done / window.end.seconds_since(self._began),
            "perf/peak_memory_bytes": int(peak_bytes.max()),
        }
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
            row = self._row(result, batch, loss, norm, step_time_s, float(waits[i]))
            scale = {} if scales[i] is None else {"optim/loss_scale": scales[i]}
            rows.append(row | self._tokens_by_dataset(result.step) | since_start | scale)
            bad = self._detector.judge(result.step, loss, norm, scales[i])
            if bad is not None:
                rows.append(_event(bad, loss, norm, batch, int(skips[i])))
            if self._detector.out_of_patience:
                streak = self._detector.streak
                first = batch_before(batch, result.step - streak[0], self.position.skipped)
                self.bad_streak = BadStreak(streak[0], result.step, first, batch)
                break  # later steps are repeated after the rollback
        is_slowed = self.bad_streak is not None or steps[-1].step in self._slowed
        if self._collectives.world_size > 1 and not is_slowed:
            last = next(row for row in reversed(rows) if "event" not in row)
            last["perf/rank_forward_s"] = forward_s.mean(1).round(6).tolist()
            last["perf/rank_data_wait_s"] = data_wait_s.mean(1).round(6).tolist()
        return rows

    def _row(
        self,
        result: StepResult,
        batch: int,
        loss: float,
        norm: float,
        step_time_s: float,
        wait_s: float,
    ) -> Row:
        tokens_per_s = None if result.step in self._slowed else self._batch_tokens / step_time_s
        mfu = None
        if self._peak_flops is not None and tokens_per_s is not None:
            peak = self._peak_flops * self._collectives.world_size
            mfu = tokens_per_s * self._flops_per_token / peak
        return {
            "step": result.step,
            "train/loss": finite(loss),
            "optim/lr": result.lr,
            "optim/grad_norm": finite(norm),
            "perf/tokens_per_s": tokens_per_s,
            "perf/step_time_s": step_time_s,
            "perf/data_wait_s": wait_s,
            "perf/mfu": mfu,
            "data/epoch": self._order.epoch(batch),
            "data/tokens_seen": result.step * self._batch_tokens,
            "data/order_hash": self.position.order_hash,
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


def _seconds(spans: Sequence[Span]) -> float:
    return sum(end.seconds_since(start) for start, end in spans)


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
