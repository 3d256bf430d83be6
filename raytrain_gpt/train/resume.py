"""What a run that resumes may change, and rollbacks to a checkpoint before bad steps.

`skipped.json` in the run's directory holds the global batches skipped by rollbacks, so that a run that
resumes from an older checkpoint, whose state lacks them, also skips them.
"""

from __future__ import annotations

import json

from raytrain_gpt.checkpoint.branch import create_branch
from raytrain_gpt.checkpoint.catalog import SKIPPED_FILE, Catalog, Checkpoint, resume_step
from raytrain_gpt.checkpoint.code_check import check_unchanged
from raytrain_gpt.config.plan import for_workers
from raytrain_gpt.config.schema import Config, changed_fields, changes_math
from raytrain_gpt.config.sections import AUTO_MEMORY_FIELDS
from raytrain_gpt.core.spikes import BadStreak
from raytrain_gpt.data.locations import run_location
from raytrain_gpt.data.mixture import Mixture
from raytrain_gpt.data.order import ORDER_VERSION, BatchRanges
from raytrain_gpt.errors import CheckpointError
from raytrain_gpt.format import Log
from raytrain_gpt.trackers.books import Books

_DECIDES_EXACT_SUMS = {"micro_batch_sequences", "compile", "activation_checkpointing"}
_START_FIELDS = ("init_from", "branch_from")
"""Fields that are read only when a run starts."""


def resume_from(
    config: Config, data: Mixture, existing: Checkpoint | None, log: Log
) -> tuple[Config, Checkpoint | None]:
    """Return the configuration, with the start that the run had, and the checkpoint to load, if any.

    Without an `existing` checkpoint, the run is new and may branch. Raises a UserError if it cannot, or if
    the configuration does not fit the checkpoint.
    """
    if existing is None:
        return config, create_branch(config, data, log)
    if config.run.resume == "never":
        raise CheckpointError(
            f"run {existing.run_dir.name} already has checkpoints up to step {existing.state.step} and "
            "resume=never; use another run_name, or set resume to auto"
        )
    config = keep_start(config, existing)
    check_changes(config, data, existing, log)
    return config, existing


def keep_start(config: Config, resumed: Checkpoint) -> Config:
    """Restore a run's `init_from` and `branch_from`; raises CheckpointError if others are configured."""
    started = resumed.config(config.registry).field_values()
    for name in _START_FIELDS:
        given, original = config.field_values()[name], started[name]
        # A run was resolved to one of its checkpoints; the name of a run that is gone, to nothing.
        if given is None or f"/{given}/checkpoints/" in f"/{original}/checkpoints/":
            continue
        original = "null" if original is None else original
        raise CheckpointError(
            f"{name}={given}, but run {resumed.run_dir.name} started with {name}={original}; set {name} "
            f"to {original}, or use another run_name"
        )
    return config.replaced({name: started[name] for name in _START_FIELDS if started[name]})


def check_changes(config: Config, data: Mixture, resumed: Checkpoint, log: Log) -> None:
    """Refuse changes to the math of a resumed run with a CheckpointError; log harmless changes."""
    state, trained = resumed.state, resumed.config(config.registry)
    before = trained.field_values()
    changed = changed_fields(before, config.field_values())
    exact_sums = _DECIDES_EXACT_SUMS if config.train.exact else set()
    refused = {
        name: change
        for name, change in changed.items()
        if name in exact_sums or changes_math(name, trained, config)
    }
    for name, old, new in (
        ("data (manifest hash)", state.manifest_hash, data.hash),
        ("tokenizer (vocabulary hash)", state.vocab_hash, data.vocab_hash),
        ("order version", str(state.order_version), str(ORDER_VERSION)),
    ):
        if old != new:
            refused[name] = f"{old[:12]} -> {new[:12]}"
    if refused:
        listed = ", ".join(f"{name} {change}" for name, change in refused.items())
        raise CheckpointError(
            f"run {resumed.run_dir.name} cannot resume from step {state.step} with changed "
            f"{listed}; change it back, or use another run_name"
        )
    check_unchanged(resumed, config.code, log)
    if state.step < config.train.max_steps:
        log(f"resuming from step {state.step} ({resumed.path})")
    then = for_workers(config, state.num_workers).field_values()
    for name, change in changed_fields(before, then).items():
        if name not in AUTO_MEMORY_FIELDS or then[name] != "auto":
            log(f"changed since that checkpoint: {name} {change}")


class Rollbacks:
    """Rollbacks of a run to checkpoints before bad steps.

    Attributes:
        skipped: Ranges of skipped global batches, (first, stop).
    """

    def __init__(self, config: Config, skipped: BatchRanges, log: Log) -> None:
        self._run_dir, self._skip_before = run_location(config), config.spikes.skip_before
        self._catalog, self._log = Catalog(self._run_dir), log
        self._last_step: int | None = None
        self.skipped = skipped

    def go_back(self, bad: BadStreak, started_at: int, books: Books) -> None:
        """Return to the last checkpoint before the bad steps, and skip their batches from now on.

        On return the rollback is durable: later checkpoints are retired, the ranges written.
        """
        resumed = self._catalog.pick("before", self._log, bad.first_step)
        if 0 < started_at == resume_step(resumed) == self._last_step:
            # A second rollback to this checkpoint: its weights may be bad already, although the loss
            # did not show it, so use an earlier one.
            resumed = self._catalog.pick("before", self._log, started_at) or resumed
        self._last_step = step = resume_step(resumed)
        self._catalog.clean(good_until=step)
        next_batch = resumed.state.next_batch if resumed else 0
        skipped = (max(next_batch, bad.first_batch - self._skip_before), bad.last_batch + 1)
        self.skipped = (*self.skipped, skipped)
        (self._run_dir / SKIPPED_FILE).write_text(json.dumps(self.skipped) + "\n")
        books.note(
            bad.last_step,
            "rollback",
            to_step=step,
            first_bad_step=bad.first_step,
            first_batch=skipped[0],
            stop_batch=skipped[1],
        )
        self._log(
            f"bad steps {bad.first_step}–{bad.last_step}: rolled back to step {step}, "
            f"skipping batches {skipped[0]}–{skipped[1] - 1}"
        )
