"""Rules by which trials wait for others, or stop: none, or successive halving in the plan's order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from raytrain_gpt.sweep.history import ENDED, Event
from raytrain_gpt.sweep.spec import Asha


class Rule:
    """Rule that lets all trials continue, and base class of the others."""

    def __init__(self) -> None:
        self._ended: set[str] = set()

    def replay(self, events: Iterable[Event]) -> None:
        """Add the events of a history."""
        for event in events:
            if event["event"] == "report":
                self.report(event["trial"], event["tokens_seen"], event["objective"])
            elif event["event"] == "ended" and event["state"] in ENDED:
                self.end(event["trial"])

    def report(self, name: str, tokens_seen: int, objective: float) -> None:
        """Note a trial's objective."""

    def end(self, name: str) -> None:
        """Note that a trial has ended and will not report again."""
        self._ended.add(name)

    def missing(self, name: str, tokens_seen: int) -> list[str]:
        """Return the trials that the verdict on a report has to wait for."""
        return []

    def passes(self, name: str, tokens_seen: int) -> bool:
        """Whether a trial continues after a report; no other report may be missing."""
        return True


class Halving(Rule):
    """Successive halving (Li et al., 2020), judged in the plan's order: scores at the rungs, and verdicts.

    At a rung a trial is compared with the trials before it in the plan, as if they ran one after another. So
    no decision depends on speed, on the number of concurrent trials, or on a restart. The price is that a
    trial waits at a rung until the earlier ones have reached it or ended.

    Args:
        names: All trials, in the plan's order.
        maximize: Whether a higher objective is better.
    """

    def __init__(
        self, scheduler: Asha, budget_tokens: int, names: Sequence[str], maximize: bool = False
    ) -> None:
        super().__init__()
        self._factor, self._sign = scheduler.reduction_factor, 1 if maximize else -1
        self._places = {name: place for place, name in enumerate(names)}
        self._scores: dict[int, dict[str, float]] = {}
        rung = scheduler.grace_tokens
        while rung < budget_tokens:
            self._scores[rung] = {}
            rung *= self._factor

    def report(self, name: str, tokens_seen: int, objective: float) -> None:
        if tokens_seen in self._scores:
            self._scores[tokens_seen].setdefault(name, self._sign * objective)

    def missing(self, name: str, tokens_seen: int) -> list[str]:
        scores = self._scores.get(tokens_seen)
        if scores is None:
            return []
        needed = [*self._places][: self._places[name] + 1]
        return [one for one in needed if one not in scores and one not in self._ended]

    def passes(self, name: str, tokens_seen: int) -> bool:
        scores = self._scores.get(tokens_seen, {})
        earlier = [s for one, s in scores.items() if self._places[one] < self._places[name]]
        if not earlier:
            return True
        return bool(scores[name] >= np.percentile(earlier, 100 * (1 - 1 / self._factor)))
