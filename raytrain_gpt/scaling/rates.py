"""The peak learning rate as a power of the size, fitted to small runs.

Near its minimum, the loss is a parabola in the logarithm of the rate. The runs of all sizes share its
curvature, and its minimum moves linearly with the logarithm of the size. So one linear solve gives the rule:
loss = c[size] + k·x² + p·x + q·n·x with x = ln rate and n = ln N; the minimum is at x = −(p + q·n) / 2k.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raytrain_gpt.errors import ConfigError
from raytrain_gpt.format import amount
from raytrain_gpt.scaling.plan import RunResult

EXPONENTS = (-1.0, 0.0)
"""Bounds: published exponents lie between −0.5 and −0.1, and few runs with one seed determine them poorly."""


@dataclass(frozen=True)
class RateRule:
    """Peak rate = coefficient · N^exponent; `is_bounded` if a bound gave the exponent."""

    coefficient: float
    exponent: float
    is_bounded: bool = False

    def rate(self, parameters: float) -> float:
        """Return the rate of a size, to three digits."""
        return float(f"{self.coefficient * parameters**self.exponent:.3g}")


def fit_rates(points: Sequence[RunResult]) -> RateRule:
    """Fit the rule to runs of two or more sizes.

    Raises a ConfigError if the best rate of a size is the lowest or highest tried, or there is no minimum.
    """
    sizes = sorted({point.parameters for point in points})
    for parameters in sizes:
        _check_inside([point for point in points if point.parameters == parameters])
    finite = [point for point in points if point.loss is not None]
    x, n = (np.log([getattr(p, name) for p in finite]) for name in ("peak_lr", "parameters"))
    middle_x, middle_n = x.mean(), n.mean()
    x, n = x - middle_x, n - middle_n
    is_size = np.array([[point.parameters == size for size in sizes] for point in finite], float)
    terms = np.column_stack([is_size, x**2, x, n * x])
    losses = np.array([point.loss for point in finite], float)
    solution, _, rank, _ = np.linalg.lstsq(terms, losses, rcond=None)
    curvature, slope, slope_with_size = solution[-3:]
    if rank < terms.shape[1] or curvature <= 0:
        raise ConfigError(
            "the rates tried have no minimum of the loss; add more peak_lrs, and use --resume"
        )
    fitted = -slope_with_size / (2 * curvature)
    exponent = float(np.clip(fitted, *EXPONENTS))
    log_rate = middle_x - slope / (2 * curvature) - exponent * middle_n
    return RateRule(math.exp(log_rate), exponent, exponent != fitted)


def _check_inside(points: Sequence[RunResult]) -> None:
    """Refuse the rates of one size if the best is the lowest or highest."""
    points = sorted(points, key=lambda point: point.peak_lr)
    losses = [math.inf if point.loss is None else point.loss for point in points]
    best = int(np.argmin(losses))
    if 0 < best < len(points) - 1:
        return
    ratio = points[1].peak_lr / points[0].peak_lr
    end, more = ("highest", ratio) if best else ("lowest", 1 / ratio)
    tried = ", ".join(f"{point.peak_lr:g}" for point in points)
    raise ConfigError(
        f"the best peak rate at {amount(points[0].parameters)} parameters is the {end} of {tried}, so the "
        f"optimum is unknown; add {points[best].peak_lr * more:.2g} to peak_lrs, and use --resume"
    )


def around(rate: float, tried: Sequence[float]) -> list[float]:
    """Return three rates around one, as far apart as those tried."""
    ratio = (tried[-1] / tried[0]) ** (1 / (len(tried) - 1))
    return [float(f"{rate * ratio**power:.3g}") for power in (-1, 0, 1)]
