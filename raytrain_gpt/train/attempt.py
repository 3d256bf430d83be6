"""One attempt of a run, and the place where it trains: here the Ray cluster, in `local_mode` this process.

On Ray an attempt is one `fit()`, which runs in a thread. The main thread prints console lines, forwards a
stop signal, and watches for stalled ranks, for capacity for more workers, and for the lease.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import ray
import ray.train
import ray.train.torch

from raytrain_gpt.checkpoint.catalog import Checkpoint, resume_step
from raytrain_gpt.cluster.all_nodes import check_storage
from raytrain_gpt.cluster.capacity import Pause, ScaleUp, wait_for_workers
from raytrain_gpt.cluster.connection import cluster_resources
from raytrain_gpt.cluster.failures import root_cause
from raytrain_gpt.cluster.last_words import last_words
from raytrain_gpt.cluster.orphans import kill_controllers, kill_process, remove_orphaned_groups
from raytrain_gpt.config.schema import Config
from raytrain_gpt.format import Log, count
from raytrain_gpt.ingest.ray_dataset import ingest_dataset
from raytrain_gpt.storage.lease import Lease
from raytrain_gpt.storage.location import Location
from raytrain_gpt.tracking.recorder import RankState, RecorderSpec
from raytrain_gpt.tracking.recorder_handle import ActorRecorder, RecorderHandle
from raytrain_gpt.tracking.run_files import Row
from raytrain_gpt.train.policy import AttemptEnd, classify_end
from raytrain_gpt.train.worker_group import TorchConfig, WorkerSpec, start_fit, worker_group

POLL_S = 0.5
WATCH_EVERY_S = 2.0
_STACKS_TIMEOUT_S = 5.0
START_TIMEOUT_S = 300.0
"""Longest time until every rank's process has reported; Ray grants resources within 60 s or not at all."""
END_TIMEOUT_S = 120.0
"""Longest time from the ranks' exit to the end of `fit()`, after which its controller counts as hung."""
STOPPING = "stopping: saving a checkpoint first (press Ctrl+C twice more to stop without saving)"


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


@dataclass(frozen=True)
class Attempt:
    """One attempt: created, trained by a `Backend`, closed.

    Attributes:
        work_dir: Local directory of the run's small files.
    """

    spec: WorkerSpec
    recorder: RecorderHandle
    work_dir: Path
    train_loop: Callable[[WorkerSpec], None]
    stop: threading.Event
    lease: Lease
    log: Log
    trial: TrialHooks | None = None

    def drain_messages(self, within_s: float) -> None:
        """Print the console lines, and act on the evaluations, that arrive in this time."""
        for news in self.recorder.ask("drain_messages", within_s):
            if isinstance(news, str):
                self.log(news)
            elif self.trial is not None:
                self.trial.evaluated(news)
                if not self.stop.is_set():
                    self.recorder.send("command", "continue_run")

    def record_end(self, end: AttemptEnd, newest: Checkpoint | None) -> None:
        """Write the attempt's last event, unless the recorder is dead."""
        details = {}
        if end.error is not None:
            details["error"] = root_cause(end.error)
            if lines := last_words(end.error):
                self.log(lines)
                details["stderr"] = lines
        with contextlib.suppress(ray.exceptions.RayActorError):
            self.recorder.ask("add_event", resume_step(newest), end.kind, **details)

    def close(self, end: AttemptEnd, newest: Checkpoint | None) -> None:
        """Finish all files and hand them to the trackers; if the recorder died, the next attempt does."""
        ends = {
            "finished": "finished",
            **dict.fromkeys(("failed", "hung", "out_of_memory"), "failed"),
        }
        tracker_status = ends.get(end.kind, "interrupted")
        if end.kind == "stopped" and self.trial and not self.trial.killed.is_set():
            tracker_status = "finished"  # the sweep ended this trial as complete
        with contextlib.suppress(ray.exceptions.RayActorError):
            self.recorder.ask("close", tracker_status, str(newest.path) if newest else None)
            self.drain_messages(0.01)
            self.recorder.end()


class Backend(Protocol):
    """Place where a run trains: a Ray cluster, or this process."""

    retries: bool
    """Whether a new attempt follows a failed one."""

    def check_storage(self, run_dir: Location, data: Sequence[Location]) -> None:
        """Check that all nodes share the directories; raises ClusterError."""

    def await_workers(self, config: Config, current: int, pause: Pause, log: Log) -> int:
        """Return the number of workers for the next attempt, once they fit."""

    def recorder(self, spec: RecorderSpec) -> RecorderHandle:
        """Start a recorder."""

    def train(self, attempt: Attempt) -> AttemptEnd:
        """Train until the workers have exited or died; raises ClusterError on a lost lease."""


class RayBackend:
    """The connected Ray cluster as a `Backend`."""

    retries = True
    check_storage = staticmethod(check_storage)
    recorder = staticmethod(ActorRecorder)

    def await_workers(self, config: Config, current: int, pause: Pause, log: Log) -> int:
        return wait_for_workers(config, current, cluster_resources, pause, log)

    def train(self, attempt: Attempt) -> AttemptEnd:
        return _WatchedFit(attempt).run()


class _WatchedFit:
    """One `fit()` and the driver's watch over it."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt, self._recorder, self._log = attempt, attempt.recorder, attempt.log
        self._plan = attempt.spec.plan
        self._asked_to_stop = self._is_training = self._hung = self._controller_hung = False
        self._begun_at = self._watched_at = time.monotonic()
        self._left_at: float | None = None
        self._scale_up = ScaleUp(self._plan.config, self._plan.world_size)

    def run(self) -> AttemptEnd:
        attempt, spec = self._attempt, self._attempt.spec
        config = self._plan.config
        steps_left = config.train.max_steps - resume_step(spec.resumed)
        trainer = worker_group(
            partial(attempt.train_loop, replace(spec, recorder=self._recorder)),
            config.cluster,
            self._plan.world_size,
            name=f"{spec.attempt:03d}",
            directory=spec.run_dir / "ray",
            dataset=ingest_dataset(spec.ingest, steps_left),
            torch_config=TorchConfig(timeout_s=config.cluster.torch_timeout_s),
        )
        error = self._fit_and_watch(trainer)
        kill_controllers()
        remove_orphaned_groups()
        outcome = None
        with contextlib.suppress(ray.exceptions.RayActorError):
            outcome = self._recorder.ask("outcome")
        return classify_end(outcome, error, stopping=attempt.stop.is_set(), hung=self._hung)

    def _fit_and_watch(self, trainer: ray.train.torch.TorchTrainer) -> Exception | None:
        attempt = self._attempt
        thread, raised = start_fit(trainer)
        try:
            while thread.is_alive():
                attempt.drain_messages(POLL_S)
                if attempt.stop.is_set() and not self._asked_to_stop:
                    if not self._recorder.ask("is_training"):
                        self._kill_ranks()
                        return None
                    self._asked_to_stop = True
                    self._log(STOPPING)
                    self._recorder.send("command", "stop")
                self._watch()
        except ray.exceptions.RayActorError as error:
            # The recorder is dead; the workers notice by their heartbeats and exit.
            thread.join(END_TIMEOUT_S)
            raised.append(error)
        return raised[0] if raised and not self._controller_hung else None

    def _watch(self) -> None:
        # Each phase has its own timeout. START_TIMEOUT_S bounds the start of all processes. While they
        # train, hang_timeout_s bounds the time without progress of any rank; before, when compiling may take
        # longer, at least START_TIMEOUT_S. After they exit, a stalled rank is normal, so only END_TIMEOUT_S
        # applies, to Ray's controller.
        now = time.monotonic()
        if now - self._watched_at < WATCH_EVERY_S:
            return
        self._watched_at = now
        if self._attempt.lease.lost.is_set():
            self._kill_ranks()
            self._attempt.lease.check()
        if not self._is_training:
            remove_orphaned_groups()  # this attempt may be waiting for a dead one's resources
            self._is_training = self._recorder.ask("is_training")
            self._watch_start(now)
        if self._left_at is None and self._recorder.ask("outcome") is not None:
            self._left_at = now
        if self._left_at is not None:
            self._watch_end(now - self._left_at)
            return
        timeout_s = self._plan.config.cluster.hang_timeout_s
        if timeout_s and not self._is_training:
            timeout_s = max(timeout_s, START_TIMEOUT_S)
        if timeout_s and not self._hung and self._recorder.ask("stalled_s") > timeout_s:
            self._hung = True
            self._dump_stacks(timeout_s)
            self._kill_ranks()
        if self._scale_up.is_due(cluster_resources, now):
            self._log("capacity for more workers: saving a checkpoint and restarting with them")
            self._recorder.send("command", "stop")

    def _watch_start(self, now: float) -> None:
        if self._hung or now - self._begun_at < START_TIMEOUT_S:
            return
        num_started = len(self._recorder.ask("ranks"))
        world_size = self._plan.world_size
        if num_started < world_size:
            self._hung = True
            self._log(
                f"only {num_started} of {count(world_size, 'worker')} started within {START_TIMEOUT_S:g} s"
            )
            kill_controllers()

    def _watch_end(self, since_left_s: float) -> None:
        if since_left_s >= END_TIMEOUT_S and not self._controller_hung:
            self._controller_hung = True
            self._log(
                f"Ray Train still running {END_TIMEOUT_S:g} s after its workers exited; killing its "
                "controller"
            )
            kill_controllers()

    def _dump_stacks(self, timeout_s: float) -> None:
        """Log and save the stacks of all ranks, to identify the hung one."""
        self._recorder.send("command", "dump")
        stacks: dict[int, str] = self._recorder.ask("take_stacks", _STACKS_TIMEOUT_S)
        ranks: dict[int, RankState] = self._recorder.ask("ranks")
        self._log(f"no progress for {timeout_s:g} s (hang_timeout_s); stacks of all ranks:")
        texts = []
        for rank, state in sorted(ranks.items()):
            missing = f"does not respond (process {state.pid})"
            texts.append(f"[rank {rank}] {stacks.get(rank, missing).rstrip()}")
            self._log(texts[-1])
        path = self._attempt.work_dir / f"stacks-{self._attempt.spec.attempt:03d}.txt"
        with contextlib.suppress(OSError):  # the console also shows them
            path.write_text("\n".join(texts) + "\n", "utf-8")

    def _kill_ranks(self) -> None:
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        ranks: dict[int, RankState] = self._recorder.ask("ranks")
        for state in ranks.values():
            if state.node_id in alive:
                kill_process(state.node_id, state.pid)
