"""Which sequences of a step make its loss and its gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
from torch import Tensor

from raytrain_gpt.columns import finite
from raytrain_gpt.config.code import Code
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.format import Log, number, table
from raytrain_gpt.replays.steps import Replay, undisturbed
from raytrain_gpt.runs.goodput import BAD_STEP_EVENTS
from raytrain_gpt.runs.provenance import RunProvenance, describe_sequence

_STEPS_BEFORE = 50
_SHOWN = 10


def explain_step(
    run: RunProvenance, step: int | None, codes: Sequence[Code | None], log: Log
) -> dict[str, Any]:
    """Replay a run to just before a step, measure the step's sequences without dropout, and log a table.

    Args:
        step: The last spike that the run recorded and kept if None.

    Returns:
        `loss` and `grad_norm` of the step, `without` the sequence of the highest loss, and `before`, the
        medians of 50 recorded steps; and `sequences`, the highest loss first, each with `share`, its fraction
        of the sum of their gradient norms.

    Raises:
        ConfigError: there is no such step.
    """
    if step is None:
        spikes = {int(row["step"]) for row in run.rows if row.get("event") in BAD_STEP_EVENTS}
        if (step := max(spikes & run.steps.keys(), default=None)) is None:
            raise ConfigError(f"run {run.dir} has no recorded spike; give the step as --step")
    rows = [row for at, row in run.steps.items() if step - _STEPS_BEFORE <= at < step]
    before = [
        median([row[key] for row in rows if row[key] is not None] or [math.nan])
        for key in ("train/loss", "optim/grad_norm")
    ]
    facts: dict[str, Any] = {"run": str(run.dir), "step": step, "before": _measure(*before)}
    facts |= undisturbed(lambda: _measured(Replay(run, step, step, codes, log=log), step))
    compared = [
        (f"step {step}", facts),
        *[("the steps before (medians)", facts["before"])] * bool(rows),
        ("the step without the first sequence below", facts["without"]),
        *((describe_sequence(one), one) for one in facts["sequences"][:_SHOWN]),
    ]
    lines = [
        (
            number(of["loss"], ".4f"),
            number(of["grad_norm"], ".3g"),
            number(of["share"], ".1%") if "share" in of else "",
            name,
        )
        for name, of in compared
    ]
    for line in table(("loss", "grad norm", "share", ""), (), lines):
        log(line)
    return facts


def _measured(replay: Replay, step: int) -> dict[str, Any]:
    replay.run_to(step - 1)
    sequences = replay.run.step(step)
    losses, norms, total = list[float](), list[float](), list[Tensor]()
    for loss, gradient in replay.sequence_gradients([one.id for one in sequences]):
        losses.append(loss)
        norms.append(_norm(gradient))
        total = [*torch._foreach_add(total, gradient)] if total else gradient
    num, shares = len(sequences), [finite(norm / sum(norms)) for norm in norms]
    worst, *others = sorted(range(num), key=lambda at: (math.isfinite(losses[at]), -losses[at]))
    ((_, its_gradient),) = replay.sequence_gradients([sequences[worst].id])
    rest, rest_norm = max(1, num - 1), _norm([*torch._foreach_sub(total, its_gradient)])
    return {
        **_measure(sum(losses) / num, _norm(total) / num),
        "without": _measure(sum(losses[at] for at in others) / rest, rest_norm / rest),
        "sequences": [
            asdict(sequences[at]) | _measure(losses[at], norms[at]) | {"share": shares[at]}
            for at in (worst, *others)
        ],
    }


def _measure(loss: float, grad_norm: float) -> dict[str, Any]:
    return {"loss": finite(loss), "grad_norm": finite(grad_norm)}


def _norm(tensors: list[Tensor]) -> float:
    return float(torch.stack(torch._foreach_norm(tensors)).norm())
