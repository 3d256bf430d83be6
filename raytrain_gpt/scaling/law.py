"""Scaling laws: the loss of a model of N parameters after D tokens, fitted to the runs of a study.

L(N, D) = E + A·N^-α + B·D^-β (Hoffmann et al., 2022, equation 2), fitted by variable projection: for every
(α, β) of a grid the best E, A, B ≥ 0 follow from linear solves, and the grid is refined around the best
point. The objective is theirs, too: the Huber loss of log-loss errors with threshold 1e-3 (section 3.3).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeFloat, PositiveFloat

from raytrain_gpt.config.kinds import Strict
from raytrain_gpt.errors import DataError
from raytrain_gpt.format import count

Floats = NDArray[np.float64]

_HUBER_THRESHOLD = 1e-3
"""Errors of the log loss above it count linearly."""
MIN_RUNS = 5
"""A law has five numbers."""
EXPONENTS = (0.05, 1.2)
"""Range of α and β; published laws lie between 0.2 and 0.8."""
_GRID, _ZOOMS, _ZOOMED_GRID = 12, 5, 7
_ROUNDS = 6
"""Gauss-Newton rounds per solve, each with new Huber weights."""
_SUBSETS = np.array([[i >> bit & 1 for bit in range(3)] for i in range(1, 8)], bool)
"""Which of E, A and B are not zero: the best feasible subset minimizes over E, A, B ≥ 0."""

_HELD_OUT_ABOVE = 1 / 4
"""Fraction of a study's largest compute above which its runs test the law that the others give."""
_HELD_OUT_QUANTILE, _HELD_OUT_FACTOR = 0.9, 2.0
"""The interval is this multiple of this quantile of the hold-out's errors: on public tables it covered 90 to
100% of larger runs, and 90% bootstraps covered 0 to 14%."""


class Law(Strict, alias_generator=str.lower, populate_by_name=True):
    """L(N, D) = E + A·N^-α + B·D^-β in nats per token; files have `e`, `a` and `b`."""

    E: NonNegativeFloat
    A: NonNegativeFloat
    B: NonNegativeFloat
    alpha: PositiveFloat
    beta: PositiveFloat
    objective: NonNegativeFloat
    """Mean Huber loss of the fit."""
    half_width: NonNegativeFloat | None = None
    """Half of the interval, or None if too few runs are small enough for a hold-out."""

    def predict(self, parameters: Floats | float, tokens: Floats | float) -> Floats:
        """Predict losses in nats per token, of the broadcast shape."""
        n, d = np.asarray(parameters, float), np.asarray(tokens, float)
        return np.asarray(self.E + self.A * n**-self.alpha + self.B * d**-self.beta)

    def optimal(self, compute: float) -> tuple[float, float]:
        """Return N and D of the lowest loss for a compute of 6·N·D FLOPs (Hoffmann et al., equation 4).

        Raises a DataError if the law does not depend on both.
        """
        if min(self.A, self.B) <= 0:
            raise DataError(
                "the law has no optimum: its loss does not fall with size and tokens; add sizes and lengths"
            )
        ratio = (self.alpha * self.A) / (self.beta * self.B)
        n = ratio ** (1 / (self.alpha + self.beta))
        n *= (compute / 6) ** (self.beta / (self.alpha + self.beta))
        return n, compute / 6 / n

    def interval(self, parameters: float, tokens: float) -> tuple[float, float] | None:
        """Return the lowest and highest expected loss, or None without a hold-out."""
        if self.half_width is None:
            return None
        loss = float(self.predict(parameters, tokens))
        return loss - self.half_width, loss + self.half_width


def fit_law(parameters: Floats, tokens: Floats, losses: Floats) -> Law:
    """Fit a law to the final losses of a study in nats per token, with its hold-out; all are (n,).

    The parameters are FLOPs per token / 6, so that the head counts. Raises a DataError for fewer than five
    runs, or numbers that are not positive.
    """
    n, d, seen = (np.asarray(values, float) for values in (parameters, tokens, losses))
    if len(n) < MIN_RUNS:
        raise DataError(
            f"{count(len(n), 'run')} cannot determine five numbers; use at least {MIN_RUNS}"
        )
    if not (np.isfinite([n, d, seen]).all() and min(n.min(), d.min(), seen.min()) > 0):
        raise DataError("parameters, tokens and losses must be finite and above 0")
    law = _fitted(n, d, seen)
    compute = n * d
    large = compute > compute.max() * _HELD_OUT_ABOVE
    if (~large).sum() < MIN_RUNS:
        return law
    smaller = _fitted(n[~large], d[~large], seen[~large])
    errors = np.abs(smaller.predict(n[large], d[large]) - seen[large])
    half_width = _HELD_OUT_FACTOR * float(np.quantile(errors, _HELD_OUT_QUANTILE))
    return law.model_copy(update={"half_width": half_width})


def _fitted(n: Floats, d: Floats, seen: Floats) -> Law:
    low, high = np.log(EXPONENTS)
    alphas = betas = np.exp(np.linspace(low, high, _GRID))
    step = (high - low) / (_GRID - 1)
    for _ in range(_ZOOMS + 1):
        grid = np.stack([grid.ravel() for grid in np.meshgrid(alphas, betas)], 1)  # (grid, 2)
        solutions, objectives = _solve(grid, n, d, seen)
        best = int(objectives.argmin())
        alpha, beta = grid[best]
        steps = np.linspace(-step, step, _ZOOMED_GRID)
        alphas, betas = (np.exp(np.clip(np.log(at) + steps, low, high)) for at in (alpha, beta))
        step = steps[-1] - steps[-2]
    # The terms are scaled to 1 at the geometric means, so that the solves are well conditioned.
    e, a, b = solutions[best]
    scale_n, scale_d = np.exp(np.log(n).mean()), np.exp(np.log(d).mean())
    return Law(
        E=e,
        A=a * scale_n**alpha,
        B=b * scale_d**beta,
        alpha=alpha,
        beta=beta,
        objective=objectives[best],
    )


def _solve(exponents: Floats, n: Floats, d: Floats, seen: Floats) -> tuple[Floats, Floats]:
    """Return the best E, A, B ≥ 0, (grid, 3), and the objective, (grid,), for exponents (grid, 2)."""
    scaled_n, scaled_d = (np.log(values) - np.log(values).mean() for values in (n, d))
    terms = np.stack(
        [
            np.ones((len(exponents), len(n))),
            np.exp(-exponents[:, :1] * scaled_n),
            np.exp(-exponents[:, 1:] * scaled_d),
        ],
        axis=2,
    )  # (grid, run, 3)
    predicted = np.broadcast_to(seen, terms.shape[:2])
    for _ in range(_ROUNDS):
        # log p ≈ log q + (p − q) / q around the last prediction q: linear in E, A, B.
        error = np.log(predicted / seen)
        weight = np.minimum(1, _HUBER_THRESHOLD / np.maximum(np.abs(error), 1e-12)) / predicted**2
        target = predicted * (1 - error)
        weighted = terms * weight[:, :, None]
        gram = weighted.transpose(0, 2, 1) @ terms
        moment = (weighted.transpose(0, 2, 1) @ target[:, :, None])[:, :, 0]
        solution = _non_negative(gram, moment)
        predicted = np.maximum((terms @ solution[:, :, None])[:, :, 0], 1e-6 * seen)
    error = np.abs(np.log(predicted / seen))
    huber = np.where(
        error <= _HUBER_THRESHOLD, error**2 / 2, _HUBER_THRESHOLD * (error - _HUBER_THRESHOLD / 2)
    )
    return solution, huber.mean(1)


def _non_negative(gram: Floats, moment: Floats) -> Floats:
    """Minimize x·G·x / 2 − m·x over x ≥ 0, zero outside a subset; G is (grid, 3, 3), m (grid, 3)."""
    best = np.zeros_like(moment)
    lowest = np.zeros(len(moment))
    for subset in _SUBSETS:
        masked = gram * np.outer(subset, subset) + np.diag(~subset)
        found = np.linalg.solve(masked, (moment * subset)[:, :, None])[:, :, 0]
        value = -(moment * found).sum(1) / 2  # of a stationary point
        better = (found >= 0).all(1) & (value < lowest)
        best[better], lowest[better] = found[better], value[better]
    return best
