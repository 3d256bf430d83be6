"""A run from its checks to its end, over any number of attempts.

Each attempt uses the largest number of workers that fits; below `min_workers` the run waits. After it,
`policy` decides:

- finished, or stopped by a signal: end.
- failed or hung: retry from the newest good checkpoint, `max_failures` times in a row without progress.
- out of memory: retry with half the micro-batch.
- preempted: retry on the remaining nodes, `max_preemptions` times in total.
- resized: restart with more workers.
- rolled back: restart from the last checkpoint before the bad steps, skipping their global batches.
"""

from __future__ import annotations

import gc
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import ray

from raytrain_gpt.checkpoint.catalog import Catalog, Checkpoint, resume_step
from raytrain_gpt.cluster.compilers import check_compiler
from raytrain_gpt.cluster.failures import root_cause
from raytrain_gpt.cluster.signals import StopSignals
from raytrain_gpt.config.arithmetic import divisors
from raytrain_gpt.config.resolved import FittedConfig, RunPlan
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.registry import count_model
from raytrain_gpt.data.locations import make_order, run_location
from raytrain_gpt.data.mixed_order import MixedOrder
from raytrain_gpt.data.mixture import Mixture
from raytrain_gpt.data.tokenizer_file import read_tokenizer
from raytrain_gpt.errors import Interrupted, StorageError, TrainingFailed
from raytrain_gpt.evaluate.hellaswag import read_choices
from raytrain_gpt.format import Log, amount, count
from raytrain_gpt.ingest.ray_dataset import IngestSpec
from raytrain_gpt.storage.lease import LEASE_FILE, Lease, hold_lease
from raytrain_gpt.storage.location import Location
from raytrain_gpt.tracking.mlflow_run import mark_interrupted
from raytrain_gpt.tracking.run_files import CONFIG_FILE, TRACKERS_DIR, Row
from raytrain_gpt.tracking.summary import RunSummary
from raytrain_gpt.train import policy, preflight
from raytrain_gpt.train.attempt import Attempt, Backend
from raytrain_gpt.train.memory_fit import MemorySearch, fit_memory
from raytrain_gpt.train.resume import ResumePoints, read_skipped
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
    """

    evaluated: Callable[[Row], None]
    killed: threading.Event
    tracker_tags: dict[str, str] = field(default_factory=dict)


class Run:
    """One `train` command, or one trial of a sweep."""

    def __init__(
        self,
        config: FittedConfig,
        world_size: int,
        data: Mixture,
        place: Backend,
        signals: StopSignals,
        log: Log,
        train_loop: TrainLoop,
        trial: TrialHooks | None = None,
    ) -> None:
        self.config, self.world_size, self.data = config, world_size, data
        self.place, self.signals, self.log = place, signals, log
        self.train_loop, self.trial = train_loop, trial
        self.run_dir = run_location(config)
        self.output = RunOutput(self.run_dir, trial.tracker_tags if trial else {}, log)
        self.resume = ResumePoints(config, log)
        self.catalog = Catalog(self.run_dir)
        self._choices: object = None
        self._most_sequences: int | None = None  # of a micro-batch, after a lack of memory
        self._session = uuid.uuid4().hex[:8]
        self._attempts = 0

    def train(self) -> RunSummary:
        """Check, resume, train and finish."""
        # Read-only checks run before the lease: a mistake must not disturb a run that holds it.
        preflight.check_data(self.config, self.data)
        if (path := self.config.eval.hellaswag_path) is not None:
            tokenizer = read_tokenizer(self.data.first.directory)
            self._choices = self.place.share(read_choices(self.config, path, tokenizer))
        if not self.config.cluster.use_gpu:  # GPU workers check on their nodes
            check_compiler(self.config, on_gpu=False, where="a CPU")
        self.place.check_storage(self.run_dir, [d.directory for d in self.data.datasets])
        with hold_lease(self.run_dir / LEASE_FILE, f"run {self.run_dir.name}", self.log) as lease:
            saved = self.catalog.complete()
            preflight.check_disk(self.config, self.run_dir, self.data.vocab_size, len(saved))
            existing = self.resume.find(self.config)
            # Under the lease, no other process writes these files.
            self.output.sync.pull(TRACKERS_DIR)
            if existing is None:
                self.output.check_is_ours()
                self.config = preflight.check_init_from(self.config, self.data)
            self.config, resumed = self.resume.start(self.config, self.data, existing)
            if existing is not None and existing.state.step >= self.config.train.max_steps:
                return self._summary(existing, was_finished=True)
            self._announce()
            self.output.write_config(self.config)
            self.resume.skipped = read_skipped(self.run_dir, resumed, self.log)
            return self._supervise(resumed, lease)

    def _announce(self) -> None:
        self.log(f"configuration {self.run_dir / CONFIG_FILE}")
        train, c = self.config.train, self.config.cluster
        shape = GPTShape.of(self.config, self.data.vocab_size)
        self.log(
            f"model {amount(count_model(shape).num_parameters)} parameters | data "
            f"{amount(self.data.split_tokens('train'))} train tokens ({self.data.tokenizer}) | "
            f"{_epochs(self.config, self.data)} | {count(train.max_steps, 'step')} of "
            f"{count(train.global_batch_tokens, 'token')} | "
            f"{count(self.world_size, 'worker')} with {count(c.cpus_per_worker, 'CPU')}"
            f"{f' and {c.gpus_per_worker:g} GPU' if c.use_gpu else ''}{' each' * (self.world_size > 1)}"
        )
        for line in preflight.warnings(self.config):
            self.log(line)

    def _supervise(self, resumed: Checkpoint | None, lease: Lease) -> RunSummary:
        place, config, counters = self.place, self.config, policy.Counters()
        while True:
            self.world_size = place.await_workers(config, self.world_size, self._pause, self.log)
            started_at = resume_step(resumed)
            end = self._attempt(resumed, lease)
            if end.user_error is not None:
                raise end.user_error from None
            reason = root_cause(end.error) if end.error else ""
            if end.kind == "failed" and not place.retries:
                newest = self.resume.newest()
                raise TrainingFailed(
                    f"run {self.run_dir.name} failed ({reason}); run the same command to resume from "
                    f"{newest.path if newest else 'its start, as it has no checkpoint'}"
                ) from end.error
            resumed, stopping = self.resume.after(end), self.signals.stop.is_set()
            step = resume_step(resumed)
            match policy.next_action(end, started_at, step, counters, config, stopping):
                case policy.Finish():
                    assert resumed is not None, "a run has steps, and the last one is saved"
                    return self._summary(resumed)
                case policy.Interrupt():
                    raise Interrupted(self._interrupted_message(started_at))
                case policy.GiveUp(message):
                    raise TrainingFailed(message) from end.error
                case policy.StartAttempt(counters, pause_s):
                    if end.error is not None:
                        self.log(f"run failed ({reason})")
                    self._pause(pause_s)
                    if end.bad_streak is None:  # the rollback has printed where it resumes
                        self.log(f"{end.kind}; resuming from step {step}")

    def _pause(self, seconds: float) -> None:
        """Wait; a signal interrupts the run."""
        if self.signals.stop.wait(seconds):
            raise Interrupted(self._interrupted_message(started_at=0))

    def _summary(self, newest: Checkpoint, was_finished: bool = False) -> RunSummary:
        return RunSummary(self.run_dir, self.output.sync, newest.state.step, newest, was_finished)

    def _attempt(self, resumed: Checkpoint | None, lease: Lease) -> policy.AttemptEnd:
        """Run one attempt; on return all files are written and a rollback is complete.

        Raises:
            ClusterError: another run took over the name.
        """
        lease.verify()  # it may have expired while the run waited for nodes
        try:
            config, most = self.config, self._most_sequences
            gc.collect()  # an attempt that ran out of memory may have left tensors in cycles
            plan = fit_memory(
                config if most is None else config.updated({"micro_batch_sequences": most}),
                self.world_size,
                self.data.vocab_size,
                self.log,
                self.place.resources,
                resumed=resumed.state if resumed else None,
                stop=self.signals.stop,
                is_trial=self.trial is not None,
            )
        except (ray.exceptions.RayError, SystemExit) as error:  # looking at a GPU failed
            return policy.AttemptEnd("failed", error)
        work_dir = Location.of(self.output.sync.work_dir)
        self.signals.defer(partial(mark_interrupted, work_dir, self.config))
        # Checkpoints above this step are damaged or from a dead attempt; this attempt rewrites them.
        self.catalog.clean(good_until=resume_step(resumed))
        attempt = self._new_attempt(plan, resumed, lease)
        end = self._settled(attempt, self.place.train(attempt))
        return self._after_lack_of_memory(end, plan) if end.kind == "out_of_memory" else end

    def _after_lack_of_memory(self, end: policy.AttemptEnd, plan: RunPlan) -> policy.AttemptEnd:
        """Let the next attempt take half the micro-batch; its checkpoints remember that."""
        config, world_size = plan.config, plan.world_size
        micro = config.train.micro_batch_sequences
        smaller = [n for n in divisors(plan.worker_sequences) if n <= micro // 2]
        can_go_on = self.place.retries or world_size == 1  # other processes of torchrun have ended
        if not smaller or config.train.exact or not can_go_on:
            search = MemorySearch.of(self.config, world_size, self.data.vocab_size, bf16=True)
            raise TrainingFailed(
                f"run {self.run_dir.name} ran out of memory with micro_batch_sequences={micro} "
                f"({root_cause(end.error) if end.error else ''}); {search.advice}"
            )
        self._most_sequences = smaller[-1]
        self.log(
            f"out of memory with micro_batch_sequences {micro}; the next attempt takes {smaller[-1]}"
        )
        return replace(end, error=None)  # its traceback would keep the tensors

    def _settled(self, attempt: Attempt, end: policy.AttemptEnd) -> policy.AttemptEnd:
        """Roll back from bad steps, and write the attempt's last files.

        The order matters: the lease is verified again, a rollback retires checkpoints, and only then are
        the end recorded and the report written. If the storage failed or the lease is lost, the files may
        belong to another process, so neither rollback nor report touches them.
        """
        resumed = attempt.spec.resumed
        try:
            if isinstance(end.user_error, StorageError):
                raise end.user_error
            attempt.lease.verify()
            if end.bad_streak is not None:
                self.resume.go_back(end.bad_streak, resume_step(resumed), attempt.recorder)
            newest = self.resume.newest() or resumed
        except BaseException as error:
            attempt.record_end(end, resumed)
            attempt.close(end, resumed)
            if isinstance(error, StorageError):
                return replace(end, user_error=error)
            raise
        attempt.record_end(end, newest)
        if self.trial is None:  # charts take longer than many a trial's steps
            self.output.write_report()
        attempt.close(end, newest)
        self.output.sync.push()
        return end

    def _new_attempt(self, plan: RunPlan, resumed: Checkpoint | None, lease: Lease) -> Attempt:
        self._attempts = self.output.next_attempt(self._attempts)
        step = resume_step(resumed)
        shape = GPTShape.of(self.config, self.data.vocab_size)
        details = {
            "time": time.time(),
            "attempt": self._attempts,
            "num_workers": self.world_size,
            "session": self._session,
            "num_parameters": count_model(shape).num_parameters,
            "train_tokens": self.data.split_tokens("train"),
            "tokenizer": self.data.tokenizer,
        }
        recorder = self.output.recorder_spec(self.config, step, self.catalog.complete(), details)
        # Two windows, so that spikes in the second are judged against good steps of the first.
        num_rows = 2 * self.config.spikes.spike_window_steps
        return Attempt(
            spec=WorkerSpec(
                plan=plan,
                run_dir=self.run_dir,
                ingest=replace(
                    IngestSpec.of(plan, self.data),
                    first_batch=resumed.state.next_batch if resumed else 0,
                    skipped=self.resume.skipped,
                ),
                resumed=resumed,
                rows_before=self.output.last_steps(step, recorder.saved_rows, num_rows),
                attempt=self._attempts,
                lease_token=lease.token,
                hellaswag=self._choices,
                is_trial=self.trial is not None,
            ),
            recorder=self.place.recorder(recorder),
            work_dir=self.output.sync.work_dir,
            train_loop=self.train_loop,
            stop=self.signals.stop,
            killed=self.trial.killed if self.trial else self.signals.stop,
            lease=lease,
            log=self.log,
            evaluated=self.trial.evaluated if self.trial else None,
        )

    def _interrupted_message(self, started_at: int) -> str:
        newest = self.resume.newest()
        if newest is None:
            return BEFORE_FIRST_STEP
        at = newest.state.step
        saved = "saved" if at > started_at else "no step since the checkpoint"
        return f"interrupted at step {at}, {saved}: {newest.path}; run the same command to resume"


def _epochs(config: Config, data: Mixture) -> str:
    order = make_order(config, data)
    if not isinstance(order, MixedOrder):
        return (
            f"{count(order.batches_per_epoch, 'step')} per epoch, dropping {order.remainder_sequences} of "
            f"{order.num_sequences} sequences"
        )
    datasets = zip(data.names, data.weights, order.epochs(config.train.max_steps), strict=True)
    shares = [f"{name} {float(weight):.1%} ({n:.2f} epochs)" for name, weight, n in datasets]
    return f"mixed: {', '.join(shares)}"
