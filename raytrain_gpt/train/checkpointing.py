"""A rank's checkpoints: copied after a step, written while training continues, then reported."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import ray.train
from ray.train import CheckpointUploadMode

from raytrain_gpt.checkpoint.catalog import CODE_FILE, IMPORT_FILE, ROWS_FILE, Catalog
from raytrain_gpt.checkpoint.checkpoint_state import CheckpointState
from raytrain_gpt.checkpoint.code_check import code_hash, replaced_code
from raytrain_gpt.checkpoint.collectives import Collectives
from raytrain_gpt.checkpoint.writer import CheckpointWriter, WrittenCheckpoint
from raytrain_gpt.columns import Row
from raytrain_gpt.core.device import numerics_environment
from raytrain_gpt.data.order import ORDER_VERSION
from raytrain_gpt.errors import ClusterError
from raytrain_gpt.events import Outbox
from raytrain_gpt.storage.lease import LEASE_FILE, still_held
from raytrain_gpt.train.model_setup import TrainingSetup
from raytrain_gpt.train.step_log import StepLog
from raytrain_gpt.train.worker_group import RankJob

WRITE_TIMEOUT_S = 1800.0
"""Longest write of one checkpoint while the storage responds; anything longer counts as hung."""


class Checkpointing:
    """Writer of a rank's checkpoints; all ranks call each method at the same step."""

    def __init__(
        self,
        job: RankJob,
        setup: TrainingSetup,
        log: StepLog,
        collectives: Collectives,
        outbox: Outbox,
    ) -> None:
        self._job, self._setup, self._log = job, setup, log
        self._config = job.plan.config
        self._collectives, self._outbox = collectives, outbox
        self._writer = CheckpointWriter(
            Catalog(job.run_dir),
            f"{job.attempt:03d}",
            collectives,
            setup.raw_model,
            setup.optimizer,
            self._config.train.keep_checkpoints,
            self._check_lease,
        )
        self._blocked_s = 0.0
        self._rows: list[Row] = []
        self._numbers: Row = {}

    @property
    def writing(self) -> bool:
        """Whether this rank is still writing its files."""
        return self._writer.writing

    def add_rows(self, rows: list[Row]) -> None:
        """Add rows to the next checkpoint, from which a lost metrics.jsonl is restored."""
        self._rows += rows

    def begin(self, step: int, val_loss: float | None) -> None:
        """Collect the previous checkpoint, then copy the state and write it in the background."""
        self.collect()
        started = time.perf_counter()
        lines = "".join(json.dumps(row) + "\n" for row in self._rows)
        values = [item for row in self._rows if "event" not in row for item in row.items()]
        self._numbers = {name: value for name, value in values if type(value) in (int, float)}
        self._rows = []
        texts = {**self._setup.tokenizer.files, ROWS_FILE: lines}
        if code := self._config.code:
            texts[CODE_FILE] = code.text
        if (imported := self._setup.imported) is not None:
            texts[IMPORT_FILE] = imported
        # In a bad stretch, keep the checkpoint before it: the run may roll back to it.
        self._writer.begin(self._state(step, val_loss), texts, prune=not self._log.in_bad_stretch)
        self._blocked_since(started)

    def collect(self) -> None:
        """Wait for the checkpoint in flight, if any, and report it.

        Raises its CheckpointError or StorageError, or a ClusterError if another run took over the name.
        """
        started = time.perf_counter()

        def waiting() -> None:
            # Waiting longer than the storage may be unreachable counts as hanging.
            if time.perf_counter() - started < self._config.run.retry_for_s + WRITE_TIMEOUT_S:
                self._job.link.work()

        saved = self._writer.collect(waiting)
        if saved is None:
            return
        if not self._config.cluster.is_local:
            self._report_to_ray(saved)
        self._blocked_since(started)
        blocked_s, self._blocked_s = self._blocked_s, 0.0
        times = {
            "perf/checkpoint_blocked_s": round(blocked_s, 4),
            "perf/checkpoint_write_s": round(saved.write_s, 3),
        }
        self._outbox.note(saved.state.step, "checkpoint", **times)

    def _blocked_since(self, started: float) -> None:
        self._blocked_s += time.perf_counter() - started
        self._log.exclude_time(time.perf_counter() - started)

    def _check_lease(self) -> None:
        """Check the lease before files become final: a frozen driver may have lost it."""
        if not still_held(self._job.run_dir / LEASE_FILE, self._job.lease_token):
            raise ClusterError(
                f"run {self._job.run_dir.name} was taken over by another process; this one stops writing"
            )

    def _state(self, step: int, val_loss: float | None) -> CheckpointState:
        data, position, config = self._job.data, self._log.position, self._config
        setup = self._setup
        return CheckpointState(
            step=step,
            next_batch=position.next_batch,
            order_hash=position.order_hash,
            val_loss=val_loss,
            tokens_seen=step * config.train.global_batch_tokens,
            config=config.model_dump(),
            manifest_hash=data.hash,
            vocab_hash=data.vocab_hash,
            vocab_size=data.vocab_size,
            order_version=ORDER_VERSION,
            num_workers=self._collectives.world_size,
            skipped_batches=position.skipped,
            loss_scale=setup.loss_scale.state() if setup.loss_scale else None,
            numerics_environment=numerics_environment(setup.device, setup.precision),
            code_sha256=code_hash(config),
            replaced_code=replaced_code(config, self._job.resumed),
        )

    def _report_to_ray(self, saved: WrittenCheckpoint) -> None:
        """Report the newest numbers and a small pointer to the checkpoint, so that Ray's results have them.

        Resuming uses our catalog: Ray Train's index may lose the newest entry when it is killed, and may
        contain partial ones (ray #41700).
        """
        step, val_loss = saved.state.step, saved.state.val_loss
        # None would break the controller's next report; hence -1.
        loss = -1.0 if val_loss is None else val_loss
        metrics = {**self._numbers, "step": step, "val_loss": loss}
        pointer = None
        if self._collectives.rank == 0:
            directory = tempfile.mkdtemp(prefix="raytrain-gpt-")
            Path(directory, "pointer.json").write_text(json.dumps({"checkpoint": str(saved.path)}))
            pointer = ray.train.Checkpoint.from_directory(directory)
        # Asynchronous, since a synchronous report waits for the controller's next poll.
        ray.train.report(
            metrics,
            checkpoint=pointer,
            checkpoint_dir_name=saved.path.name,
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
            delete_local_checkpoint_after_upload=True,
        )
