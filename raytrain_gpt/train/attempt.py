"""One attempt of a run: one `fit()` of Ray with its recorder, watched until it ends.

`fit()` runs in a thread. The main thread shows console lines, passes a stop on, and watches: for ranks
that make no progress, for more workers that have become possible, and for the lease.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import ray
import ray.train
import ray.train.torch
from ray.data import ExecutionOptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain_gpt.checkpoint.catalog import Checkpoint
from raytrain_gpt.cluster.capacity import largest_world_size
from raytrain_gpt.cluster.connection import cluster_resources
from raytrain_gpt.cluster.failures import root_cause
from raytrain_gpt.config.resolved import RunPlan
from raytrain_gpt.core.spikes import BadStretch
from raytrain_gpt.evaluate.async_evaluation import AsyncEvaluation
from raytrain_gpt.ingest.ray_dataset import IngestSpec, ingest_dataset
from raytrain_gpt.storage.lease import Lease
from raytrain_gpt.tracking.recorder import RankState, RecorderSpec, start_recorder
from raytrain_gpt.tracking.run_files import Row
from raytrain_gpt.train.worker import WorkerSpec

POLL_S = 0.5
WATCH_EVERY_S = 2.0
STACKS_WITHIN_S = 5.0
TORCH_TIMEOUT_S = 600

Log = Callable[[str], None]
Kind = Literal["finished", "stopped", "preempted", "resized", "rolled_back", "hung", "failed"]


@dataclass(frozen=True)
class End:
    """How an attempt ended.

    Attributes:
        kind: What it was.
        error: What `fit()` raised, or what is missing.
        bad_stretch: Of `rolled_back`.
    """

    kind: Kind
    error: Exception | None = None
    bad_stretch: BadStretch | None = None


@dataclass
class Attempt:
    """All that one `fit()` needs.

    Attributes:
        plan: Configuration, workers, and what each does in a step.
        ingest: What is read.
        num_batches: Global batches to read.
        recorder: What the recorder begins with.
        rows_before: The last rows of steps before.
        resumed: Checkpoint to go on from, or None.
        number: Of this attempt; Ray knows it by this name.
        train_loop: What every worker runs.
        stop: Set by a signal.
        lease: On the run's name.
        log: Gets console lines.
        choices: Reference to the HellaSwag's `Choices`, or None.
        beside: Evaluates the checkpoints, or None: the workers do.
        evaluated: In a trial of a sweep, called with every evaluation but the last, while the ranks wait.
    """

    plan: RunPlan
    ingest: IngestSpec
    num_batches: int
    recorder: RecorderSpec
    rows_before: list[dict[str, Any]]
    resumed: Checkpoint | None
    number: int
    train_loop: Callable[[WorkerSpec], None]
    stop: threading.Event
    lease: Lease
    log: Log
    choices: Any
    async_evaluation: AsyncEvaluation | None = None
    evaluated: Callable[[Row], None] | None = None
    _asked_to_stop: bool = field(default=False, init=False)
    _watched_at: float = field(default=0.0, init=False)
    _resizing: bool = field(default=False, init=False)
    _hung: bool = field(default=False, init=False)
    _more_since: float | None = field(default=None, init=False)

    def run(self) -> tuple[End, Any]:
        """How it ended, and the recorder, which is still open.

        Raises:
            ClusterError: another run took the name over.
        """
        recorder = start_recorder(self.recorder)
        spec = WorkerSpec(
            plan=self.plan,
            run_dir=self.recorder.run_dir,
            ingest=self.ingest,
            resumed=self.resumed,
            rows_before=self.rows_before,
            attempt=self.number,
            lease_token=self.lease.token,
            recorder=recorder,
            choices=None if self.async_evaluation else self.choices,
            is_trial=self.evaluated is not None,
        )
        error = self._fit_and_watch(self._trainer(spec), recorder)
        return self._end(error, recorder), recorder

    def _trainer(self, spec: WorkerSpec) -> ray.train.torch.TorchTrainer:
        c = self.plan.config.cluster
        filesystem, path = (self.recorder.run_dir / "ray").ray_filesystem()
        return ray.train.torch.TorchTrainer(
            self.train_loop,
            train_loop_config=spec,
            torch_config=ray.train.torch.TorchConfig(timeout_s=TORCH_TIMEOUT_S),
            scaling_config=ray.train.ScalingConfig(
                num_workers=self.plan.world_size,
                use_gpu=c.use_gpu,
                resources_per_worker=c.worker_resources,
            ),
            run_config=ray.train.RunConfig(
                name=f"{self.number:03d}",
                storage_filesystem=filesystem,
                storage_path=path,
                failure_config=ray.train.FailureConfig(
                    max_failures=0, max_preemption_failures=0, controller_failure_limit=0
                ),
            ),
            datasets={"train": ingest_dataset(self.ingest, self.num_batches)},
            dataset_config=ray.train.DataConfig(
                execution_options=ExecutionOptions(preserve_order=True)
            ),
        )

    def _fit_and_watch(self, trainer: Any, recorder: Any) -> Exception | None:
        raised: list[Exception] = []

        def fit() -> None:
            try:
                trainer.fit()
            except Exception as error:
                raised.append(error)

        thread = threading.Thread(target=fit, name="fit", daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                for news in ray.get(recorder.take_news.remote(POLL_S)):
                    self._take(news, recorder)
                if self.async_evaluation is not None:
                    self.async_evaluation.hand_over(recorder, self.log)
                if self.stop.is_set() and not self._asked_to_stop:
                    self._asked_to_stop = True
                    if not ray.get(recorder.is_training.remote()):
                        self._kill_ranks(recorder)
                        return None
                    self.log("stopping: saving a checkpoint first (twice more to stop at once)")
                    recorder.order.remote("stop")
                self._watch(recorder)
        except ray.exceptions.RayActorError as error:
            # The recorder is dead, and so end the workers, which find nobody to tell.
            thread.join(TORCH_TIMEOUT_S)
            raised.append(error)
        return raised[0] if raised else None

    def _take(self, news: str | Row, recorder: Any) -> None:
        if isinstance(news, str):
            self.log(news)
        elif self.async_evaluation is not None:
            self.async_evaluation.look()
        elif self.evaluated is not None:
            self.evaluated(news)
            if not self.stop.is_set():
                recorder.order.remote("go_on")

    def _watch(self, recorder: Any) -> None:
        if time.monotonic() - self._watched_at < WATCH_EVERY_S:
            return
        self._watched_at = time.monotonic()
        if self.lease.lost.is_set():
            self._kill_ranks(recorder)
            self.lease.check()
        timeout_s = self.plan.config.cluster.hang_timeout_s
        if timeout_s and not self._hung and ray.get(recorder.stalled_s.remote()) > timeout_s:
            self._hung = True
            self._dump_stacks(recorder, timeout_s)
            self._kill_ranks(recorder)
        if not self._resizing and self._more_workers_for_long():
            self._resizing = True
            self.log("more workers are possible: saving a checkpoint and starting again with them")
            recorder.order.remote("stop")

    def _more_workers_for_long(self) -> bool:
        world_size = self.plan.world_size
        if world_size == self.plan.config.cluster.num_workers:
            return False
        possible = largest_world_size(self.plan.config, cluster_resources())
        if possible is None or possible <= world_size:
            self._more_since = None
            return False
        now = time.monotonic()
        self._more_since = self._more_since or now
        return now - self._more_since >= self.plan.config.cluster.resize_after_s

    def _dump_stacks(self, recorder: Any, timeout_s: float) -> None:
        """Say which rank hangs, and where all of them are."""
        recorder.order.remote("dump")
        stacks: dict[int, str] = ray.get(recorder.take_stacks.remote(STACKS_WITHIN_S))
        ranks: dict[int, RankState] = ray.get(recorder.ranks.remote())
        self.log(f"no progress for {timeout_s:g} s (hang_timeout_s); stacks of all ranks:")
        texts = []
        for rank, state in sorted(ranks.items()):
            missing = f"does not answer (process {state.pid})"
            texts.append(f"[rank {rank}] {stacks.get(rank, missing).rstrip()}")
            self.log(texts[-1])
        path = self.recorder.sync.work_dir / f"stacks-{self.number:03d}.txt"
        with contextlib.suppress(OSError):  # they are on the console, too
            path.write_text("\n".join(texts) + "\n", "utf-8")

    def _kill_ranks(self, recorder: Any) -> None:
        """End all workers at once, frozen ones too: by their nodes, not by their own doing."""
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        ranks: dict[int, RankState] = ray.get(recorder.ranks.remote())
        for state in ranks.values():
            if state.node_id in alive:
                node = NodeAffinitySchedulingStrategy(state.node_id, soft=False)
                _kill.options(scheduling_strategy=node).remote(state.pid)

    def _end(self, error: Exception | None, recorder: Any) -> End:
        outcome = None
        with contextlib.suppress(ray.exceptions.RayActorError):
            outcome = ray.get(recorder.outcome.remote())
        if outcome is not None:
            # They left by themselves and have saved; what Ray says of it afterwards loses nothing.
            if outcome.bad_stretch is not None:
                return End("rolled_back", bad_stretch=outcome.bad_stretch)
            if outcome.left_for == "preempted":
                return End("preempted")
            if outcome.left_for == "stopped":
                return End("stopped" if self.stop.is_set() else "resized")
            if error is None:
                return End("finished")
        if error is None and self.stop.is_set():
            return End("stopped")
        error = error or RuntimeError("the workers left before the last step")
        return End("hung" if self._hung else "failed", error)

    def tell_end(self, end: End, recorder: Any, newest: Checkpoint | None) -> None:
        """Write the attempt's last event; a dead recorder cannot."""
        step = newest.state.step if newest else 0
        details = {} if end.error is None else {"error": root_cause(end.error)}
        with contextlib.suppress(ray.exceptions.RayActorError):
            ray.get(recorder.add_event.remote(step, end.kind, **details))

    def close(self, end: End, recorder: Any, newest: Checkpoint | None) -> None:
        """Finish all files, and hand them to the trackers; a dead recorder has done so."""
        with contextlib.suppress(ray.exceptions.RayActorError):
            self._close(end, recorder, newest)

    def _close(self, end: End, recorder: Any, newest: Checkpoint | None) -> None:
        status = {"finished": "FINISHED", "failed": "FAILED", "hung": "FAILED"}.get(
            end.kind, "KILLED"
        )
        ray.get(recorder.close.remote(status, str(newest.path) if newest else None))
        for news in ray.get(recorder.take_news.remote(0.01)):
            self._take(news, recorder)
        ray.kill(recorder)


@ray.remote(num_cpus=0, max_retries=0)  # type: ignore[untyped-decorator]
def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
