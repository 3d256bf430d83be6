"""`train`: from a configuration to a finished run.

1. Connect to the cluster, decide every `auto`, check data, storage and disk (`preflight`).
2. Find the newest good checkpoint and compare its configuration (`resume`).
3. Start the recorder, then `TorchTrainer.fit()` in a thread; the main thread shows console lines and
   passes signals on.
4. When `fit()` fails, start again from the newest checkpoint, up to `max_failures` times in a row
   without progress. Ray's own retries are off, so that there is one place that decides.
5. Write the report and say where everything is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
from ray.data import ExecutionOptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain_gpt.config import Config
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.data.shards import MANIFEST_FILE, Manifest, read_manifest, write_atomically
from raytrain_gpt.data.sources import STDLIB
from raytrain_gpt.errors import Interrupted, TrainingFailed
from raytrain_gpt.runtime import cluster, preflight
from raytrain_gpt.runtime.checkpoints import Catalogue, Checkpoint
from raytrain_gpt.runtime.console import amount
from raytrain_gpt.runtime.failures import root_cause, user_error_in
from raytrain_gpt.runtime.ingest import IngestSpec, ingest_dataset
from raytrain_gpt.runtime.prepare import prepare
from raytrain_gpt.runtime.recorder import Recorder, RecorderSpec
from raytrain_gpt.runtime.report import write_report
from raytrain_gpt.runtime.resume import check_changes, find_resume
from raytrain_gpt.runtime.run_files import CONFIG_FILE
from raytrain_gpt.runtime.run_lock import LOCK_FILE, held_lock
from raytrain_gpt.runtime.signals import StopSignals
from raytrain_gpt.runtime.worker import WorkerSpec, train_worker

DEFAULT_DATA = "data/stdlib"
POLL_S = 0.5
BEFORE_FIRST_STEP = "interrupted before the first step; nothing is half-written"

Log = Callable[[str], None]


@dataclass(frozen=True)
class RunSummary:
    """How a run ended.

    Attributes:
        run_dir: Its directory.
        step: Updates done.
        checkpoint: The newest checkpoint, or None.
        already_finished: The run had done all its steps before.
    """

    run_dir: Path
    step: int
    checkpoint: Checkpoint | None
    already_finished: bool = False


def train(config: Config, log: Log) -> RunSummary:
    """Run a configuration to its end, going on where the run of that name stopped.

    Args:
        config: May hold `auto` and relative paths.
        log: Gets every console line.

    Raises:
        UserError: the configuration, data, storage or cluster cannot be used.
        Interrupted: Ctrl+C or SIGTERM, after saving.
        TrainingFailed: the run failed more than `max_failures` times without progress.
    """
    with StopSignals(BEFORE_FIRST_STEP) as signals:
        relative_data = config.data.data_path
        config = preflight.absolute_paths(config)
        data_dir = Path(config.data.data_path)
        make_data = relative_data == DEFAULT_DATA and not (data_dir / MANIFEST_FILE).exists()
        if not make_data:
            read_manifest(data_dir)
        resources = cluster.connect(cluster.cpus_to_start(config))
        try:
            config, world_size = cluster.fit_to_cluster(config, resources)
            if make_data:
                log(f"preparing {data_dir} from the Python standard library's source")
                prepare([STDLIB], data_dir, "bytes", log=log)
            return Run(config, world_size, signals, log).go()
        finally:
            if resources.ours:
                ray.shutdown()


def prepare_dataset(
    sources: list[str], directory: Path, tokenizer: str, log: Log, **options: Any
) -> Manifest:
    """The `prepare` command: connect to the cluster and tokenize on all of it.

    Raises:
        UserError: a source, the tokenizer or the directory cannot be used.
        Interrupted: Ctrl+C or SIGTERM; finished shards are kept.
    """
    with StopSignals("interrupted; finished shards are kept, the same command goes on"):
        resources = cluster.connect(num_cpus_needed=0)
        try:
            return prepare(sources, directory.absolute(), tokenizer, log=log, **options)
        finally:
            if resources.ours:
                ray.shutdown()


class Run:
    """One `train` command on a connected cluster."""

    def __init__(
        self,
        config: Config,
        world_size: int,
        signals: StopSignals,
        log: Log,
    ) -> None:
        self.config = config
        self.world_size = world_size
        self.signals = signals
        self.log = log
        self.run_dir = Path(config.run.storage_path) / config.run.run_name
        self.catalogue = Catalogue(self.run_dir)
        self.manifest: Manifest = read_manifest(Path(config.data.data_path))

    def go(self) -> RunSummary:
        """Check, resume, train, and end well."""
        ingest = self._ingest(self.world_size)
        preflight.check_data(ingest)
        preflight.check_compile(self.config)
        preflight.check_storage(self.run_dir, ingest.directory)
        with held_lock(self.run_dir / LOCK_FILE, f"run {self.run_dir.name}"):
            existing = self.catalogue.complete()
            preflight.check_disk(self.config, self.run_dir, self.manifest.vocab_size, len(existing))
            resumed = find_resume(self.config, self.run_dir, self.log)
            if resumed is not None:
                check_changes(self.config, self.manifest, resumed, self.log)
                if resumed.state.step >= self.config.train.max_steps:
                    return RunSummary(self.run_dir, resumed.state.step, resumed, True)
            else:
                self.config = preflight.check_init_from(self.config, self.manifest)
            self._announce(ingest)
            write_atomically(self.run_dir / CONFIG_FILE, self.config.to_yaml())
            return self._supervise(resumed)

    def _ingest(self, world_size: int) -> IngestSpec:
        return IngestSpec(
            directory=Path(self.config.data.data_path),
            manifest=self.manifest,
            seq_len=self.config.data.seq_len,
            batch_sequences=self.config.batch_sequences,
            seed=self.config.train.seed,
            world_size=world_size,
            eval_tokens=self.config.eval.eval_tokens,
        )

    def _announce(self, ingest: IngestSpec) -> None:
        self.log(self.config.to_yaml(compact=True).rstrip())
        order, train = ingest.order(), self.config.train
        shape = GPTShape.of(self.config, self.manifest.vocab_size)
        self.log(
            f"model {amount(shape.num_parameters)} parameters | data "
            f"{amount(self.manifest.split_tokens('train'))} train tokens ({self.manifest.tokenizer}) | "
            f"{order.batches_per_epoch} steps an epoch, {order.remainder_sequences} of "
            f"{order.num_sequences} sequences left out | {train.max_steps} steps of "
            f"{train.global_batch_tokens} tokens"
        )

    def _supervise(self, resumed: Checkpoint | None) -> RunSummary:
        """`fit()` until the run is finished, stopped, or fails too often without progress."""
        failures, attempt = 0, 0
        while True:
            started_at = resumed.state.step if resumed else 0
            attempt = _next_attempt(self.run_dir, attempt)
            error = self._attempt(resumed, attempt)
            if error is None:
                break
            known = user_error_in(error)
            if known is not None:
                raise known from None
            if self.signals.stop.is_set():
                raise TrainingFailed(
                    f"run {self.run_dir.name} failed while it was being stopped: {root_cause(error)}"
                ) from error
            resumed = self.catalogue.newest_good(self.log)
            now_at = resumed.state.step if resumed else 0
            failures = failures + 1 if now_at <= started_at else 1
            if failures > self.config.cluster.max_failures:
                raise TrainingFailed(
                    f"run {self.run_dir.name} failed {failures} times without progress at step "
                    f"{now_at}: {root_cause(error)}"
                ) from error
            self.log(f"run failed ({root_cause(error)}); going on from step {now_at}")
        newest = self.catalogue.complete()[-1]
        return RunSummary(self.run_dir, newest.state.step, newest)

    def _attempt(self, resumed: Checkpoint | None, attempt: int) -> Exception | None:
        """One `fit()` with its recorder; returns what it failed with.

        Raises:
            Interrupted: a signal stopped it.
        """
        step = resumed.state.step if resumed else 0
        next_batch = resumed.state.next_batch if resumed else 0
        self.signals.defer()
        self.catalogue.clean(good_until=step)
        recorder = self._start_recorder(step)
        ingest = self._ingest(self.world_size)
        spec = WorkerSpec(
            config=cluster.fit_micro_batch(self.config, self.world_size),
            run_dir=self.run_dir,
            ingest=ingest,
            resume_dir=resumed.path if resumed else None,
            resume_state=resumed.state if resumed else None,
            recorder=recorder,
        )
        stop_batch = next_batch + self.config.train.max_steps - step
        trainer = self._trainer(spec, attempt, ingest_dataset(ingest, next_batch, stop_batch))
        error = self._fit_and_watch(trainer, recorder)
        stopped = self.signals.stop.is_set()
        newest = self.catalogue.complete()
        done = bool(newest) and newest[-1].state.step >= self.config.train.max_steps
        status = "FINISHED" if done else "KILLED" if stopped and error is None else "FAILED"
        if status == "FAILED":
            at = newest[-1].state.step if newest else 0
            recorder.add_event.remote(
                at, "failed", error=root_cause(error) if error else "left early"
            )
        self._finish(recorder, status)
        if status == "KILLED":
            raise Interrupted(_interrupted_message(self.run_dir, newest, step))
        return None if done else error or RuntimeError("the workers left before the last step")

    def _start_recorder(self, step: int) -> Any:
        storage = Path(self.config.run.storage_path)
        uri, artifacts = self.config.tracking.mlflow_uri, None
        if uri == "auto":
            uri, artifacts = f"sqlite:///{storage / 'mlflow.db'}", str(storage / "mlartifacts")
        spec = RecorderSpec(
            run_dir=self.run_dir,
            config=self.config,
            mlflow_uri=uri,
            artifact_location=artifacts,
            step=step,
            saved_rows=[row for c in self.catalogue.complete() for row in c.rows()],
        )
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        return Recorder.options(scheduling_strategy=here).remote(spec)  # type: ignore[attr-defined]

    def _trainer(
        self, spec: WorkerSpec, attempt: int, dataset: ray.data.Dataset
    ) -> ray.train.torch.TorchTrainer:
        c = self.config.cluster
        resources = {"CPU": c.cpus_per_worker, **({"GPU": 1} if c.use_gpu else {})}
        return ray.train.torch.TorchTrainer(
            train_worker,
            train_loop_config=spec,
            torch_config=ray.train.torch.TorchConfig(timeout_s=600),
            scaling_config=ray.train.ScalingConfig(
                num_workers=self.world_size,
                use_gpu=bool(c.use_gpu),
                resources_per_worker=resources,
            ),
            run_config=ray.train.RunConfig(
                name=f"{attempt:03d}",
                storage_path=str(self.run_dir / "ray"),
                failure_config=ray.train.FailureConfig(max_failures=0, controller_failure_limit=0),
            ),
            datasets={"train": dataset},
            dataset_config=ray.train.DataConfig(
                execution_options=ExecutionOptions(preserve_order=True)
            ),
        )

    def _fit_and_watch(self, trainer: Any, recorder: Any) -> Exception | None:
        """Run `fit()` in a thread; show lines and pass on a stop; returns what it raised."""
        raised: list[Exception] = []

        def fit() -> None:
            try:
                trainer.fit()
            except Exception as error:
                raised.append(error)

        thread = threading.Thread(target=fit, daemon=True)
        thread.start()
        asked = False
        while thread.is_alive():
            for line in ray.get(recorder.take_lines.remote(POLL_S)):
                self.log(line)
            if self.signals.stop.is_set() and not asked:
                asked = True
                if not ray.get(recorder.is_training.remote()):
                    return None
                self.log("stopping: saving a checkpoint first (twice more to stop at once)")
                recorder.request_stop.remote()
        return raised[0] if raised else None

    def _finish(self, recorder: Any, status: str) -> None:
        for line in ray.get(recorder.take_lines.remote(0.01)):
            self.log(line)
        try:
            write_report(self.run_dir)
        except Exception as error:  # a picture that fails must not cost a trained model
            self.log(f"no report: {error!r}")
        ray.get(recorder.close.remote(status))
        for line in ray.get(recorder.take_lines.remote(0.01)):
            self.log(line)
        ray.kill(recorder)


def _next_attempt(run_dir: Path, attempt: int) -> int:
    """The first number above `attempt` that Ray has no directory for: each fit() has its own name."""
    taken = [int(p.name) for p in (run_dir / "ray").glob("[0-9]*") if p.name.isdigit()]
    return max([attempt, *taken]) + 1


def _interrupted_message(run_dir: Path, checkpoints: list[Checkpoint], step: int) -> str:
    if not checkpoints:
        return BEFORE_FIRST_STEP
    at = checkpoints[-1].state.step
    saved = "saved" if at > step else "no step since the checkpoint"
    return f"interrupted at step {at}, {saved}: {checkpoints[-1].path}; the same command goes on"
