"""A run from its checks to its end, over any number of attempts.

Each attempt uses the largest number of workers that fits; below `min_workers` the run waits. After it,
`policy` decides:

- finished, or stopped by a signal: end.
- failed or hung: retry from the newest good checkpoint, `max_failures` times in a row without progress.
- preempted: retry on the remaining nodes, `max_preemptions` times in total.
- resized: restart with more workers.
- rolled back: restart from the last checkpoint before the bad steps, skipping their global batches.

With async evaluation a run finishes once its last checkpoint is evaluated.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import ray

from raytrain_gpt.checkpoint.branch import create_branch
from raytrain_gpt.checkpoint.catalog import Catalog, Checkpoint, resume_step
from raytrain_gpt.cluster.capacity import Resources
from raytrain_gpt.cluster.compilers import check_compiler
from raytrain_gpt.cluster.connection import cluster_resources
from raytrain_gpt.cluster.failures import root_cause, user_error_in
from raytrain_gpt.cluster.shared_storage import check_storage
from raytrain_gpt.cluster.signals import StopSignals
from raytrain_gpt.config.resolved import FittedConfig, RunPlan
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.data.locations import order_of, run_location
from raytrain_gpt.data.mixed_order import MixedOrder
from raytrain_gpt.data.mixture import Mixture
from raytrain_gpt.data.tokenizer import read_tokenizer
from raytrain_gpt.errors import Interrupted, StorageError, TrainingFailed
from raytrain_gpt.evaluate.async_evaluation import AsyncEvaluation
from raytrain_gpt.evaluate.hellaswag import read_choices
from raytrain_gpt.format import Log, amount, count
from raytrain_gpt.ingest.ray_dataset import IngestSpec
from raytrain_gpt.storage.lease import LEASE_FILE, Lease, hold_lease
from raytrain_gpt.storage.location import Location
from raytrain_gpt.tracking.mlflow_run import mark_killed, mlflow_store
from raytrain_gpt.tracking.run_files import CONFIG_FILE, Row
from raytrain_gpt.tracking.summary import RunSummary
from raytrain_gpt.train import preflight
from raytrain_gpt.train.attempt import Attempt, AttemptEnd
from raytrain_gpt.train.last_evaluations import await_evaluations
from raytrain_gpt.train.memory_fit import fit_memory
from raytrain_gpt.train.policy import AttemptResult, Counters, GiveUp, next_action, wait_for_workers
from raytrain_gpt.train.resume import Rollback, check_changes, find_resume, keep_start
from raytrain_gpt.train.run_output import RunOutput
from raytrain_gpt.train.worker_group import WorkerSpec

BEFORE_FIRST_STEP = "interrupted before the first step; nothing is half-written"

TrainLoop = Callable[[WorkerSpec], None]


@dataclass(frozen=True)
class TrialHooks:
    """Callbacks of a sweep into a run that is one of its trials.

    Attributes:
        evaluated: Called with every evaluation but the last while the ranks wait; to end the run it
            sets the stop signal and returns.
        killed: Set before the stop signal, unless the sweep ends the trial as complete.
        origin: Checkpoint of a different run to start from, until the trial has its own.
    """

    evaluated: Callable[[Row], None]
    killed: threading.Event
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
        trial: TrialHooks | None = None,
    ) -> None:
        self.config, self.world_size, self.data = config, world_size, data
        self.signals, self.log = signals, log
        self.train_loop, self.trial = train_loop, trial
        self.make_attempt: Callable[..., Attempt] = Attempt
        self.origin = trial.origin if trial else None
        self.run_dir = run_location(config)
        self.output = RunOutput(self.run_dir, trial.mlflow_tags if trial else {}, log)
        self.rollback = Rollback(self.run_dir, config.spikes.skip_before, log)
        self.catalog = Catalog(self.run_dir)
        self._choices: Any = None
        self._evaluations: AsyncEvaluation | None = None
        self._session = uuid.uuid4().hex[:8]
        self._attempts = 0

    def train(self) -> RunSummary:
        """Check, resume, train and finish."""
        # Read-only checks run before the lease: a mistake must not disturb a run that holds it.
        preflight.check_data(self.config, self.data)
        self._choices = self._put_choices()
        if not self.config.cluster.use_gpu:  # GPU workers check on their nodes
            check_compiler(self.config, on_gpu=False, where="a CPU")
        self._check_storage()
        with hold_lease(self.run_dir / LEASE_FILE, f"run {self.run_dir.name}", self.log) as lease:
            existing = self.catalog.complete()
            preflight.check_disk(self.config, self.run_dir, self.data.vocab_size, len(existing))
            resumed = find_resume(self.config, self.catalog, self.run_dir.name, self.log)
            self.output.sync.pull()  # under the lease, no other process writes these files
            if resumed is not None:
                self.config = keep_start(self.config, resumed)
                check_changes(self.config, self.data, resumed, self.log)
                if resumed.state.step >= self.config.train.max_steps:
                    with self._evaluating():
                        return self._finished(resumed, lease, trained=False)
            else:
                self.output.check_is_ours()
                self.config = preflight.check_init_from(self.config, self.data)
                resumed = self.origin or create_branch(self.config, self.data, self.log)
            self._announce()
            self.output.write_config(self.config)
            self.rollback.read_skipped(resumed)
            with self._evaluating():
                return self._supervise(resumed, lease)

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Evaluate checkpoints asynchronously inside, if so configured."""
        if self.config.eval.eval_mode == "inline":
            yield
            return
        self._evaluations = AsyncEvaluation(
            self.config, self.catalog, self._choices, self.signals.stop
        )
        with contextlib.closing(self._evaluations):
            yield

    def resources(self) -> Resources:
        """Nodes available now."""
        return cluster_resources()

    def _check_storage(self) -> None:
        check_storage(self.run_dir, [dataset.directory for dataset in self.data.datasets])

    def _await_workers(self) -> int:
        return wait_for_workers(self.config, self.world_size, self.resources, self._pause, self.log)

    def _put_choices(self) -> Any:
        """HellaSwag, on a cluster Ray's reference to it, so that nodes need not share its file, or None."""
        path = self.config.eval.hellaswag_path
        if path is None:
            return None
        choices = read_choices(self.config, path, read_tokenizer(self.data.first.directory))
        return choices if self.config.cluster.is_local else ray.put(choices)

    def _announce(self) -> None:
        self.log(f"configuration {self.run_dir / CONFIG_FILE}")
        train, c = self.config.train, self.config.cluster
        shape = GPTShape.of(self.config, self.data.vocab_size)
        self.log(
            f"model {amount(shape.num_parameters)} parameters | data "
            f"{amount(self.data.split_tokens('train'))} train tokens ({self.data.tokenizer}) | "
            f"{_epochs(self.config, self.data)} | {count(train.max_steps, 'step')} of "
            f"{count(train.global_batch_tokens, 'token')} | "
            f"{count(self.world_size, 'worker')} with {count(c.cpus_per_worker, 'CPU')}"
            f"{f' and {c.gpus_per_worker:g} GPU' if c.use_gpu else ''}{' each' * (self.world_size > 1)}"
        )
        for line in preflight.warnings(self.config):
            self.log(line)

    def _supervise(self, resumed: Checkpoint | None, lease: Lease) -> RunSummary:
        counters = Counters()
        while True:
            self.world_size = self._await_workers()
            started_at = resume_step(resumed)
            end = self._attempt(resumed, lease)
            resumed = self._resume_point(end, resumed)
            result = AttemptResult(
                kind=end.kind,
                started_at=started_at,
                step=resume_step(resumed),
                max_steps=self.config.train.max_steps,
                reason=root_cause(end.error) if end.error else "",
                user_error=end.user_error is not None,
                stopping=self.signals.stop.is_set(),
            )
            action = next_action(result, counters, self.config.cluster, self.run_dir.name)
            if isinstance(action, GiveUp):
                if end.user_error is not None:
                    raise end.user_error from None
                raise TrainingFailed(action.message) from end.error
            if action == "interrupt":
                raise Interrupted(self._interrupted_message(started_at))
            if action == "finish":
                assert resumed is not None, "a run has at least one step, and the last one is saved"
                return self._finished(resumed, lease)
            if end.error is not None:
                self.log(f"run failed ({result.reason})")
            self._pause(action.pause_s)
            if end.bad_streak is None:  # the rollback has printed where it resumes
                self.log(f"{end.kind}; resuming from step {action.from_step}")
            counters = action.counters

    def _resume_point(self, end: AttemptEnd, resumed: Checkpoint | None) -> Checkpoint | None:
        """Checkpoint the run stands at after an attempt; verified only if it will be loaded."""
        if end.user_error is not None:
            return resumed
        if end.kind == "rolled_back":
            return end.gone_back_to
        if end.kind in ("finished", "stopped"):
            return next(reversed(self.catalog.complete()), None)
        return self.catalog.newest_good(self.log) or self.origin

    def _pause(self, seconds: float) -> None:
        """Wait; a signal interrupts the run."""
        if self.signals.stop.wait(seconds):
            raise Interrupted(self._interrupted_message(started_at=0))

    def _finished(self, newest: Checkpoint, lease: Lease, trained: bool = True) -> RunSummary:
        """Summarize a trained run after its pending async evaluations."""
        waited = self._evaluations is not None and await_evaluations(
            self._evaluations, self.config, newest, lease, self.output, self.signals
        )
        was_finished = not (trained or waited)
        return RunSummary(self.run_dir, self.output.sync, newest.state.step, newest, was_finished)

    def _attempt(self, resumed: Checkpoint | None, lease: Lease) -> AttemptEnd:
        """Run one attempt; on return all files are written and a rollback is complete.

        The order matters: the attempt runs, the lease is verified again, a rollback retires checkpoints,
        and only then are the end recorded and the report written. If the storage failed or the lease is
        lost, the files may belong to another process, so neither rollback nor report touches them.

        Raises:
            ClusterError: another run took over the name.
        """
        lease.verify()  # it may have expired while the run waited for nodes
        try:
            plan = fit_memory(
                self.config,
                self.world_size,
                self.data.vocab_size,
                self.log,
                self.resources,
                resumed=resumed.state if resumed else None,
                stop=self.signals.stop,
                is_trial=self.trial is not None,
            )
        except ray.exceptions.RayError as error:  # the memory probe died
            return AttemptEnd("failed", error)
        uri, _ = mlflow_store(self.config)
        self.signals.defer(partial(mark_killed, Location.of(self.output.sync.work_dir), uri))
        # Checkpoints above this step are damaged or from a dead attempt; this attempt rewrites them.
        self.catalog.clean(good_until=resume_step(resumed))
        attempt = self._new_attempt(plan, resumed, lease)
        end = attempt.run()
        user_error = user_error_in(end.error) if end.error is not None else None
        newest = gone_back_to = None
        is_ours = False
        try:
            if not isinstance(user_error, StorageError):
                lease.verify()
                if end.bad_streak is not None:
                    gone_back_to = self.rollback.go_back(
                        end.bad_streak, resume_step(resumed), self.origin, attempt.recorder
                    )
                newest = next(reversed(self.catalog.complete()), None)
                is_ours = True
        except StorageError as error:
            user_error = error
        finally:
            attempt.record_end(end, newest or resumed)
            if is_ours:
                self.output.write_report()
            attempt.close(end, newest or resumed)
        if not isinstance(user_error, StorageError):
            self.output.sync.push()
        return replace(end, user_error=user_error, gone_back_to=gone_back_to)

    def _new_attempt(self, plan: RunPlan, resumed: Checkpoint | None, lease: Lease) -> Attempt:
        self._attempts = self.output.next_attempt(self._attempts)
        step = resume_step(resumed)
        if self._evaluations is not None:
            # No recorder yet: the new one reads finished evaluations from the checkpoints.
            self._evaluations.hand_over(None, self.log)
            self._evaluations.look()
        details = {
            "time": time.time(),
            "attempt": self._attempts,
            "num_workers": self.world_size,
            "session": self._session,
            "num_parameters": GPTShape.of(self.config, self.data.vocab_size).num_parameters,
            "train_tokens": self.data.split_tokens("train"),
            "tokenizer": self.data.tokenizer,
        }
        recorder = self.output.recorder_spec(self.config, step, self.catalog.complete(), details)
        # Two windows, so that spikes in the second are judged against good steps of the first.
        num_rows = 2 * self.config.spikes.spike_window_steps
        return self.make_attempt(
            spec=WorkerSpec(
                plan=plan,
                run_dir=self.run_dir,
                ingest=replace(
                    IngestSpec.of(plan, self.data),
                    first_batch=resumed.state.next_batch if resumed else 0,
                    skipped=self.rollback.skipped,
                ),
                resumed=resumed,
                rows_before=self.output.last_steps(step, recorder.saved_rows, num_rows),
                attempt=self._attempts,
                lease_token=lease.token,
                hellaswag=None if self._evaluations else self._choices,
                is_trial=self.trial is not None,
            ),
            recorder_spec=recorder,
            train_loop=self.train_loop,
            stop=self.signals.stop,
            killed=self.trial.killed if self.trial else self.signals.stop,
            lease=lease,
            log=self.log,
            evaluations=self._evaluations,
            evaluated=self.trial.evaluated if self.trial else None,
        )

    def _interrupted_message(self, started_at: int) -> str:
        checkpoints = self.catalog.complete()
        if not checkpoints:
            return BEFORE_FIRST_STEP
        at = checkpoints[-1].state.step
        saved = "saved" if at > started_at else "no step since the checkpoint"
        return f"interrupted at step {at}, {saved}: {checkpoints[-1].path}; run the same command to resume"


def _epochs(config: Config, data: Mixture) -> str:
    order = order_of(config, data)
    if not isinstance(order, MixedOrder):
        return (
            f"{count(order.batches_per_epoch, 'step')} per epoch, dropping {order.remainder_sequences} of "
            f"{order.num_sequences} sequences"
        )
    datasets = zip(data.names, data.weights, order.epochs(config.train.max_steps), strict=True)
    shares = [f"{name} {float(weight):.1%} ({n:.2f} epochs)" for name, weight, n in datasets]
    return f"mixed: {', '.join(shares)}"
