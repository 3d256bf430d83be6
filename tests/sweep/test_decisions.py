"""Decisions of successive halving: the same in any order of events."""

from __future__ import annotations

import itertools
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from raytrain_gpt.storage.location import Location
from raytrain_gpt.sweep.halving import Halving
from raytrain_gpt.sweep.history import History
from raytrain_gpt.sweep.spec import Asha

NAMES = [f"{number:03d}" for number in range(6)]


def halving() -> Halving:
    """Make the rule for a budget of 90 tokens: rungs at 10 and 30."""
    return Halving(Asha(kind="asha", grace_tokens=10, reduction_factor=3), 90, NAMES)


def outcomes(rule: Halving, losses: list[list[float]], order: list[int]) -> dict[str, int]:
    """Run all trials; whose turn it is follows `order`. Returns the tokens at which each stopped."""
    reached, asked, ended = dict.fromkeys(NAMES, 0), set[str](), dict[str, int]()
    turns = itertools.cycle([*order, *range(6)])
    while len(ended) < len(NAMES):
        name = NAMES[next(turns)]
        if name in ended:
            continue
        if name not in asked:
            reached[name] += 10
            rule.report(name, reached[name], losses[NAMES.index(name)][reached[name] // 10 - 1])
            asked.add(name)
        if rule.missing(name, reached[name]):
            continue  # it waits
        asked.remove(name)
        if reached[name] == 90 or not rule.passes(name, reached[name]):
            ended[name] = reached[name]
            rule.end(name)
    return dict(sorted(ended.items()))


@given(
    losses=st.lists(st.lists(st.floats(0, 10), min_size=9, max_size=9), min_size=6, max_size=6),
    order=st.lists(st.integers(0, 5), max_size=60),
)
def test_no_verdict_depends_on_who_comes_first(losses: list[list[float]], order: list[int]) -> None:
    one_after_another = [number for number in range(6) for _ in range(9)]
    assert outcomes(halving(), losses, order) == outcomes(halving(), losses, one_after_another)


def test_a_trial_is_stopped_at_a_rung_only_if_earlier_ones_were_better_there() -> None:
    losses = [[1.0] * 9, [2.0] * 9, [0.5, 3.0, 3.0, *[3.0] * 6], [0.4] * 9, [1.5] * 9, [9.0] * 9]
    assert [*outcomes(halving(), losses, []).values()] == [90, 10, 30, 90, 10, 10]


def test_a_verdict_waits_for_earlier_trials_until_they_end() -> None:
    rule = halving()
    rule.report("002", 10, 1.0)
    assert rule.missing("002", 10) == ["000", "001"]
    rule.report("000", 10, 0.5)
    rule.end("001")
    assert rule.missing("002", 10) == []
    assert not rule.passes("002", 10)
    assert rule.missing("002", 20) == []
    assert rule.passes("002", 20), "20 tokens is not a rung"


def test_a_history_that_is_replayed_has_the_same_verdicts(tmp_path: Path) -> None:
    history = History(Location.of(tmp_path))
    numbers = {"tokens_per_s": 1.0, "elapsed_s": 1.0, "run_dir": "r", "values": {}, "step": 1}
    for name, loss in (("000", 1.0), ("001", 2.0)):
        history.add("report", name, tokens_seen=10, objective=loss, **numbers)
    history.add("ended", "000", state="failed")
    rule = halving()
    rule.replay(History(Location.of(tmp_path)).events)
    assert not rule.passes("001", 10)
    assert rule.missing("001", 30) == ["000", "001"], "a failed trial runs again"
