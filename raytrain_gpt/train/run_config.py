"""The configuration of a call: from a file, a preset, an existing run, the demo or the defaults."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from raytrain_gpt.config.kinds import Registry
from raytrain_gpt.config.load import describe, given_fields, load_config_file, start_of
from raytrain_gpt.config.schema import Config, check_kinds
from raytrain_gpt.config.sections import SHAPE_FIELDS, TrackingSection
from raytrain_gpt.data.locations import file_on_disk, find_in, run_location
from raytrain_gpt.errors import CheckpointError, ConfigError
from raytrain_gpt.format import shell
from raytrain_gpt.redact import say
from raytrain_gpt.storage.location import Location, is_url
from raytrain_gpt.trackers.run_files import CONFIG_FILE

_PLACE = ("run_name", "storage_path", "s3_endpoint", "retry_for_s")
FINE_TUNING_LR = 5e-5
"""Rate for weights of `init_from`, by default; that of transformers' `Trainer`."""


def run_config(
    preset: str | None, file: str | Path | None, fields: Mapping[str, Any], registry: Registry
) -> tuple[Config, str]:
    """Return the checked configuration of a call, and a line that says where it comes from.

    Without preset and file it starts from the run of `run_name`, or for a new branch from that of
    `branch_from`, if there is one; else as in `start_of`. `init_from` provides sizes, rate and micro-batch.
    Raises a UserError if the configuration is not valid, or the start or a store cannot be read.
    """
    if str(fields.get("num_workers")) == "0":
        fields = {"min_workers": None, **fields}  # of the start
    run = _existing_run(preset, fields) if file is None else None
    if preset is None and run is not None:
        base, left_out = _remembered(run, fields, registry)
        start = f"as run {run.name}, {run / CONFIG_FILE}{left_out}"
    else:
        with nullcontext() if file is None else file_on_disk(file) as path:
            if "init_from" in given_fields(path, fields, registry):
                fields = {**fields_of_init_from(preset, path, fields, registry), **fields}
            start, base = start_of(preset, path, fields, registry)
    config = base.updated(fields)
    if file is not None:
        start, base = f"configuration {file}", Config()
    check_kinds(config)
    return config, describe(start, base, config)


def _existing_run(preset: str | None, fields: Mapping[str, Any]) -> Location | None:
    """Find the run of `run_name`, or the origin of a new branch; may raise a UserError."""
    if "run_name" not in fields:
        if fields.get("branch_from") and preset is None:
            raise ConfigError("branch_from needs a new run_name; add --run_name NAME")
        return None
    config = Config().updated({name: fields[name] for name in _PLACE if name in fields})

    def places() -> Iterator[Location]:
        yield run_location(config)
        if origin := fields.get("branch_from"):
            yield (place := find_in(config, re.sub(r"@\d+$", "", str(origin))))
            yield place.parent.parent  # of a checkpoint

    has_begun = (p for p in places() if (p / CONFIG_FILE).is_file() or (p / "checkpoints").names())
    return next(has_begun, None)


def _remembered(run: Location, fields: Mapping[str, Any], registry: Registry) -> tuple[Config, str]:
    """Read a run's settings, except its place, a branch's `init_from`, and what only the caller may choose.

    A remark comes with them, on trackers, evaluations and their settings that were left out. Raises a
    ConfigError for a store or server other than the run's that `fields` do not name: the author of these
    settings is unknown, and credentials would go there.
    """
    from raytrain_gpt.checkpoint.catalog import Catalog  # slow to import

    default = Config().field_values()
    place = {name: default[name] for name in ("storage_path", "s3_endpoint", "resume")}
    start = {"init_from": None} if "branch_from" in fields else {}
    if (run / CONFIG_FILE).is_file():
        with file_on_disk(run / CONFIG_FILE) as file:
            stored = load_config_file(file, registry)
    else:
        if (newest := Catalog(run).pick("newest", say)) is None:
            raise CheckpointError(
                f"{run} has neither {CONFIG_FILE} nor a checkpoint; use another run_name"
            )
        stored = newest.config(registry).updated(dict(Config().cluster))
    ours = {name: default[name] for name in ("evaluations", *TrackingSection.model_fields)}
    config = stored.updated({**place, **start, **ours})
    chosen = {*fields, *place, *start}
    theirs = {name: v for name, v in stored.field_values().items() if name not in chosen}
    for name, value in theirs.items():
        for part in value.split(",") if isinstance(value, str) else ():
            if is_url(part) and not part.startswith(f"{run.bucket}/"):
                raise ConfigError(
                    f"run {run.name} has {name}={value} in another store, which only you may choose; if "
                    f"you trust it, add --{name} {shell(value)}"
                )
    kept = {name: field.default for name, (_, field) in registry.fields.items()}
    kept |= config.field_values()
    words = [
        f"--{name} {shell(','.join(value) if isinstance(value, tuple) else value)}"
        for name, value in theirs.items()
        if value != kept.get(name)
    ]
    left_out = f" without its own {' '.join(words)}, which only you may choose" if words else ""
    return config, left_out


def fields_of_init_from(
    preset: str | None, file: Path | None, fields: Mapping[str, Any], registry: Registry
) -> dict[str, Any]:
    """Return the fields that `init_from` provides: sizes left open, rate and micro-batch.

    Preset and file have a rate and a micro-batch of their own. If that checkpoint is gone, the sizes come
    from the run that started from it; raises a CheckpointError if there is none.
    """
    from raytrain_gpt.checkpoint.catalog import Catalog, resolve_checkpoint  # slow to import

    # Other fields may be valid only with these sizes.
    named = {name: fields[name] for name in ("init_from", *_PLACE) if name in fields}
    config = start_of(preset, file, named, registry)[1].updated(named)
    given = given_fields(file, fields, registry)
    rest: dict[str, Any] = {}
    if preset is None and file is None:
        rest = {"peak_lr": FINE_TUNING_LR, "min_lr": 0.0, "micro_batch_sequences": "auto"}
    open_fields = {*SHAPE_FIELDS, *(config.model.model_extra or ()), *rest} - given
    if config.model.init_from is None or not open_fields:
        return {}
    try:
        checkpoint = resolve_checkpoint(find_in(config, config.model.init_from))
    except CheckpointError:
        if (own := Catalog(run_location(config)).pick("newest", say)) is None:
            raise
        checkpoint = own
    stored = checkpoint.config(registry)
    theirs, settings = stored.field_values(), stored.model.model_extra or {}
    sizes = {name: theirs[name] for name in (*SHAPE_FIELDS, *settings)}
    return {name: value for name, value in (rest | sizes).items() if name not in given}
