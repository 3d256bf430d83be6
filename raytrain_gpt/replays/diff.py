"""The first step and tensor that differ in two trainings, found by replaying both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from raytrain_gpt.config.code import Code
from raytrain_gpt.config.schema import changed_fields
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.format import Log, count
from raytrain_gpt.replays.steps import Replay, compared, list_changes, sha256
from raytrain_gpt.tracking.run_files import Row
from raytrain_gpt.train.local_mode import in_local_mode
from raytrain_gpt.train.provenance import RunProvenance

_OF_THE_RUN = {"run_name", "storage_path", "branch_from", "resume"}
_ENVIRONMENT = ("device", "threads", "num_workers", "precision", "micro_batch_sequences")


def diff_runs(
    a: RunProvenance, b: RunProvenance, codes: Sequence[Code], log: Log
) -> dict[str, Any]:
    """Find what differs between two runs, and the first step and tensor that do.

    Returns:
        `changes` of settings, data, code and environment, and of the values `recorded` at the first step that
        differs, each name -> `old -> new`; and the values of `diff_change`.
    """
    changes = changed_fields(_facts(a), _facts(b))
    log(f"runs: {list_changes(changes)}")
    ours, theirs = a.steps(), b.steps()
    if not (steps := sorted(ours.keys() & theirs.keys())):
        raise ConfigError(f"{a.dir} and {b.dir} have no step in common; choose runs that have")
    parted = (step for step in steps if compared(ours[step]) != compared(theirs[step]))
    last = next(parted, steps[-1])
    recorded = changed_fields(compared(ours[last]), compared(theirs[last]))
    log(f"recorded at step {last}: {list_changes(recorded)}")
    same = f"replayed, step {last} has" if recorded else f"{count(len(steps), 'step')} have"
    found = _compare(lambda: [Replay(run, last, codes, log=log) for run in (a, b)], last, same, log)
    return {"changes": changes, "recorded": recorded, **found}


def diff_change(
    run: RunProvenance, num_steps: int, codes: Sequence[Code], log: Log, **change: Any
) -> dict[str, Any]:
    """Find the first step and tensor that differ if a run's first steps are replayed with a change.

    Args:
        change: `settings` and `new_code` of `Replay`.

    Returns:
        Nothing if all bits are the same; else the `step` after which they differ first, the first `tensor` in
        the model's order, and the `largest` absolute difference, None if the shape has changed.
    """
    first, last = run.begins_at + 1, min(run.begins_at + num_steps, run.last_step)
    same = f"{count(last - first + 1, 'step')} have"
    hows: list[dict[str, Any]] = [{}, change]
    return _compare(
        lambda: [Replay(run, first, codes, log=log, **how) for how in hows], last, same, log
    )


def _compare(make: Callable[[], list[Replay]], last: int, same: str, log: Log) -> dict[str, Any]:
    """Train two replays up to step `last` or until they differ."""

    def find() -> dict[str, Any]:
        replays = one, other = make()
        rows = [replay.rows(last) for replay in replays]
        while True:
            if one.step == other.step and (found := _difference(one.model, other.model)):
                return {"step": one.step, **found}
            if (behind := min(one.step, other.step)) == last:
                return {}
            for replay, its_rows in zip(replays, rows, strict=True):
                if replay.step == behind:
                    next(its_rows)

    if found := in_local_mode(find):
        size = "another shape" if found["largest"] is None else f"{found['largest']:.0e}"
        log(f"step {found['step']}, {found['tensor']}, {size}")
    else:
        log(f"{same} the same bits")
    return found


def _difference(one: nn.Module, other: nn.Module) -> dict[str, Any]:
    ours, theirs = dict(one.named_parameters()), dict(other.named_parameters())
    for name in ours | theirs:
        a, b = ours.get(name), theirs.get(name)
        if a is None or b is None or a.shape != b.shape:
            return {"tensor": name, "largest": None}
        if sha256(a) != sha256(b):
            return {"tensor": name, "largest": float((a - b).detach().abs().max())}
    return {}


def _facts(run: RunProvenance) -> Row:
    start = next((attempt.row for attempt in run.attempts), {})
    settings = {n: v for n, v in run.config.field_values().items() if n not in _OF_THE_RUN}
    code = run.newest.state.code_sha256 if run.newest else None
    environment = {name: start.get(name) for name in _ENVIRONMENT}
    return {**settings, **environment, "data": run.data.hash[:12], "code": code and code[:12]}
