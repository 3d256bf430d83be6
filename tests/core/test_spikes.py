"""Spike detection without false alarms: smooth and noisy curves, streaks, resumes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain_gpt.config.sections import SpikesSection
from raytrain_gpt.core.spikes import BadStep, SpikeDetector

WINDOW = SpikesSection().spike_window_steps
PATIENCE = SpikesSection().spike_patience

Steps = list[tuple[int, float, float]]
"""Rows of (step, loss, gradient norm)."""


def numbered(losses: Iterable[float], norms: Iterable[float] | None = None) -> Steps:
    losses = list(losses)
    norms = [1.0] * len(losses) if norms is None else list(norms)
    return [(i + 1, *values) for i, values in enumerate(zip(losses, norms, strict=True))]


def judged(steps: Steps, detector: SpikeDetector | None = None, **changes: object) -> list[BadStep]:
    """Return the bad steps."""
    detector = detector or SpikeDetector(SpikesSection(**changes))
    return [bad for step in steps if (bad := detector.judge(*step)) is not None]


def noisy(
    curve: Callable[[np.ndarray], np.ndarray], count: int, noise: float, seed: int
) -> np.ndarray:
    """Return a curve over steps 1 … count, with normal noise relative to its values."""
    deviations = np.random.default_rng(seed).normal(0, noise, count)
    return np.asarray(curve(np.arange(1.0, count + 1))) * (1 + deviations)


def falling(step: np.ndarray) -> np.ndarray:
    """Return a typical language-model loss: it falls from 10.8, steeply at first."""
    return 2.5 + 8.3 * step**-0.4


def rising_and_falling(step: np.ndarray) -> np.ndarray:
    """Return typical gradient norms: they rise during warm-up, then fall slowly."""
    return 0.4 + 4 * np.minimum(step / 200, 1) * np.exp(-step / 1500)


@pytest.mark.slow
@settings(max_examples=5)
@given(
    start=st.floats(0.1, 50),
    floor=st.floats(0, 20),
    half_life=st.floats(0.5, 5000),
    power=st.floats(0.05, 3),
    window=st.integers(8, 256),
)
def test_nothing_is_bad_on_smooth_falling_curves(
    start: float, floor: float, half_life: float, power: float, window: int
) -> None:
    at = np.arange(1.0, 401)
    for curve in (floor + start * 0.5 ** (at / half_life), floor + start * at**-power):
        assert judged(numbered(curve, curve), spike_window_steps=window) == []


def test_scores_are_deviations_above_the_mean_of_the_good_steps_before() -> None:
    losses = noisy(falling, WINDOW + 50, 0.02, seed=5)
    norms = noisy(rising_and_falling, WINDOW + 50, 0.1, seed=6)
    detector = SpikeDetector(SpikesSection())
    assert judged(numbered(losses, norms), detector) == []
    bad = detector.judge(999, 8.0, 9.0)
    assert bad is not None
    expected = [
        (value - window.mean()) / window.std()
        for value, window in ((8.0, losses[-WINDOW:]), (9.0, norms[-WINDOW:]))
    ]
    assert [bad.loss_zscore, bad.grad_norm_zscore] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("values", "changes", "found"),
    [
        ([5.0] * (WINDOW // 4 - 1) + [500.0], {}, []),  # before a quarter window
        ([5.0] * 200 + [0.01] + [5.0] * 20, {}, []),  # below the mean
        ([2.0] * 300 + [2.05, 2.1], {}, []),  # a small step where values hardly vary
        ([2.0] * 300 + [2.2], {}, [301]),
        # Mean 2.5, deviation 0.5:
        ([2.0, 3.0] * 100 + [4.5, 6.0], {"spike_zscore": 3.0}, [201, 202]),
        ([2.0, 3.0] * 100 + [4.5, 6.0], {"spike_zscore": 6.0}, [202]),
        ([2.0, 3.0] * 100 + [4.5, 6.0], {"spike_zscore": 1000.0}, []),
    ],
)
def test_only_values_far_above_a_known_mean_are_spikes(
    values: list[float], changes: dict[str, float], found: list[int]
) -> None:
    assert [b.step for b in judged(numbered(values, values), **changes)] == found


@settings(max_examples=6)
@given(length=st.integers(1, 3 * WINDOW), height=st.floats(1.3, 1e6))
def test_a_long_spike_does_not_make_itself_normal(length: int, height: float) -> None:
    losses = noisy(falling, 400, 0.01, seed=7)
    whole = [*losses[:200], *(losses[199] * height,) * length, *losses[200:]]
    bad = judged(numbered(whole))
    assert [b.step for b in bad] == list(range(201, 201 + length))
    kept = judged(numbered(losses))
    assert kept == []
    assert {b.loss_zscore for b in bad} == {bad[0].loss_zscore}


@pytest.mark.parametrize(
    ("where", "broken"), [("loss", math.nan), ("norm", math.inf), ("both", -math.inf)]
)
def test_what_is_not_finite_is_bad_and_stays_out_of_the_window(broken: float, where: str) -> None:
    losses, norms = noisy(falling, 300, 0.01, 8), noisy(rising_and_falling, 300, 0.05, 9)
    spiked = [*losses, 2 * losses[-1]]
    alone = judged(numbered(spiked, [*norms, norms[-1]]))
    steps = numbered(spiked, [*norms, norms[-1]])
    for at in (0, 5, 250, 300):
        loss = broken if where != "norm" else 3.0
        norm = broken if where != "loss" else 1.0
        steps.insert(at, (1000 + at, loss, norm))
    bad = judged(steps)
    assert bad[:-1] == [BadStep(step, finite=False) for step in (1000, 1005, 1250, 1300)]
    assert bad[-1:] == alone
    assert bad[-1].step == 301


@pytest.mark.parametrize("kind", ["spike", "not finite", "both in turn"])
def test_a_streak_of_bad_losses_gives_up(kind: str) -> None:
    detector = SpikeDetector(SpikesSection())
    assert judged(numbered(noisy(falling, 300, 0.01, 10)), detector) == []
    for i in range(PATIENCE):
        assert not detector.out_of_patience
        broken = kind == "not finite" or (kind == "both in turn" and i % 2)
        assert detector.judge(301 + i, math.nan if broken else 50.0, 1.0) is not None
        assert detector.streak == list(range(301, 302 + i))
    assert detector.out_of_patience


def test_large_gradient_norms_alone_never_give_up_and_become_normal() -> None:
    detector = SpikeDetector(SpikesSection())
    judged(numbered([3.0] * 200), detector)
    bad = judged([(i, 3.0, 80.0) for i in range(5 * PATIENCE)], detector)
    assert 1 <= len(bad) < PATIENCE
    assert detector.streak == []
    assert not detector.out_of_patience
    judged([(i, 30.0, 80.0) for i in range(PATIENCE - 1)], detector)
    assert detector.judge(98, 3.0, 8000.0) is not None
    assert detector.streak == [], "a good loss ends it"
    judged([(i, 30.0, 80.0) for i in range(PATIENCE)], detector)
    assert detector.out_of_patience


def test_switched_off_only_what_is_not_finite_is_bad() -> None:
    losses = [3.0] * 200 + [1e9, math.nan, math.inf] + [1e9] * (2 * PATIENCE)
    detector = SpikeDetector(SpikesSection(spike_detection=False))
    assert [b.step for b in judged(numbered(losses, [1e9, *losses[1:]]), detector)] == [202, 203]
    judged([(i, math.nan, 1.0) for i in range(2 * PATIENCE)], detector)
    assert not detector.out_of_patience


@st.composite
def runs(draw: st.DrawFn) -> Steps:
    """Return up to 500 steps with noise, short and long spikes, and non-finite steps."""
    seed, count = draw(st.integers(0, 2**32 - 1)), draw(st.integers(1, 500))
    losses, norms = (
        noisy(falling, count, 0.01, seed),
        noisy(rising_and_falling, count, 0.05, seed + 1),
    )
    for values in (losses, norms):
        for at, length, factor in draw(
            st.lists(
                st.tuples(
                    st.integers(0, count),
                    st.integers(1, 2 * PATIENCE),
                    st.sampled_from([1.5, 3.0, 100.0, math.nan, math.inf]),
                ),
                max_size=4,
            )
        ):
            values[at : at + length] *= factor
    return numbered(losses, norms)


def as_rows(steps: Steps) -> list[tuple[int, float | None, float | None, None]]:
    """Return steps as in metrics.jsonl: None for non-finite values, and no loss scale."""
    losses_and_norms = [
        (step, *(value if math.isfinite(value) else None for value in values))
        for step, *values in steps
    ]
    return [(step, loss, norm, None) for step, loss, norm in losses_and_norms]


@pytest.mark.slow
@settings(max_examples=10)
@given(runs(), st.data())
def test_a_run_that_goes_on_judges_like_an_unbroken_one(run: Steps, data: st.DataObject) -> None:
    unbroken = SpikeDetector(SpikesSection())
    expected = [
        (unbroken.judge(*step), list(unbroken.streak), unbroken.out_of_patience) for step in run
    ]
    at = data.draw(st.integers(0, len(run)))
    resumed = SpikeDetector(SpikesSection(), as_rows(run[:at]))
    found = [
        (resumed.judge(*step), list(resumed.streak), resumed.out_of_patience) for step in run[at:]
    ]
    assert found == expected[at:]
