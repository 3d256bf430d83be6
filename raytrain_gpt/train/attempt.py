"""One attempt of a run: one `fit()` of Ray with its recorder, watched until it ends.

`fit()` runs in a thread. The main thread prints console lines, forwards a stop signal, and watches for
stalled ranks, for capacity for more workers, and for the lease.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import ray
import ray.train
import ray.train.torch

from raytrain_gpt.checkpoint.catalog import Checkpoint, resume_step
from raytrain_gpt.cluster.connection import cluster_resources
from raytrain_gpt.cluster.failures import root_cause
from raytrain_gpt.cluster.orphans import kill_controllers, kill_process, remove_orphaned_groups
from raytrain_gpt.core.spikes import BadStreak
from raytrain_gpt.errors import RaytrainGptError
from raytrain_gpt.evaluate.async_evaluation import AsyncEvaluation
from raytrain_gpt.format import Log, count
from raytrain_gpt.ingest.ray_dataset import ingest_dataset
from raytrain_gpt.storage.lease import Lease
from raytrain_gpt.tracking.recorder import CleanExit, RankState, RecorderSpec
from raytrain_gpt.tracking.recorder_handle import ActorRecorder, RecorderHandle
from raytrain_gpt.tracking.run_files import Row
from raytrain_gpt.train.policy import Kind, ScaleUp
from raytrain_gpt.train.worker_group import TorchConfig, WorkerSpec, start_fit, worker_group

POLL_S = 0.5
WATCH_EVERY_S = 2.0
STACKS_TIMEOUT_S = 5.0
START_TIMEOUT_S = 300.0
"""Longest time until every rank's process has reported; Ray grants resources within 60 s or not at all."""
END_TIMEOUT_S = 120.0
"""Longest time from the ranks' exit to the end of `fit()`, after which its controller counts as hung."""
TORCH_TIMEOUT_S = 600
"""Longest wait in a torch collective. Survivors of a dead rank would otherwise hang for torch's default of
30 minutes before Ray Train sees them fail."""


@dataclass(frozen=True)
class AttemptEnd:
    """How an attempt ended.

    Attributes:
        error: Exception of `fit()` or of the memory probe, or one for an early exit.
        user_error: This package's error inside `error`, which a retry would repeat.
        gone_back_to: Checkpoint rolled back to, or None for step 0.
    """

    kind: Kind
    error: Exception | None = None
    bad_streak: BadStreak | None = None
    user_error: RaytrainGptError | None = None
    gone_back_to: Checkpoint | None = None


def classify_end(
    outcome: CleanExit | None, error: Exception | None, *, stopping: bool, hung: bool
) -> AttemptEnd:
    """Classify the end of an attempt.

    Args:
        outcome: The workers' report on exit, or None if they or the recorder died.
        hung: The ranks were killed because one of them stalled.
    """
    if outcome is not None:
        # The workers have saved and exited; a later error from Ray loses nothing.
        if outcome.bad_streak is not None:
            return AttemptEnd("rolled_back", bad_streak=outcome.bad_streak)
        if outcome.left_for == "preempted":
            return AttemptEnd("preempted")
        if outcome.left_for == "stopped":
            return AttemptEnd("stopped" if stopping else "resized")
        if error is None:
            return AttemptEnd("finished")
    if error is None and stopping:
        return AttemptEnd("stopped")
    error = error or RuntimeError("the workers left before the last step")
    return AttemptEnd("hung" if hung else "failed", error)


@dataclass
class Attempt:
    """One `fit()`: created, run, closed.

    Attributes:
        killed: Set if `stop` means an interrupted run; a sweep ends a trial without it.
        evaluations: Evaluates checkpoints asynchronously, or None if the workers evaluate.
        evaluated: For a sweep's trial, called with every evaluation but the last, while the ranks wait.
    """

    spec: WorkerSpec
    recorder_spec: RecorderSpec
    train_loop: Callable[[WorkerSpec], None]
    stop: threading.Event
    killed: threading.Event
    lease: Lease
    log: Log
    evaluations: AsyncEvaluation | None = None
    evaluated: Callable[[Row], None] | None = None

    def __post_init__(self) -> None:
        self.recorder: RecorderHandle
        self._asked_to_stop = self._hung = self._is_training = False
        self._begun_at = self._watched_at = time.monotonic()
        self._left_at: float | None = None
        self._controller_hung = False
        self._scale_up = ScaleUp(self.spec.plan.config, self.spec.plan.world_size)

    def run(self) -> AttemptEnd:
        """Train until the workers have exited or died.

        Raises:
            ClusterError: another run took over the name.
        """
        self.recorder = ActorRecorder(self.recorder_spec)
        self.spec = replace(self.spec, recorder=self.recorder)
        config = self.spec.plan.config
        steps_left = config.train.max_steps - resume_step(self.spec.resumed)
        trainer = worker_group(
            self.train_loop,
            self.spec,
            config.cluster,
            self.spec.plan.world_size,
            name=f"{self.spec.attempt:03d}",
            directory=self.spec.run_dir / "ray",
            dataset=ingest_dataset(self.spec.ingest, steps_left),
            torch_config=TorchConfig(timeout_s=TORCH_TIMEOUT_S),
        )
        error = self._fit_and_watch(trainer)
        kill_controllers()
        remove_orphaned_groups()
        outcome = None
        with contextlib.suppress(ray.exceptions.RayActorError):
            outcome = self.recorder.ask("outcome")
        return classify_end(outcome, error, stopping=self.stop.is_set(), hung=self._hung)

    def _fit_and_watch(self, trainer: ray.train.torch.TorchTrainer) -> Exception | None:
        thread, raised = start_fit(trainer)
        try:
            while thread.is_alive():
                for news in self.recorder.ask("take_news", POLL_S):
                    self._take(news)
                if self.evaluations is not None:
                    self.evaluations.hand_over(self.recorder, self.log)
                if self.stop.is_set() and not self._asked_to_stop:
                    if not self.recorder.ask("is_training"):
                        self._kill_ranks()
                        return None
                    self._say_stopping()
                    self.recorder.send("command", "stop")
                self._watch()
        except ray.exceptions.RayActorError as error:
            # The recorder is dead; the workers notice by their heartbeats and exit.
            thread.join(TORCH_TIMEOUT_S)
            raised.append(error)
        return raised[0] if raised and not self._controller_hung else None

    def _say_stopping(self) -> None:
        self._asked_to_stop = True
        self.log(
            "stopping: saving a checkpoint first (press Ctrl+C twice more to stop without saving)"
        )

    def _take(self, news: str | Row) -> None:
        if isinstance(news, str):
            self.log(news)
        elif self.evaluations is not None:
            self.evaluations.look()
        elif self.evaluated is not None:
            self.evaluated(news)
            if not self.stop.is_set():
                self.recorder.send("command", "continue_run")

    def _watch(self) -> None:
        # Each phase has its own timeout. Until all ranks are training, START_TIMEOUT_S bounds the start of
        # their processes, since compiling may take longer than hang_timeout_s. While they train,
        # hang_timeout_s bounds the time without progress of any rank. After they exit, a stalled rank is
        # normal, so only END_TIMEOUT_S applies, to Ray's controller.
        now = time.monotonic()
        if now - self._watched_at < WATCH_EVERY_S:
            return
        self._watched_at = now
        if self.lease.lost.is_set():
            self._kill_ranks()
            self.lease.check()
        if not self._is_training:
            remove_orphaned_groups()  # this attempt may be waiting for a dead one's resources
            self._is_training = self.recorder.ask("is_training")
            self._watch_start(now)
        if self._left_at is None and self.recorder.ask("outcome") is not None:
            self._left_at = now
        if self._left_at is not None:
            self._watch_end(now - self._left_at)
            return
        timeout_s = self.spec.plan.config.cluster.hang_timeout_s
        if timeout_s and not self._hung and self.recorder.ask("stalled_s") > timeout_s:
            self._hung = True
            self._dump_stacks(timeout_s)
            self._kill_ranks()
        if self._scale_up.is_due(cluster_resources, now):
            self.log("capacity for more workers: saving a checkpoint and restarting with them")
            self.recorder.send("command", "stop")

    def _watch_start(self, now: float) -> None:
        if self._hung or now - self._begun_at < START_TIMEOUT_S:
            return
        num_started = len(self.recorder.ask("ranks"))
        world_size = self.spec.plan.world_size
        if num_started < world_size:
            self._hung = True
            self.log(
                f"only {num_started} of {count(world_size, 'worker')} started within {START_TIMEOUT_S:g} s"
            )
            kill_controllers()

    def _watch_end(self, since_left_s: float) -> None:
        if since_left_s >= END_TIMEOUT_S and not self._controller_hung:
            self._controller_hung = True
            self.log(
                f"Ray Train still running {END_TIMEOUT_S:g} s after its workers exited; killing its "
                "controller"
            )
            kill_controllers()

    def _dump_stacks(self, timeout_s: float) -> None:
        """Log and save the stacks of all ranks, to identify the hung one."""
        self.recorder.send("command", "dump")
        stacks: dict[int, str] = self.recorder.ask("take_stacks", STACKS_TIMEOUT_S)
        ranks: dict[int, RankState] = self.recorder.ask("ranks")
        self.log(f"no progress for {timeout_s:g} s (hang_timeout_s); stacks of all ranks:")
        texts = []
        for rank, state in sorted(ranks.items()):
            missing = f"does not respond (process {state.pid})"
            texts.append(f"[rank {rank}] {stacks.get(rank, missing).rstrip()}")
            self.log(texts[-1])
        path = self.recorder_spec.sync.work_dir / f"stacks-{self.spec.attempt:03d}.txt"
        with contextlib.suppress(OSError):  # the console also shows them
            path.write_text("\n".join(texts) + "\n", "utf-8")

    def _kill_ranks(self) -> None:
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        ranks: dict[int, RankState] = self.recorder.ask("ranks")
        for state in ranks.values():
            if state.node_id in alive:
                kill_process(state.node_id, state.pid)

    def record_end(self, end: AttemptEnd, newest: Checkpoint | None) -> None:
        """Write the attempt's last event, unless the recorder is dead."""
        details = {} if end.error is None else {"error": root_cause(end.error)}
        with contextlib.suppress(ray.exceptions.RayActorError):
            self.recorder.ask("add_event", resume_step(newest), end.kind, **details)

    def close(self, end: AttemptEnd, newest: Checkpoint | None) -> None:
        """Finish all files and hand them to the trackers; after a dead recorder, the next one does."""
        ends = {"finished": "finished", "failed": "failed", "hung": "failed"}
        told = ends.get(end.kind, "interrupted")
        if end.kind == "stopped" and not self.killed.is_set():
            told = "finished"  # the sweep ended this trial as complete
        with contextlib.suppress(ray.exceptions.RayActorError):
            self.recorder.ask("close", told, str(newest.path) if newest else None)
            for news in self.recorder.ask("take_news", 0.01):
                self._take(news)
            self.recorder.end()
