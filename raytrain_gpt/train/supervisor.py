"""A run from its checks to its end, over as many attempts as it takes.

Ray's own retries are off, so that there is one place that decides. After every attempt:

- finished, or stopped by a signal: the end.
- failed or hung: again from the newest good checkpoint, `max_failures` times in a row without progress.
- preempted: again with the nodes that are left, `max_preemptions` times in all.
- resized: again with more workers.
- rolled back: again from the last checkpoint before the bad steps, without their global batches.

Before each one the largest number of workers that fits is chosen; while not even `min_workers` fit,
it waits. With async evaluation, a run is finished when its last checkpoint is evaluated.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import ray

from raytrain_gpt.checkpoint.catalog import Catalog, Checkpoint
from raytrain_gpt.cluster.capacity import largest_world_size
from raytrain_gpt.cluster.connection import cluster_resources
from raytrain_gpt.cluster.failures import root_cause, user_error_in
from raytrain_gpt.cluster.shared_storage import check_storage
from raytrain_gpt.cluster.signals import StopSignals
from raytrain_gpt.config.resolved import FittedConfig, RunPlan
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.spikes import BadStretch
from raytrain_gpt.data.locations import run_location
from raytrain_gpt.data.mixed_order import MixedOrder
from raytrain_gpt.data.mixture import Mixture
from raytrain_gpt.data.order import Skipped
from raytrain_gpt.data.tokenizer import read_tokenizer
from raytrain_gpt.errors import Interrupted, RaytrainGptError, StorageError, TrainingFailed
from raytrain_gpt.evaluate.async_evaluation import AsyncEvaluation
from raytrain_gpt.evaluate.evaluation import read_choices
from raytrain_gpt.format import amount
from raytrain_gpt.ingest.ray_dataset import IngestSpec
from raytrain_gpt.storage.lease import LEASE_FILE, Lease, held_lease
from raytrain_gpt.storage.location import Location
from raytrain_gpt.tracking.recorder import RecorderSpec
from raytrain_gpt.tracking.report import write_report
from raytrain_gpt.tracking.run_files import CONFIG_FILE, Row, merge_rows, read_rows
from raytrain_gpt.tracking.summary import RunSummary
from raytrain_gpt.tracking.sync import RunSync
from raytrain_gpt.tracking.trackers import mlflow_store
from raytrain_gpt.train import preflight
from raytrain_gpt.train.attempt import Attempt, End
from raytrain_gpt.train.auto_memory import fit_memory
from raytrain_gpt.train.resume import check_changes, find_resume
from raytrain_gpt.train.worker import WorkerSpec

SKIPPED_FILE = "skipped.json"
MAX_ROLLBACKS = 3
"""Rollbacks in a row without progress; then the data is not what is wrong."""
BACK_OFF_S = (0.0, 5.0, 15.0, 30.0, 60.0)
WAIT_LINE_EVERY_S = 60.0
BEFORE_FIRST_STEP = "interrupted before the first step; nothing is half-written"

Log = Callable[[str], None]
TrainLoop = Callable[[WorkerSpec], None]


@dataclass(frozen=True)
class TrialPart:
    """What a run has of the sweep that it is a trial of.

    Attributes:
        evaluated: Called with every evaluation but the last while the ranks wait; to end the run it
            sets the stop signal and returns.
        origin: Checkpoint of another run that this one goes on from while it has none of its own.
        mlflow_tags: Of the trial's MLflow run.
    """

    evaluated: Callable[[Row], None]
    origin: Checkpoint | None = None
    mlflow_tags: dict[str, str] = field(default_factory=dict)


class Run:
    """One `train` command, or one trial of a sweep, on a connected cluster."""

    def __init__(
        self,
        config: FittedConfig,
        world_size: int,
        data: Mixture,
        signals: StopSignals,
        log: Log,
        train_loop: TrainLoop,
        trial: TrialPart | None = None,
    ) -> None:
        self.config = config
        self.world_size = world_size
        self.signals = signals
        self.log = log
        self.train_loop = train_loop
        self.trial = trial
        self.run_dir = run_location(config)
        self.sync = RunSync(self.run_dir)
        self.catalog = Catalog(self.run_dir)
        self.data = data
        self.skipped: Skipped = ()
        self._rolled_back_to: int | None = None
        self._choices: Any = None
        self._async_evaluation: AsyncEvaluation | None = None
        self._session = uuid.uuid4().hex[:8]
        self._attempts = 0

    def go(self) -> RunSummary:
        """Check, resume, train, and end well."""
        ingest = self._ingest(None)
        preflight.check_data(ingest)
        self._choices = self._put_choices()
        preflight.check_compile(self.config)
        check_storage(self.run_dir, [part.directory for part in self.data.parts])
        with held_lease(self.run_dir / LEASE_FILE, f"run {self.run_dir.name}", self.log) as lease:
            existing = self.catalog.complete()
            preflight.check_disk(self.config, self.run_dir, self.data.vocab_size, len(existing))
            resumed = find_resume(self.config, self.catalog, self.run_dir.name, self.log)
            self.sync.pull()
            if resumed is not None:
                check_changes(self.config, self.data, resumed, self.log)
                if resumed.state.step >= self.config.train.max_steps:
                    with self._evaluating():
                        return self._finished(resumed, lease, trained=False)
            else:
                self.config = preflight.check_init_from(self.config, self.data)
                resumed = self._origin
            self._announce(ingest)
            self._write_config()
            self.skipped = self._read_skipped(resumed)
            with self._evaluating():
                return self._supervise(resumed, lease)

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Inside, checkpoints are evaluated asynchronously, if they are to be."""
        if self.config.eval.eval_mode == "inline":
            yield
            return
        self._async_evaluation = AsyncEvaluation(
            self.config, self.catalog, self._choices, self.signals.stop
        )
        with contextlib.closing(self._async_evaluation):
            yield

    @property
    def _origin(self) -> Checkpoint | None:
        return self.trial.origin if self.trial else None

    def _write_config(self) -> None:
        Location.of(self.sync.work_dir / CONFIG_FILE).write_text(self.config.to_yaml())
        self.sync.push()

    def _ingest(self, resumed: Checkpoint | None) -> IngestSpec:
        first_batch = resumed.state.next_batch if resumed else 0
        parts = (self.config, self.data, self.world_size, first_batch, self.skipped)
        return IngestSpec.of(*parts)

    def _put_choices(self) -> Any:
        """A reference to HellaSwag, read here so that nodes need not share its file; None: none."""
        path = self.config.eval.hellaswag_path
        if path is None:
            return None
        return ray.put(read_choices(self.config, path, read_tokenizer(self.data.first.directory)))

    def _announce(self, ingest: IngestSpec) -> None:
        self.log(self.config.to_yaml(compact=True).rstrip())
        train = self.config.train
        shape = GPTShape.of(self.config, self.data.vocab_size)
        self.log(
            f"model {amount(shape.num_parameters)} parameters | data "
            f"{amount(self.data.split_tokens('train'))} train tokens ({self.data.tokenizer}) | "
            f"{self._epochs(ingest)} | {train.max_steps} steps of {train.global_batch_tokens} tokens"
        )

    def _epochs(self, ingest: IngestSpec) -> str:
        """How the steps of the run and the epochs of the data go together."""
        order = ingest.order()
        if not isinstance(order, MixedOrder):
            return (
                f"{order.batches_per_epoch} steps an epoch, {order.remainder_sequences} of "
                f"{order.num_sequences} sequences left out"
            )
        epochs = order.epochs(self.config.train.max_steps)
        parts = zip(self.data.names, self.data.weights, epochs, strict=True)
        mixed = [f"{name} {float(weight):.1%} ({n:.2f} epochs)" for name, weight, n in parts]
        return f"mixed: {', '.join(mixed)}"

    def _supervise(self, resumed: Checkpoint | None, lease: Lease) -> RunSummary:
        """Attempts until the run is finished, stopped, or fails too often without progress."""
        failures = preemptions = rollbacks = 0
        while True:
            self._choose_workers()
            started_at = _step_of(resumed)
            end, gone_back_to = self._attempt(resumed, lease)
            if end.kind == "finished":
                return self._finished(self.catalog.complete()[-1], lease)
            if end.kind == "stopped":
                raise Interrupted(self._interrupted_message(started_at))
            if end.bad_stretch is not None:
                resumed = gone_back_to
                rollbacks = rollbacks + 1 if _step_of(resumed) <= started_at else 1
                self._check_rollbacks(rollbacks, _step_of(resumed))
                continue
            resumed = self.catalog.newest_good(self.log) or self._origin
            if resumed is not None and resumed.state.step >= self.config.train.max_steps:
                return self._finished(resumed, lease)
            if end.kind == "preempted":
                preemptions += 1
                self._check_preemptions(preemptions)
            elif end.error is not None:
                progress = _step_of(resumed) > started_at
                failures = 1 if progress else failures + 1
                self._check_failures(failures, _step_of(resumed), end.error)
                self._pause(BACK_OFF_S[min(failures, len(BACK_OFF_S)) - 1])
            self.log(f"{end.kind}; going on from step {_step_of(resumed)}")

    def _finished(self, newest: Checkpoint, lease: Lease, trained: bool = True) -> RunSummary:
        """The end of the training, and of the evaluations that are due beside it."""
        waited = self._async_evaluation is not None and self._evaluate_rest(
            self._async_evaluation, newest, lease
        )
        was_finished = not (trained or waited)
        return RunSummary(self.run_dir, self.sync, newest.state.step, newest, was_finished)

    def _evaluate_rest(
        self, evaluations: AsyncEvaluation, newest: Checkpoint, lease: Lease
    ) -> bool:
        """Wait until all is evaluated and written everywhere; whether anything was missing.

        Raises:
            Interrupted: a signal came first; the next command goes on.
            TrainingFailed: the storage was out of reach; the next command goes on.
        """
        told = {row["step"] for row in read_rows(self.sync.work_dir) if "val/loss" in row}
        complete = self.catalog.complete()
        due = [c.state.step for c in complete if evaluations.is_due(c)]
        if not due and not any(c.evaluated_row and c.state.step not in told for c in complete):
            self._prune_evaluated()
            return False
        self.signals.defer()
        if due:
            steps = ", ".join(map(str, due))
            self.log(f"all steps are done; waiting for the evaluation of step {steps}")
        evaluations.hand_over(None, self.log)
        spec = self._recorder_spec(newest.state.step, self.catalog.complete(), attempt=None)
        evaluations.finish(spec, newest, lease, self._write_report, self.log)
        self._prune_evaluated()
        self.sync.push()
        missing = ", ".join(
            str(c.state.step) for c in self.catalog.complete() if evaluations.is_due(c)
        )
        if self.signals.stop.is_set() and missing:
            raise Interrupted(
                f"interrupted at step {newest.state.step}, saved: {newest.path}; the same command "
                f"evaluates step {missing}"
            )
        if missing:
            raise TrainingFailed(
                f"all steps are done and saved: {newest.path}, but step {missing} is not evaluated; the "
                "same command tries it again"
            )
        return True

    def _prune_evaluated(self) -> None:
        """Remove what only waited for an evaluation, or was the best until another one was evaluated."""
        with contextlib.suppress(OSError, RaytrainGptError):
            self.catalog.prune(self.config.train.keep_checkpoints)

    def _choose_workers(self) -> None:
        """Decide the world size; wait while the cluster has too few workers."""
        waiting_since = said_at = 0.0
        while True:
            resources = cluster_resources()
            world_size = largest_world_size(self.config, resources)
            if world_size is not None:
                if waiting_since or world_size != self.world_size:
                    self.log(f"{world_size} of {self.config.cluster.num_workers} workers")
                self.world_size = world_size
                return
            now = time.monotonic()
            waiting_since = waiting_since or now
            if now - said_at >= WAIT_LINE_EVERY_S:
                said_at = now
                c = self.config.cluster
                self.log(
                    f"waiting for nodes: {c.min_workers or c.num_workers} workers are needed, the "
                    f"cluster has {resources.cpus:g} CPUs and {resources.gpus} GPUs"
                )
            self._pause(1.0)

    def _pause(self, seconds: float) -> None:
        """Wait; a signal ends the run."""
        if self.signals.stop.wait(seconds):
            raise Interrupted(self._interrupted_message(started_at=0))

    def _attempt(self, resumed: Checkpoint | None, lease: Lease) -> tuple[End, Checkpoint | None]:
        """One attempt: how it ended and, after bad steps, where the run has gone back to."""
        step = _step_of(resumed)
        lease.verify()
        try:
            plan = self._plan(resumed)
        except ray.exceptions.RayError as error:
            return End("failed", error), None
        self._attempts = self._next_attempt()
        self.signals.defer()
        self.catalog.clean(good_until=step)
        ingest = self._ingest(resumed)
        if self._async_evaluation is not None:
            self._async_evaluation.hand_over(None, self.log)
            self._async_evaluation.look()
        details = {
            "time": time.time(),
            "attempt": self._attempts,
            "num_workers": self.world_size,
            "session": self._session,
        }
        recorder_spec = self._recorder_spec(step, self.catalog.complete(), details)
        attempt = Attempt(
            plan=plan,
            ingest=ingest,
            num_batches=self.config.train.max_steps - step,
            recorder=recorder_spec,
            rows_before=self._rows_before(step, recorder_spec.saved_rows),
            resumed=resumed,
            number=self._attempts,
            train_loop=self.train_loop,
            stop=self.signals.stop,
            lease=lease,
            log=self.log,
            choices=self._choices,
            async_evaluation=self._async_evaluation,
            evaluated=self.trial.evaluated if self.trial else None,
        )
        end, recorder = attempt.run()
        known = user_error_in(end.error) if end.error is not None else None
        newest = gone_back_to = None
        # No report is written where the storage is out of reach or the name is another run's.
        is_ours = False
        try:
            if not isinstance(known, StorageError):
                lease.verify()
                if end.bad_stretch is not None:
                    gone_back_to = self._roll_back(end.bad_stretch, step, recorder)
                newest = next(reversed(self.catalog.complete()), None)
                is_ours = True
        except StorageError as error:
            known = error
        finally:
            attempt.tell_end(end, recorder, newest or resumed)
            if is_ours:
                self._write_report()
            attempt.close(end, recorder, newest or resumed)
        if isinstance(known, StorageError):
            raise known from None
        self.sync.push()
        if known is not None:
            raise known from None
        return end, gone_back_to

    def _plan(self, resumed: Checkpoint | None) -> RunPlan:
        return fit_memory(
            self.config,
            self.world_size,
            self.data.vocab_size,
            self.log,
            resumed=resumed.state if resumed else None,
            stop=self.signals.stop,
            is_trial=self.trial is not None,
        )

    def _recorder_spec(
        self, step: int, checkpoints: list[Checkpoint], attempt: Row | None
    ) -> RecorderSpec:
        uri, artifacts = mlflow_store(self.config)
        if uri is None and self.config.tracking.mlflow_uri == "auto":
            self.log("MLflow is off: its SQLite file cannot be in an object store; set mlflow_uri")
        samples = [(c.state.step, c.evaluated.samples) for c in checkpoints if c.evaluated]
        return RecorderSpec(
            run_dir=self.run_dir,
            sync=self.sync,
            config=self.config,
            mlflow_uri=uri,
            mlflow_tags=self.trial.mlflow_tags if self.trial else {},
            artifact_location=artifacts,
            step=step,
            attempt=attempt,
            saved_rows=[row for checkpoint in checkpoints for row in checkpoint.rows()],
            saved_samples=[(at, text) for at, text in samples if text],
        )

    def _rows_before(self, step: int, saved_rows: list[Row]) -> list[Row]:
        rows = merge_rows(read_rows(self.sync.work_dir), saved_rows, step)
        steps = [row for row in rows if "train/loss" in row]
        # Two windows: a spike in the last one is seen as such only with good steps before it.
        return steps[-2 * self.config.spikes.spike_window_steps :]

    def _roll_back(self, bad: BadStretch, started_at: int, recorder: Any) -> Checkpoint | None:
        """Back to the last checkpoint before the bad steps; their batches are skipped from now on.

        Durable when it returns: later checkpoints are set aside, the skipped batches written down.
        """
        resumed = self.catalog.newest_good(self.log, before_step=bad.first_step) or self._origin
        if 0 < started_at == _step_of(resumed) == self._rolled_back_to:
            # From there it went wrong before: the weights may have been hurt earlier still.
            older = self.catalog.newest_good(self.log, before_step=started_at)
            resumed = older or resumed
        self._rolled_back_to = _step_of(resumed)
        self.catalog.clean(good_until=_step_of(resumed))
        position = resumed.state.next_batch if resumed else 0
        first = max(position, bad.first_batch - self.config.spikes.skip_before)
        skipped = (first, bad.last_batch + 1)
        self.skipped = (*self.skipped, skipped)
        (self.run_dir / SKIPPED_FILE).write_text(json.dumps(self.skipped) + "\n")
        details = {
            "to_step": _step_of(resumed),
            "first_bad_step": bad.first_step,
            "first_batch": skipped[0],
            "stop_batch": skipped[1],
        }
        ray.get(recorder.add_event.remote(bad.last_step, "rollback", **details))
        self.log(
            f"steps {bad.first_step} to {bad.last_step} were bad: back to step {_step_of(resumed)}, "
            f"global batches {skipped[0]} to {skipped[1] - 1} are skipped"
        )
        return resumed

    def _read_skipped(self, resumed: Checkpoint | None) -> Skipped:
        """Of this run's file and of the checkpoint, which may be another run's copy."""
        path = self.run_dir / SKIPPED_FILE
        ranges = json.loads(path.read_text()) if path.is_file() else []
        found = {(int(first), int(stop)) for first, stop in ranges}
        return tuple(sorted(found | set(resumed.state.skipped_batches if resumed else ())))

    def _check_rollbacks(self, rollbacks: int, step: int) -> None:
        if rollbacks > MAX_ROLLBACKS:
            raise TrainingFailed(
                f"run {self.run_dir.name} went back to step {step} {rollbacks} times in a row because of "
                "bad losses; start again with a lower peak_lr, or go on with spike_detection=false"
            )

    def _check_preemptions(self, preemptions: int) -> None:
        limit = self.config.cluster.max_preemptions
        if limit is not None and preemptions > limit:
            raise TrainingFailed(
                f"run {self.run_dir.name} was preempted {preemptions} times (max_preemptions={limit}); "
                "everything is saved, the same command goes on"
            )

    def _check_failures(self, failures: int, step: int, error: Exception) -> None:
        if self.signals.stop.is_set():
            raise TrainingFailed(
                f"run {self.run_dir.name} failed while it was being stopped: {root_cause(error)}"
            ) from error
        if failures > self.config.cluster.max_failures:
            raise TrainingFailed(
                f"run {self.run_dir.name} failed {failures} times without progress at step {step}: "
                f"{root_cause(error)}"
            ) from error
        self.log(f"run failed ({root_cause(error)})")

    def _next_attempt(self) -> int:
        """The first number that Ray has no directory for: each fit() has its own name."""
        names = (self.run_dir / "ray").names()
        return max([self._attempts, *(int(name) for name in names if name.isdigit())]) + 1

    def _interrupted_message(self, started_at: int) -> str:
        checkpoints = self.catalog.complete()
        if not checkpoints:
            return BEFORE_FIRST_STEP
        at = checkpoints[-1].state.step
        saved = "saved" if at > started_at else "no step since the checkpoint"
        return (
            f"interrupted at step {at}, {saved}: {checkpoints[-1].path}; the same command goes on"
        )

    def _write_report(self) -> None:
        """Write `report.html`, before the trackers finish, which take it."""
        try:
            write_report(self.sync)
        except Exception as error:  # a picture that fails must not cost a trained model
            self.log(f"no report: {error!r}")


def _step_of(checkpoint: Checkpoint | None) -> int:
    return checkpoint.state.step if checkpoint else 0
