"""Which checkpoint a run of a name resumes from, and which changes of its configuration are refused."""

from __future__ import annotations

from collections.abc import Callable

from raytrain_gpt.checkpoint.catalog import Catalog, Checkpoint
from raytrain_gpt.config.schema import FIELDS, SAFE_ON_RESUME, Config, changed_fields
from raytrain_gpt.data.mixture import Mixture
from raytrain_gpt.data.order import ORDER_VERSION
from raytrain_gpt.errors import CheckpointError
from raytrain_gpt.train.memory_fit import AUTO_FIELDS


def find_resume(
    config: Config, catalog: Catalog, name: str, log: Callable[[str], None]
) -> Checkpoint | None:
    """The newest good checkpoint of the run, or None for a new run.

    Raises:
        CheckpointError: `resume=never` and the name is taken, or no checkpoint is good.
    """
    newest = catalog.newest_good(log)
    if newest is not None and config.run.resume == "never":
        raise CheckpointError(
            f"run {name} already has checkpoints up to step {newest.state.step} and "
            "resume=never; use another run_name, or set resume to auto"
        )
    return newest


def check_changes(
    config: Config, data: Mixture, resumed: Checkpoint, log: Callable[[str], None]
) -> None:
    """Refuse changes that would alter the maths of a resumed run; log harmless ones.

    Raises:
        CheckpointError: lists the keys that differ.
    """
    state = resumed.state
    # A field that is newer than the checkpoint had the effect of its default.
    before = {
        name: state.config.get(section, {}).get(name, field.default)
        for name, (section, field) in FIELDS.items()
    }
    changed = changed_fields(before, config.field_values())
    refused = {name: change for name, change in changed.items() if name not in SAFE_ON_RESUME}
    if state.manifest_hash != data.hash:
        old, new = state.manifest_hash[:12], data.hash[:12]
        refused["data (manifest hash)"] = f"{old} -> {new}"
    if state.vocab_hash != data.vocab_hash:
        refused["tokenizer (vocabulary hash)"] = (
            f"{state.vocab_hash[:12]} -> {data.vocab_hash[:12]}"
        )
    if state.order_version != ORDER_VERSION:
        refused["order version"] = f"{state.order_version} -> {ORDER_VERSION}"
    if refused:
        listed = ", ".join(f"{name} {change}" for name, change in refused.items())
        raise CheckpointError(
            f"run {resumed.path.parent.parent.name} cannot resume from step {state.step} with changed "
            f"{listed}; change it back, or use another run_name"
        )
    if state.step < config.train.max_steps:
        log(f"going on from step {state.step} ({resumed.path})")
    for name, change in changed.items():
        if name not in AUTO_FIELDS or config.field_values()[name] != "auto":
            log(f"changed since then: {name} {change}")
