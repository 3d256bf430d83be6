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

import contextlib
import gc
import time
import uuid
from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

import ray

from raytrain_gpt.checkpoint.catalog import (
    CODE_FILE,
    Catalog,
    Checkpoint,
    read_skipped,
    resume_step,
)
from raytrain_gpt.cluster.capacity import Pause
from raytrain_gpt.cluster.compilers import check_compiler
from raytrain_gpt.cluster.failures import root_cause
from raytrain_gpt.cluster.orphans import last_words
from raytrain_gpt.cluster.signals import STOPPING, StopSignals
from raytrain_gpt.columns import Row
from raytrain_gpt.config.plan import Plan
from raytrain_gpt.config.schema import Config
from raytrain_gpt.config.sections import ClusterSection
from raytrain_gpt.config.wording import divisors
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.registry import count_model
from raytrain_gpt.data.locations import run_location
from raytrain_gpt.data.mixture import Mixture
from raytrain_gpt.errors import Interrupted, StorageError, TrainingFailed
from raytrain_gpt.evaluate.evaluation import check_evaluations
from raytrain_gpt.events import Evaluated, Events, Exited, Link, Rows, next_event
from raytrain_gpt.format import Log
from raytrain_gpt.runs.report import write_report
from raytrain_gpt.runs.summary import RunSummary
from raytrain_gpt.storage.lease import LEASE_FILE, Lease, hold_lease
from raytrain_gpt.storage.location import Location
from raytrain_gpt.trackers.books import Books
from raytrain_gpt.trackers.configured import complete_trackers
from raytrain_gpt.trackers.mlflow_run import mark_interrupted
from raytrain_gpt.trackers.run_files import (
    CONFIG_FILE,
    TRACKERS_DIR,
    RunSync,
    merge_rows,
    read_rows,
    restart,
)
from raytrain_gpt.trackers.tracked_run import End, TrackedRun
from raytrain_gpt.train import policy, preflight
from raytrain_gpt.train.memory_fit import MemorySearch, fit_memory
from raytrain_gpt.train.resume import Rollbacks, resume_from
from raytrain_gpt.train.worker_group import RankJob, TrainLoop

BEFORE_FIRST_STEP = "interrupted before the first step; nothing is half-written"


class Place(Protocol):
    """Place where a run trains: a Ray cluster (`on_ray`), or this process (`local_mode`)."""

    retries: bool
    """Whether a new attempt follows a failed one."""

    def check_storage(self, run_dir: Location, data: Sequence[Location]) -> None:
        """Check that all nodes share the directories; raises ClusterError."""

    def await_workers(self, config: Config, current: int, pause: Pause, log: Log) -> int:
        """Return the number of workers for the next attempt, once they fit."""

    def events(self, job: RankJob, train_loop: TrainLoop, lease: Lease) -> Events:
        """Train, and yield the events of rank 0 and the lines of all; raises the ranks' error.

        Setting `job.link.stop` makes the ranks save a checkpoint and exit. A lost lease ends them.
        """


T = TypeVar("T")
NewRows = Generator[list[Row], None, T]
"""A trial's rows since the last evaluation, at every evaluation, where the run waits; then a result."""


class Run:
    """One `train` command, or one trial of a sweep.

    Args:
        asked: The cluster section before it was fitted to this cluster, for `config.yaml`.
        trial_tags: Tags of a trial for the trackers, or None. A trial waits after every evaluation but the
            last, ends when it is then stopped, and has no report.

    Attributes:
        link: What the ranks share with this process, if they train in it.
        stopped_as: What the trackers are told of a stop.
        summary: The result, once the run has ended.
    """

    summary: RunSummary

    def __init__(
        self,
        config: Config,
        world_size: int,
        data: Mixture,
        place: Place,
        signals: StopSignals,
        log: Log,
        train_loop: TrainLoop,
        trial_tags: dict[str, str] | None = None,
        asked: ClusterSection | None = None,
    ) -> None:
        self.config, self.world_size, self.data = config, world_size, data
        self.asked = asked or config.cluster
        self.place, self.signals, self.log = place, signals, log
        self.train_loop, self._trial_tags = train_loop, trial_tags
        self.link = Link(signals.stop)
        self.stopped_as: End = "interrupted"
        self._new_rows: list[Row] = []  # of a trial, since its last evaluation at this step
        self._evaluated_at = 0
        self.run_dir = run_location(config)
        self.sync = RunSync(self.run_dir)
        self.catalog = Catalog(self.run_dir)
        self._most_sequences: int | None = None  # of a micro-batch, after a lack of memory
        self._session = uuid.uuid4().hex[:8]
        self._attempts = 0
        self._told_to_stop = False

    def train(self) -> RunSummary:
        """Train to the end."""
        for _ in self.evaluations():
            pass
        return self.summary

    def evaluations(self) -> NewRows[None]:
        """Check, resume, train and finish; a trial yields the new rows at every evaluation.

        The first ones may be those of an earlier process.
        """
        # Read-only checks run before the lease: a mistake must not disturb a run that holds it.
        preflight.check_data(self.config, self.data)
        check_evaluations(self.config)
        if not self.config.cluster.use_gpu:  # GPU workers check on their nodes
            check_compiler(self.config, on_gpu=False, where="a CPU")
        self.place.check_storage(self.run_dir, [d.directory for d in self.data.datasets])
        with hold_lease(self.run_dir / LEASE_FILE, f"run {self.run_dir.name}", self.log) as lease:
            saved = self.catalog.complete()
            preflight.check_disk(self.config, self.run_dir, self.data.vocab_size, len(saved))
            existing = self.catalog.pick("newest", self.log)
            # Under the lease, no other process writes these files.
            self.sync.pull(TRACKERS_DIR)
            if existing is None:
                preflight.check_is_ours(self.sync)
                self.config = preflight.check_init_from(self.config, self.data, self.log)
            self.config, resumed = resume_from(self.config, self.data, existing, self.log)
            if existing is None and resumed is not None:
                self.sync.pull()  # the record of the new branch
            if existing is not None and existing.state.step >= self.config.train.max_steps:
                self._restore_rows(existing)
                complete_trackers(self._tracked(existing))
                self.sync.push()
                self._summarize(existing, was_finished=True)
            else:
                preflight.announce(self.config, self.world_size, self.data, self.log)
                self._write_config(self.config.model_copy(update={"cluster": self.asked}))
                skipped = read_skipped(self.run_dir, resumed)
                self.rollbacks = Rollbacks(self.config, skipped, self.log)
                yield from self._supervise(resumed, lease)
        yield from self._missed_evaluations(self.summary.step)

    def _write_config(self, config: Config) -> None:
        """Write the resolved configuration and the code, so that `--config` and `--code` repeat the run."""
        Location.of(self.sync.work_dir / CONFIG_FILE).write_text(config.to_yaml())
        if config.code:
            Location.of(self.sync.work_dir / CODE_FILE).write_text(config.code.text)
        self.sync.push()

    def _next_attempt(self) -> int:
        """Return the first attempt number that neither Ray's directories nor rows use.

        Every `fit()` gets a fresh name. Ray Train resumes automatically from the index of a used name
        and rewrites it in place, so a kill at the wrong moment makes the name unusable.
        """
        names = (self.run_dir / "ray").names()
        rows = read_rows(self.sync.work_dir)
        recorded: list[int] = [row["attempt"] for row in rows if row.get("event") == "attempt"]
        return (
            max([self._attempts, *recorded, *(int(name) for name in names if name.isdigit())]) + 1
        )

    def _supervise(self, resumed: Checkpoint | None, lease: Lease) -> NewRows[None]:
        place, config, counters = self.place, self.config, policy.Counters()
        while True:
            self.world_size = place.await_workers(config, self.world_size, self._pause, self.log)
            started_at = resume_step(resumed)
            end = yield from self._attempt(resumed, lease)
            if end.user_error is not None:
                raise end.user_error from None
            reason = root_cause(end.error) if end.error else ""
            if end.kind == "failed" and not place.retries:
                newest = self._newest()
                raise TrainingFailed(
                    f"run {self.run_dir.name} failed ({reason}); run the same command to resume from "
                    f"{newest.path if newest else 'its start, as it has no checkpoint'}"
                ) from end.error
            is_over = end.kind in ("finished", "stopped")  # nothing is loaded any more
            resumed = self._newest() if is_over else self.catalog.pick("newest", self.log)
            stopping = self.signals.stop.is_set()
            step = resume_step(resumed)
            match policy.next_action(end, started_at, step, counters, config, stopping):
                case "finish":
                    assert resumed is not None, "a run has steps, and the last one is saved"
                    self._summarize(resumed)
                    return
                case "interrupt":
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

    def _newest(self) -> Checkpoint | None:
        """Return the newest checkpoint that looks complete, for messages."""
        return next(reversed(self.catalog.complete()), None)

    def _summarize(self, newest: Checkpoint, was_finished: bool = False) -> None:
        step = newest.state.step
        self.summary = RunSummary(self.run_dir, self.sync, step, newest, was_finished)

    def _attempt(self, resumed: Checkpoint | None, lease: Lease) -> NewRows[policy.AttemptEnd]:
        """Run one attempt; on return all files are written and a rollback is complete."""
        lease.verify()  # it may have expired while the run waited for nodes
        yield from self._missed_evaluations(resume_step(resumed))
        self._pause(0.0)  # a trial may have been stopped
        try:
            gc.collect()  # an attempt that ran out of memory may have left tensors in cycles
            config = self.config
            if self._most_sequences is not None:
                config = config.replaced({"micro_batch_sequences": self._most_sequences})
            plan = fit_memory(config, self.world_size, self.data.vocab_size, self.log, resumed)
        except (ray.exceptions.RayError, SystemExit) as error:  # `gpu_facts` failed
            return policy.AttemptEnd("failed", error)
        work_dir = Location.of(self.sync.work_dir)
        self.signals.defer(partial(mark_interrupted, work_dir, self.config))
        # Checkpoints above this step are damaged or from a dead attempt; this attempt rewrites them.
        self.catalog.clean(good_until=resume_step(resumed))
        self._attempts = self._next_attempt()
        try:
            books = self._books(resumed)
        except OSError as error:  # a full disk
            return policy.AttemptEnd("failed", error)
        job = self._job(plan, resumed, lease)
        end = self._finish_attempt(
            books, (yield from self._train(job, books, lease)), resumed, lease
        )
        return self._halve_micro_batch(end, plan) if end.kind == "out_of_memory" else end

    def _train(self, job: RankJob, books: Books, lease: Lease) -> NewRows[policy.AttemptEnd]:
        """Train until the ranks have exited or died, entering their events in the books."""
        exited: Exited | None = None
        error: BaseException | None = None
        answer = None
        self.link.look = partial(self._look, lease)
        try:
            with contextlib.closing(self.place.events(job, self.train_loop, lease)) as events:
                while (event := next_event(events, answer)) is not None:
                    try:
                        books.take(event)
                    except OSError:  # of the caller's `log`: no run continues without its console
                        self.signals.stop.set()
                    answer = None
                    match event:
                        case Rows(rows) if job.is_trial:
                            self._new_rows += rows
                        case Evaluated():
                            yield self._taken_rows()
                            answer = not self.signals.stop.is_set()
                        case Exited():
                            exited = event
        except GeneratorExit:
            raise
        except BaseException as raised:  # signals are deferred: it may be from the user's code
            error = raised
        finally:
            self.link.rest()
        return policy.classify_end(exited, error, stopping=self.signals.stop.is_set())

    def _look(self, lease: Lease) -> None:
        """Stop the ranks if the lease is lost, and log a stop once."""
        if lease.lost.is_set():
            self.signals.stop.set()
        if self.signals.stop.is_set() and not self._told_to_stop:
            self._told_to_stop = True
            self.log(STOPPING)

    def _taken_rows(self) -> list[Row]:
        rows, self._new_rows = self._new_rows, []
        self._evaluated_at = rows[-1]["step"]
        return rows

    def _missed_evaluations(self, step: int) -> NewRows[None]:
        """Yield a trial's rows up to a step, if they have an evaluation that this process has not yielded."""
        if self._trial_tags is None:
            return
        rows = merge_rows(read_rows(self.sync.work_dir), self._saved_rows(), step)
        new = [row for row in rows if row["step"] > self._evaluated_at and "event" not in row]
        self._new_rows = new
        if any("val/loss" in row for row in new):
            yield self._taken_rows()

    def _halve_micro_batch(self, end: policy.AttemptEnd, plan: Plan) -> policy.AttemptEnd:
        """Let the next attempt use half the micro-batch; its checkpoints record that."""
        config, world_size = plan.config, plan.world_size
        micro = plan.micro_batch_sequences
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
            f"out of memory with micro_batch_sequences {micro}; the next attempt uses {smaller[-1]}"
        )
        return replace(end, error=None)  # its traceback would keep the tensors

    def _finish_attempt(
        self, books: Books, end: policy.AttemptEnd, resumed: Checkpoint | None, lease: Lease
    ) -> policy.AttemptEnd:
        """Roll back from bad steps, and write the attempt's last files.

        The order matters: the lease is verified again, a rollback retires checkpoints, and only then are
        the end recorded and the report written. If the storage failed or the lease is lost, the files may
        belong to another process, so neither rollback nor report touches them.
        """
        try:
            if isinstance(end.user_error, StorageError):
                raise end.user_error
            lease.verify()
            if end.bad_streak is not None:
                self.rollbacks.go_back(end.bad_streak, resume_step(resumed), books)
            newest = self._newest() or resumed
        except BaseException as error:
            self._note_end(books, end, resumed)
            self._close(books, end, resumed)
            if isinstance(error, StorageError):
                return replace(end, user_error=error)
            raise
        self._note_end(books, end, newest)
        if self._trial_tags is None:  # charts take longer than many a trial's steps
            self._write_report()
        self._close(books, end, newest)
        self.sync.push()
        return end

    def _note_end(self, books: Books, end: policy.AttemptEnd, newest: Checkpoint | None) -> None:
        details = {}
        if end.error is not None:
            details["error"] = root_cause(end.error)
            if lines := last_words(end.error):
                self.log(lines)
                details["stderr"] = lines
        books.note(resume_step(newest), end.kind, **details)

    def _close(self, books: Books, end: policy.AttemptEnd, newest: Checkpoint | None) -> None:
        told: dict[str, End] = {"finished": "finished", "stopped": self.stopped_as}
        told |= dict.fromkeys(("failed", "hung", "out_of_memory"), "failed")
        books.close(told.get(end.kind, "interrupted"), str(newest.path) if newest else None)

    def _saved_rows(self) -> list[Row]:
        return [row for checkpoint in self.catalog.complete() for row in checkpoint.rows()]

    def _restore_rows(self, newest: Checkpoint) -> None:
        """Take rows from the checkpoints that a driver did not write, as it died after the last step."""
        work_dir, saved, step = self.sync.work_dir, self._saved_rows(), newest.state.step
        rows = read_rows(work_dir)
        if len(merge_rows(rows, saved, step)) > len(rows):
            restart(work_dir, step, saved, self.log)
            self._write_report()

    def _write_report(self) -> None:
        try:
            write_report(self.sync)
        except Exception as error:  # a failed chart must not cost a trained model
            self.log(f"no report: {error!r}")

    def _books(self, resumed: Checkpoint | None) -> Books:
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
        return Books(self.sync, self._tracked(resumed), details, self._saved_rows())

    def _tracked(self, resumed: Checkpoint | None) -> TrackedRun:
        directory, tags = self.sync.work_dir, self._trial_tags or {}
        newest = str(resumed.path) if resumed else None
        return TrackedRun(directory, self.config, resume_step(resumed), tags, newest, self.log)

    def _job(self, plan: Plan, resumed: Checkpoint | None, lease: Lease) -> RankJob:
        steps = [row for row in read_rows(self.sync.work_dir) if "train/loss" in row]
        position = resumed.state.position if resumed else self.data.start
        return RankJob(
            run_dir=self.run_dir,
            plan=plan,
            data=self.data,
            position=replace(position, skipped=self.rollbacks.skipped),
            resumed=resumed,
            # Two windows, so that spikes in the second are judged against good steps of the first.
            rows_before=steps[-2 * self.config.spikes.spike_window_steps :],
            attempt=self._attempts,
            lease_token=lease.token,
            is_trial=self._trial_tags is not None,
            link=self.link,
        )

    def _interrupted_message(self, started_at: int) -> str:
        newest = self._newest()
        if newest is None:
            return BEFORE_FIRST_STEP
        at = newest.state.step
        saved = "saved" if at > started_at else "no step since the checkpoint"
        return f"interrupted at step {at}, {saved}: {newest.path}; run the same command to resume"
