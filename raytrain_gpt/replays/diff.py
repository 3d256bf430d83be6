"""The first step and tensor that differ in two trainings, found by replaying both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from raytrain_gpt.columns import Row
from raytrain_gpt.config.code import Code
from raytrain_gpt.config.schema import changed_fields
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.format import Log, count
from raytrain_gpt.replays.steps import Replay, compared, list_changes, sha256, undisturbed
from raytrain_gpt.runs.provenance import RunProvenance

_OF_THE_RUN = {"run_name", "storage_path", "branch_from", "resume"}
_ENVIRONMENT = ("device", "threads", "num_workers", "precision", "micro_batch_sequences")


def diff_runs(
    a: RunProvenance, b: RunProvenance, codes: Sequence[Code | None], log: Log
) -> dict[str, Any]:
    """Find what differs between two runs, and the first step and tensor that do.

    Returns:
        `changes` of settings, data, code and environment, and of the values `recorded` at the first step that
        differs, each name -> `old -> new`; and the values of `diff_change`.
    """
    changes = changed_fields(_facts(a), _facts(b))
    log(f"runs: {list_changes(changes)}")
    if not (steps := sorted(a.steps.keys() & b.steps.keys())):
        raise ConfigError(f"{a.dir} and {b.dir} have no step in common; choose runs that have")
    differ = (step for step in steps if compared(a.steps[step]) != compared(b.steps[step]))
    last = next(differ, steps[-1])
    recorded = changed_fields(compared(a.steps[last]), compared(b.steps[last]))
    log(f"recorded at step {last}: {list_changes(recorded)}")
    pair = [partial(Replay, run, codes=codes) for run in (a, b)]
    return {"changes": changes, "recorded": recorded, **_compare(pair, last, last, log)}


def diff_change(
    run: RunProvenance, num_steps: int, codes: Sequence[Code | None], log: Log, **change: Any
) -> dict[str, Any]:
    """Find the first step and tensor that differ if a run's first steps are replayed with a change.

    Args:
        change: `settings` and `new_code` of `Replay`.

    Returns:
        `as_recorded`, whether what was replayed without a change had the run's rows; and if bits differ, the
        first `step` after which they do, the first `tensor` in the model's order, and the `largest` absolute
        difference, None if the shape has changed.
    """
    last = min(run.begins_at + num_steps, run.last_step)
    pair = [partial(Replay, run, codes=codes, **how) for how in ({}, change)]
    return _compare(pair, run.begins_at + 1, last, log)


def _compare(
    pair: Sequence[Callable[..., Replay]], first: int, last: int, log: Log
) -> dict[str, Any]:
    """Replay both from before step `first`, or from earlier checkpoints if they start different."""

    def find(first: int) -> dict[str, Any]:
        one, other = replays = [make(first=first, last=last, log=log) for make in pair]
        start = max(replay.step for replay in replays)
        for step in range(start, last + 1):
            for replay in replays:
                replay.run_to(step)
            if found := _difference(one, other):
                if step == start > max(replay.run.begins_at for replay in replays):
                    return find(start)
                size = "another shape" if found["largest"] is None else f"{found['largest']:.0e}"
                log(f"step {step}, {found['tensor']}, {size}")
                break
        else:
            steps = f"{count(last - start, 'step')}, {start + 1} to {last}"
            if all(replay.as_recorded for replay in replays):
                log(f"the same bits for {steps}")
            else:
                log(f"no difference in {steps}, but a replay was not as recorded: nothing follows")
        return {"as_recorded": all(replay.as_recorded for replay in replays), **found}

    return undisturbed(lambda: find(first))


def _difference(one: Replay, other: Replay) -> dict[str, Any]:
    ours, theirs = dict(one.model.named_parameters()), dict(other.model.named_parameters())
    for name in ours | theirs:
        a, b = ours.get(name), theirs.get(name)
        if a is None or b is None or a.shape != b.shape:
            return {"step": one.step, "tensor": name, "largest": None}
        if sha256(a) != sha256(b):
            largest = float((a.cpu() - b.cpu()).detach().abs().max())
            return {"step": one.step, "tensor": name, "largest": largest}
    return {}


def _facts(run: RunProvenance) -> Row:
    start = next((attempt.row for attempt in run.attempts), {})
    settings = {n: v for n, v in run.config.field_values().items() if n not in _OF_THE_RUN}
    code = run.newest.state.code_sha256 if run.newest else None
    environment = {name: start.get(name) for name in _ENVIRONMENT}
    return {**settings, **environment, "data": run.data.hash[:12], "code": code and code[:12]}
