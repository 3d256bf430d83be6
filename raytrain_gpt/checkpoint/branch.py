"""`branch_from`: start a new run from a checkpoint of another run, with changed settings.

The checkpoint is copied into the new run under the new configuration; from then on the run resumes like any
other and does not read the original. The step count and the data position continue.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, dataclass, replace
from functools import partial

from pydantic import TypeAdapter

from raytrain_gpt.checkpoint.catalog import (
    CODE_FILE,
    ROWS_FILE,
    STATE_FILE,
    Catalog,
    Checkpoint,
    read_checkpoint,
    resolve_checkpoint,
)
from raytrain_gpt.checkpoint.code_check import check_unchanged, code_hash, replaced_code
from raytrain_gpt.config.plan import for_workers
from raytrain_gpt.config.schema import Config, changed_fields
from raytrain_gpt.config.sections import AUTO_MEMORY_FIELDS, SHAPE_FIELDS
from raytrain_gpt.data.locations import find_in, run_location
from raytrain_gpt.data.mixture import Mixture, check_vocabulary
from raytrain_gpt.data.order import ORDER_VERSION
from raytrain_gpt.errors import CheckpointError, ConfigError, damage_as
from raytrain_gpt.format import Log, count
from raytrain_gpt.parsing import parse_json
from raytrain_gpt.storage.location import Location

BRANCH_FILE = "branch.json"
_RUN_AT_STEP = re.compile(r"(.+)@(\d{1,15})", re.DOTALL)
_FIXED_ON_BRANCH = (*SHAPE_FIELDS, "seq_len", "global_batch_tokens", "optimizer")
"""Fields that fix the weights, the moments or the data position, like the model's settings."""


@dataclass(frozen=True)
class _Branch:
    """Origin of a branched run.

    Attributes:
        next_batch: Global batch that the first step of the branch reads.
        changed: Field -> `old -> new`.
    """

    checkpoint: str
    step: int
    next_batch: int
    changed: dict[str, str]

    @property
    def line(self) -> str:
        """Line for the log and the report."""
        changes = [f"{name} {change}" for name, change in self.changed.items()] or ["nothing"]
        return f"branched from {self.checkpoint} at step {self.step}, changed: {', '.join(changes)}"


def read_branch(directory: Location) -> _Branch | None:
    """Read the origin of a run; None if it is not a branch; raises CheckpointError for a damaged file."""
    file = directory / BRANCH_FILE
    if not file.is_file():
        return None
    with damage_as(CheckpointError, file):
        return TypeAdapter(_Branch).validate_python(parse_json(file.read_bytes()))


def create_branch(config: Config, data: Mixture, log: Log) -> Checkpoint | None:
    """Create a branched run's first checkpoint; None if `branch_from` is unset; may raise a UserError."""
    if config.run.branch_from is None:
        return None
    origin = find_origin(config, config.run.branch_from, log)
    state, now = origin.state, config.field_values()
    before = origin.config(config.registry).field_values()
    for name in (*_FIXED_ON_BRANCH, *(config.model.model_extra or ())):
        if before.get(name) != now[name]:
            raise ConfigError(
                f"{name}={now[name]}, but {origin.path} has {before.get(name)} and a branch cannot "
                f"change it; set {name} to {before.get(name)}"
            )
    if state.step >= config.train.max_steps:
        raise ConfigError(
            f"max_steps={config.train.max_steps}, but {origin.path} has trained {count(state.step, 'step')}; "
            f"set max_steps above {state.step}"
        )
    check_vocabulary(data, state.vocab_hash, str(origin.path))
    check_unchanged(origin, config.code, log)
    is_same_data = (state.manifest_hash, before["seed"]) == (data.hash, now["seed"])
    run_dir = run_location(config)
    autos = [name for name in AUTO_MEMORY_FIELDS if now[name] == "auto"]
    trained = config.replaced({name: before[name] for name in autos})
    run_fields = {"run_name", "storage_path", "branch_from"}
    changed = changed_fields(before, for_workers(trained, state.num_workers).field_values())
    changed = {name: change for name, change in changed.items() if name not in run_fields}
    branch = _Branch(str(origin.path), state.step, state.next_batch, changed)
    draft = Catalog(run_dir).draft(state.step, "branch")
    with origin.files() as files:
        names = origin.file_names - {STATE_FILE, ROWS_FILE, CODE_FILE}
        entries = {name: draft.add(name, partial(shutil.copyfile, files / name)) for name in names}
    (run_dir / BRANCH_FILE).write_text(json.dumps(asdict(branch)) + "\n")
    path = draft.commit(
        replace(
            state,
            config=trained.model_dump(),
            manifest_hash=data.hash,
            order_version=ORDER_VERSION,
            val_loss=None,  # only this run's evaluations decide its best checkpoint
            skipped_batches=state.skipped_batches if is_same_data else (),
            code_sha256=code_hash(config),
            replaced_code=replaced_code(config, origin),
        ),
        entries,
        {ROWS_FILE: "", **({CODE_FILE: config.code.text} if config.code else {})},
    )
    log(branch.line)
    return read_checkpoint(path)


def with_origin(config: Config, log: Log) -> Config:
    """Make `branch_from` a path, for runs with another storage; raises as `find_origin`."""
    if (source := config.run.branch_from) is None:
        return config
    return config.replaced({"branch_from": str(find_origin(config, source, log).path)})


def find_origin(config: Config, source: str, log: Log) -> Checkpoint:
    """Open and verify the checkpoint given as RUN@STEP or a path; a CheckpointError lists the steps."""
    match = _RUN_AT_STEP.fullmatch(source)
    run, step = match.groups() if match else (source, "")
    place = find_in(config, run, log)
    if not step and (place / STATE_FILE).is_file():
        return resolve_checkpoint(place)
    catalog = Catalog(place)
    if step and (origin := catalog.pick("step", log, int(step))):
        return origin
    steps = ", ".join(str(checkpoint.state.step) for checkpoint in catalog.complete()) or "none"
    raise CheckpointError(
        f"branch_from={source}: {place} has checkpoints of steps {steps}; give RUN@STEP, or a "
        "checkpoint's directory"
    )
