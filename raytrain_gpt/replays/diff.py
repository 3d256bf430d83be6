"""The first step and tensor that differ in two trainings, found by replaying both."""

from __future__ import annotations

from collections.abc import Sequence
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
    if not (steps := sorted(a.steps.keys() & b.steps.keys())):
        raise ConfigError(f"{a.dir} and {b.dir} have no step in common; choose runs that have")
    differ = (step for step in steps if compared(a.steps[step]) != compared(b.steps[step]))
    last = next(differ, steps[-1])
    recorded = changed_fields(compared(a.steps[last]), compared(b.steps[last]))
    log(f"recorded at step {last}: {list_changes(recorded)}")
    same = f"in the replays up to step {last}" if recorded else f"for {count(len(steps), 'step')}"
    found = _compare([(a, {}), (b, {})], last, last, codes, same, log)
    return {"changes": changes, "recorded": recorded, **found}


def diff_change(
    run: RunProvenance, num_steps: int, codes: Sequence[Code], log: Log, **change: Any
) -> dict[str, Any]:
    """Find the first step and tensor that differ if a run's first steps are replayed with a change.

    Args:
        change: `settings` and `new_code` of `Replay`.

    Returns:
        `as_recorded`, whether what was replayed without a change had the run's rows; and if bits differ, the
        first `step` after which they do, the first `tensor` in the model's order, and the `largest` absolute
        difference, None if the shape has changed.
    """
    first, last = run.begins_at + 1, min(run.begins_at + num_steps, run.last_step)
    same = f"for {count(last - first + 1, 'step')}"
    return _compare([(run, {}), (run, change)], first, last, codes, same, log)


def _compare(
    pair: list[tuple[RunProvenance, dict[str, Any]]],
    first: int,
    last: int,
    codes: Sequence[Code],
    same: str,
    log: Log,
) -> dict[str, Any]:
    """Train two replays to step `last` or until they differ, and from an earlier step if they start so."""

    def find(first: int) -> dict[str, Any]:
        one, other = (Replay(run, first, codes, log=log, **how) for run, how in pair)
        start = max(one.step, other.step)
        running = [(replay, replay.rows(last)) for replay in (one, other)]
        while one.step != other.step or not (found := _difference(one.model, other.model)):
            if (behind := min(one.step, other.step)) == last:
                return {"as_recorded": one.as_recorded and other.as_recorded}
            for replay, rows in running:
                if replay.step == behind:
                    next(rows)
        if one.step == start > max(run.begins_at for run, _ in pair):
            return find(start)
        as_recorded = one.as_recorded and other.as_recorded
        return {"as_recorded": as_recorded, "step": one.step, **found}

    found = in_local_mode(lambda: find(first))
    if "step" in found:
        size = "another shape" if found["largest"] is None else f"{found['largest']:.0e}"
        log(f"step {found['step']}, {found['tensor']}, {size}")
    else:
        log(f"the same bits {same}")
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
