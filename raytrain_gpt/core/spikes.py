"""Which steps are bad: not finite, or a loss or gradient norm far above those just before.

A value is a spike when it lies more than `spike_zscore` deviations above the rolling mean; values below
it never are. Steps with a bad loss stay out of mean and deviation, so that a long spike cannot make
itself normal, and count towards `spike_patience`. A large gradient norm alone is marked, but since
clipping bounds its update it does not count, and since norms may settle at a higher level it enters the
window.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from raytrain_gpt.config.schema import SpikesSection

_LEAST_DEVIATION = 0.01
"""Of the mean: where values hardly vary, a small step up is no spike."""


@dataclass(frozen=True)
class BadStep:
    """A step that is not like the good ones before.

    Attributes:
        step: Its number.
        finite: Whether loss and gradient norm were; if not, the update was skipped.
        loss_zscore: Deviations of the loss above the rolling mean; None while there is none.
        grad_norm_zscore: The same of the gradient norm.
    """

    step: int
    finite: bool
    loss_zscore: float | None = None
    grad_norm_zscore: float | None = None


@dataclass(frozen=True)
class BadStretch:
    """So many bad steps in a row that the run goes back before them.

    Attributes:
        first_step: The first of them.
        last_step: The one that exhausted the patience.
        first_batch: Global batch of the first.
        last_batch: Global batch of the last.
    """

    first_step: int
    last_step: int
    first_batch: int
    last_batch: int


class SpikeDetector:
    """Judges steps in their order.

    Args:
        config: Thresholds; with `spike_detection` off only what is not finite is bad.
        before: (step, loss, gradient norm, loss scale) of the steps before the first one, so that a run
            that goes on judges like an unbroken one.

    Attributes:
        streak: Steps with a bad loss in a row up to now.
    """

    def __init__(
        self,
        config: SpikesSection,
        before: Iterable[tuple[int, float | None, float | None, float | None]] = (),
    ) -> None:
        self._config = config
        self._losses: deque[float] = deque(maxlen=config.spike_window_steps)
        self._norms: deque[float] = deque(maxlen=config.spike_window_steps)
        self.streak: list[int] = []
        for step, loss, norm, scale in before:
            loss, norm = (math.nan if value is None else value for value in (loss, norm))
            self.judge(step, loss, norm, scale)

    def judge(
        self, step: int, loss: float, grad_norm: float, loss_scale: float | None = None
    ) -> BadStep | None:
        """What is wrong with a step, None for a good one.

        A step whose gradients overflowed because of its loss scale is neither: it changed nothing, and
        what comes next is judged as if it had not been.
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
        if not loss_is_bad:
            self._losses.append(loss)
            self._norms.append(grad_norm)
        if not (loss_is_bad or norm_is_bad):
            return None
        return BadStep(step, finite=True, loss_zscore=loss_z, grad_norm_zscore=norm_z)

    @property
    def gives_up(self) -> bool:
        """Whether the streak is long enough to go back before it."""
        return self._config.spike_detection and len(self.streak) >= self._config.spike_patience


def _zscore(value: float, window: deque[float]) -> float | None:
    assert window.maxlen is not None
    if len(window) < window.maxlen // 4:
        return None
    mean = fmean(window)
    # statistics.pstdev is exact, and ten times as slow: that is felt where a step takes milliseconds.
    deviation = math.sqrt(fmean((x - mean) * (x - mean) for x in window))
    return (value - mean) / max(deviation, _LEAST_DEVIATION * abs(mean), 1e-12)


def overflowed(loss: float, grad_norm: float, loss_scale: float | None) -> bool:
    """Whether a step's gradients left the range of fp16 only because of the factor.

    Args:
        loss: Of the step, over all ranks.
        grad_norm: Of the step.
        loss_scale: Its factor; None: there was none.
    """
    finite = abs(loss) < math.inf
    return loss_scale is not None and loss_scale > 1 and finite and not grad_norm < math.inf
