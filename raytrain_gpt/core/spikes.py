"""Bad steps: not finite, or a loss or gradient norm far above recent ones.

A value is a spike if it lies more than `spike_zscore` standard deviations above the rolling mean; low values
never do. Steps with a bad loss do not enter mean and deviation, so that a long spike cannot become normal,
and count toward `spike_patience`. A step with only a high gradient norm is recorded but does not count, since
clipping bounds its update; it enters the window, since norms may settle at a higher level.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from raytrain_gpt.config.sections import SpikesSection

_LEAST_DEVIATION = 0.01
"""Fraction of the mean; if values hardly vary, a small step up is not a spike."""


@dataclass(frozen=True)
class BadStep:
    """A step that differs from the good ones before it.

    Attributes:
        finite: Whether loss and gradient norm were finite; if not, the update was skipped.
        loss_zscore: Standard deviations of the loss above the rolling mean, or None with too few steps.
        grad_norm_zscore: The same for the gradient norm.
    """

    step: int
    finite: bool
    loss_zscore: float | None = None
    grad_norm_zscore: float | None = None


@dataclass(frozen=True)
class BadStreak:
    """Bad steps in a row that require a rollback.

    Steps and global batches are those of the first bad step and of the one that exhausted the patience.
    """

    first_step: int
    last_step: int
    first_batch: int
    last_batch: int


class SpikeDetector:
    """Detector of bad steps; give it every step in order.

    Args:
        config: Thresholds; without `spike_detection` only values that are not finite are bad.
        before: (step, loss, gradient norm, loss scale) of earlier steps, so that a resumed run judges like
            an uninterrupted one.
    """

    def __init__(
        self,
        config: SpikesSection,
        before: Iterable[tuple[int, float | None, float | None, float | None]] = (),
    ) -> None:
        self._config = config
        self._losses: deque[float] = deque(maxlen=config.spike_window_steps)
        self._norms: deque[float] = deque(maxlen=config.spike_window_steps)
        self.streak: list[int] = []  # latest consecutive steps with a bad loss
        for step, loss, norm, scale in before:
            loss, norm = (math.nan if value is None else value for value in (loss, norm))
            self.judge(step, loss, norm, scale)

    def judge(
        self, step: int, loss: float, grad_norm: float, loss_scale: float | None = None
    ) -> BadStep | None:
        """Describe a bad step, or return None for a good one.

        Steps whose gradients overflowed only because of the loss scale are ignored, since they were skipped.
        """
        if overflowed(loss, grad_norm, loss_scale):
            return None
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self.streak.append(step)
            return BadStep(step, finite=False)
        loss_z, norm_z = _zscore(loss, self._losses), _zscore(grad_norm, self._norms)
        limit = self._config.spike_zscore if self._config.spike_detection else math.inf
        loss_is_bad = loss_z is not None and loss_z > limit
        norm_is_bad = norm_z is not None and norm_z > limit
        if loss_is_bad:
            self.streak.append(step)
        else:
            self.streak = []
            self._losses.append(loss)
            self._norms.append(grad_norm)
        if not (loss_is_bad or norm_is_bad):
            return None
        return BadStep(step, finite=True, loss_zscore=loss_z, grad_norm_zscore=norm_z)

    @property
    def out_of_patience(self) -> bool:
        """Whether the streak is long enough to roll back."""
        return self._config.spike_detection and len(self.streak) >= self._config.spike_patience


def _zscore(value: float, window: deque[float]) -> float | None:
    assert window.maxlen is not None
    if len(window) < window.maxlen // 4:
        return None
    mean = fmean(window)
    # statistics.pstdev is exact but ten times slower, which matters for steps of milliseconds.
    deviation = math.sqrt(fmean((x - mean) * (x - mean) for x in window))
    return (value - mean) / max(deviation, _LEAST_DEVIATION * abs(mean), 1e-12)


def overflowed(loss: float, grad_norm: float, loss_scale: float | None) -> bool:
    """Whether gradients left fp16's range only because of the loss scale."""
    finite = abs(loss) < math.inf
    return loss_scale is not None and loss_scale > 1 and finite and not grad_norm < math.inf
