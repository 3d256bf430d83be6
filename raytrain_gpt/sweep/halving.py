"""Rules by which trials wait for others, or stop: pure functions of the history."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from raytrain_gpt.sweep.history import History
from raytrain_gpt.sweep.spec import Asha

Rule = Callable[[str, int], bool | None]
"""Trial, tokens of its last report (0 before it starts) -> whether it continues; None: wait for others."""


def halving(asha: Asha, budget_tokens: int, names: Sequence[str], history: History) -> Rule:
    """Return the rule of successive halving (Li et al., 2020), judged in the plan's order, that of `names`.

    At a rung a trial is compared with the trials before it in the plan, as if they ran one after another. So
    no decision depends on speed, on the number of concurrent trials, or on a restart. The price is that a
    trial waits at a rung until the earlier ones have reached it or ended.
    """
    rungs, rung = set(), asha.grace_tokens
    while rung < budget_tokens:
        rungs.add(rung)
        rung *= asha.reduction_factor

    def rule(name: str, tokens_seen: int) -> bool | None:
        if tokens_seen not in rungs:
            return True

        def score(one: str) -> float | None:
            return dict(history.trial(one).curve).get(tokens_seen)

        earlier = names[: names.index(name)]
        if any(one in history.open and score(one) is None for one in earlier):
            return None
        scores = [seen for one in earlier if (seen := score(one)) is not None]
        own, sign = score(name), 1 if history.maximize else -1
        if not scores or own is None:
            return True
        passing = np.percentile(np.multiply(sign, scores), 100 * (1 - 1 / asha.reduction_factor))
        return bool(sign * own >= passing)

    return rule
