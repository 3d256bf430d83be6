"""What every worker of a run does: `train_worker` is Ray Train's `train_loop_per_worker`."""

from __future__ import annotations

import json
import math
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import tiktoken
import torch
from ray.train import CheckpointUploadMode

from raytrain_gpt.checkpoint.catalog import (
    ROWS_FILE,
    Catalog,
    Checkpoint,
    CheckpointState,
    is_evaluated,
    read_checkpoint,
)
from raytrain_gpt.checkpoint.collectives import Collectives
from raytrain_gpt.checkpoint.writer import CheckpointWriter
from raytrain_gpt.config.resolved import RunPlan
from raytrain_gpt.core.device import autocast_of, peak_flops, resolve_precision, seed_everything
from raytrain_gpt.core.loop import MicroBatch, StepResult, settle_gradient_buckets, train_steps
from raytrain_gpt.core.loss_scale import loss_scale_for
from raytrain_gpt.core.model import GPT
from raytrain_gpt.core.optim import build_optimizer
from raytrain_gpt.core.parallel import gathered_weights, model_to_evaluate
from raytrain_gpt.core.schedule import learning_rate
from raytrain_gpt.core.spikes import SpikeDetector
from raytrain_gpt.core.state import load_model, load_optimizer
from raytrain_gpt.data.locations import location
from raytrain_gpt.data.order import ORDER_VERSION
from raytrain_gpt.data.tokenizer import TOKENIZER_FILE, read_tokenizer, tokenizer_json
from raytrain_gpt.errors import ClusterError
from raytrain_gpt.evaluate.evaluation import Evaluation
from raytrain_gpt.format import count
from raytrain_gpt.ingest.feed import EvalFeed, TrainFeed, rank_chunks
from raytrain_gpt.ingest.ray_dataset import IngestSpec
from raytrain_gpt.storage.lease import LEASE_FILE, still_held
from raytrain_gpt.storage.location import Location
from raytrain_gpt.tracking.run_files import Row, finite
from raytrain_gpt.train.heartbeat import RecorderClient
from raytrain_gpt.train.model_setup import prepare_model
from raytrain_gpt.train.profile import Profile, StepProfile
from raytrain_gpt.train.step_log import Position, StepLog

PREEMPTION_CHECK_S = 5.0
WRITE_WITHIN_S = 1800.0
"""A checkpoint that takes longer to write, with the storage at hand, hangs."""


@dataclass(frozen=True)
class WorkerSpec:
    """What the driver tells every worker.

    Attributes:
        plan: Configuration, workers, and what each does in a step.
        run_dir: The run's directory.
        ingest: What is read.
        resumed: Checkpoint to go on from, or None.
        rows_before: The last rows of steps before, for judging the next ones.
        attempt: Number of this attempt of the run.
        lease_token: The driver's, without which nothing may be made final.
        recorder: Handle of the recorder actor.
        choices: Reference to the HellaSwag's `Choices`; None: it is not asked.
        is_trial: Of a sweep, which decides after every evaluation whether it goes on.
    """

    plan: RunPlan
    run_dir: Location
    ingest: IngestSpec
    resumed: Checkpoint | None
    rows_before: list[Row]
    attempt: int
    lease_token: str
    recorder: Any
    choices: Any
    is_trial: bool


def train_worker(spec: WorkerSpec) -> None:
    """Train one rank from the resumed step to the last one, or until it is to leave."""
    worker = Worker(spec)
    train, evaluation = spec.plan.config.train, spec.plan.config.eval
    for result in worker.steps():
        worker.record(result)
        step, last = result.step, result.step == train.max_steps
        leave = worker.should_stop()
        due = is_evaluated(step, evaluation.eval_every_steps, train.max_steps)
        evaluates_async = evaluation.eval_mode == "async"
        evaluate = due and not evaluates_async
        save = (
            last or leave or step % train.checkpoint_every_steps == 0 or (due and evaluates_async)
        )
        log = step % train.log_every_steps == 0 or worker.profile.is_edge(step)
        if evaluate or save or log:
            worker.flush()
        if worker.steps_were_bad:
            break
        if leave and not last:
            # Its time may be short: what must not be lost comes first.
            worker.save_checkpoint()
        if evaluate:
            worker.evaluate()
        if save and (last or not leave):
            worker.save_checkpoint()
        if leave or (evaluate and not last and not worker.await_scheduler()):
            break
    worker.finish()


class Worker:
    """One rank: model, optimizer, feeds, and what is not yet reported."""

    def __init__(self, spec: WorkerSpec) -> None:
        context = ray.train.get_context()
        self.spec, self.plan, self.config = spec, spec.plan, spec.plan.config
        self.ranks = Collectives(
            context.get_world_rank(),
            context.get_world_size(),
            self.config.run.retry_for_s + WRITE_WITHIN_S,
        )
        self.link = RecorderClient(spec.recorder, self.ranks.rank)
        self.step = spec.resumed.state.step if spec.resumed else 0

        torch.set_num_threads(self.config.cluster.cpus_per_worker)
        seed_everything(self.config.train.seed, self.ranks.rank)
        self.device = ray.train.torch.get_device()
        self.precision = resolve_precision(self.config.train.precision, self.device)
        self.autocast = autocast_of(self.precision, self.device)
        saved_scale = spec.resumed.state.loss_scale if spec.resumed else None
        self.loss_scale = loss_scale_for(self.precision, self.device, saved_scale)
        self._build_model()
        self._open_feeds()
        self.profile = StepProfile(
            self.config.train.profile_steps,
            self.step,
            self.config.train.max_steps,
            self.device,
            self._profiled if self.ranks.rank == 0 else None,
        )
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        self.log = self._step_log(
            self.raw_model.shape.flops_per_token, peak_flops(name, self.precision)
        )
        self.saver = CheckpointWriter(
            Catalog(spec.run_dir),
            f"{spec.attempt:03d}",
            self.ranks,
            self.raw_model,
            self.optimizer,
            self.config.train.keep_checkpoints,
            self._check_lease,
        )
        self._blocked_s = 0.0
        self._rows_since_checkpoint: list[Row] = []
        self._val_loss: tuple[int, float] | None = None
        self._evaluated: Row = {}
        self._preemption_asked_at = time.monotonic()
        self._leaves_for: str | None = None
        self._hardware = {
            "num_workers": self.ranks.world_size,
            "device": name,
            "threads": torch.get_num_threads(),
            "precision": self.precision,
            "micro_batch_sequences": self.config.train.micro_batch_sequences,
            "activation_checkpointing": self.config.train.activation_checkpointing,
        }
        self.link.log(
            f"{name} on {socket.gethostname()}, {count(torch.get_num_threads(), 'thread')}, "
            f"{self.precision}, {self.plan.worker_sequences} of {self.config.batch_sequences} "
            "sequences a step"
        )

    def _check_lease(self) -> None:
        """Before anything is final: a driver that was frozen may have lost the run's name."""
        if not still_held(self.spec.run_dir / LEASE_FILE, self.spec.lease_token):
            raise ClusterError(
                f"run {self.spec.run_dir.name} was taken over by another process; this one writes no more"
            )

    def _build_model(self) -> None:
        config, resumed = self.config, self.spec.resumed
        self.tokenizer: tiktoken.Encoding = read_tokenizer(self.spec.ingest.data.first.directory)
        vocab_size, eot_token = self.tokenizer.max_token_value + 1, self.tokenizer.eot_token
        self.raw_model = GPT.of(
            config, vocab_size, eot_token, config.train.activation_checkpointing
        )
        source = resumed
        if resumed is None and config.model.init_from:
            source = read_checkpoint(location(config, config.model.init_from))
        if source is None:
            self.raw_model.init_weights(config.train.seed)
        else:
            with source.files() as directory:
                load_model(directory, self.raw_model, crop_context=resumed is None)
                self._prepare_model()
                if resumed is not None:
                    load_optimizer(directory, self.raw_model, self.optimizer)
        if source is None:
            self._prepare_model()

    def _prepare_model(self) -> None:
        self.model = prepare_model(self.raw_model, self.config.train, self.precision, self.device)
        self.eval_model = model_to_evaluate(self.raw_model)
        self.optimizer = build_optimizer(self.raw_model, self.config.optim)

    def _open_feeds(self) -> None:
        micro = self.config.train.micro_batch_sequences
        tables = ray.train.get_dataset_shard("train").iter_batches(
            batch_size=1, batch_format="pyarrow", prefetch_batches=1
        )
        chunks = rank_chunks(tables, self.spec.ingest, self.ranks.rank)
        val = next(chunks)
        eval_feed = EvalFeed(val.tokens[0], val.ids[0], self.spec.ingest.data, micro, self.device)
        choices = None if self.spec.choices is None else ray.get(self.spec.choices)
        parts = (self.config, self.eval_model, self.tokenizer, eval_feed, self.ranks, self.autocast)
        self.evaluation = Evaluation(*parts, choices)
        self.feed = TrainFeed(chunks, micro, self.device)

    def _step_log(self, flops: float, peak: float | None) -> StepLog:
        ingest, resumed = self.spec.ingest, self.spec.resumed
        position = Position(
            next_batch=ingest.first_batch,
            order_hash=resumed.state.order_hash if resumed else ingest.data.hash,
            skipped=ingest.skipped,
        )
        before = [
            (row["step"], row["train/loss"], row["optim/grad_norm"], row.get("optim/loss_scale"))
            for row in self.spec.rows_before
        ]
        detector = SpikeDetector(self.config.spikes, before)
        parts = (self.config, ingest.order(), ingest.data.names, position, self.ranks)
        return StepLog(
            *parts,
            self.feed,
            detector,
            flops_per_token=flops,
            peak_flops=peak,
            device=self.device,
            slowed=self.profile.slowed,
        )

    def steps(self) -> Iterator[StepResult]:
        """The results of all steps to come."""
        config = self.config
        if self.ranks.world_size > 1:
            dummy = torch.zeros(
                config.train.micro_batch_sequences, config.data.seq_len, dtype=torch.int64
            ).to(self.device)
            settle_gradient_buckets(self.model, (dummy, dummy), self.autocast)
        if self.should_stop():
            return
        self.link.call("training_started")
        event = "resume" if self.spec.resumed else "start"
        self.link.event(self.step, event, **self._hardware)
        self.log.start_clock()
        results = train_steps(
            self.model,
            self.optimizer,
            self._watched(self.profile.marked(self.feed.micro_batches())),
            first_step=self.step,
            max_steps=config.train.max_steps,
            micro_batches_per_step=self.plan.micro_batches_per_step,
            learning_rate=lambda step: learning_rate(step, config.optim, config.train.max_steps),
            grad_clip=config.optim.grad_clip,
            autocast=self.autocast,
            seed=config.train.seed,
            rank=self.ranks.rank,
            loss_scale=self.loss_scale,
        )
        yield from self.profile.around(results)

    def _profiled(self, profile: Profile | Exception, took_s: float) -> None:
        """Hand a profile over; the time that it took is no step's."""
        if isinstance(profile, Profile):
            self.link.call("add_profile", self.spec.attempt, profile.use, profile.trace)
        else:
            self.link.log(f"no profile: {type(profile).__name__}: {profile}")
        self.log.leave_out(took_s)

    def _watched(self, micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        for micro_batch in micro_batches:
            self.link.progress()
            yield micro_batch

    def record(self, result: StepResult) -> None:
        """Keep a result; nothing is read from the device yet."""
        self.step = result.step
        self.log.add(result)

    def flush(self) -> None:
        """Reduce what is pending over the ranks (the one place that waits for the device)."""
        rows = self.log.flush()
        for row in rows:
            if row.get("event") == "nonfinite":
                self.link.log(f"step {row['step']}: not finite, the update was skipped")
        self._rows_since_checkpoint += rows
        self.link.rows(rows, force=self.step == self.config.train.max_steps)

    @property
    def steps_were_bad(self) -> bool:
        """Whether so many steps in a row were bad that the run goes back."""
        return self.log.bad_stretch is not None

    def evaluate(self) -> None:
        """Metrics over all ranks, and samples; not counted as training time."""
        started = time.perf_counter()
        with gathered_weights(self.raw_model, self.eval_model):
            metrics = self.evaluation.metrics(self.link.progress)
            self._val_loss = (self.step, metrics["val/loss"])
            numbers = {name: finite(value) for name, value in metrics.items()}
            row = {"step": self.step, **numbers, "perf/eval_s": time.perf_counter() - started}
            self._rows_since_checkpoint.append(row)
            self._evaluated = row
            self.link.rows([row], force=True)
            if self.ranks.rank == 0 and self.config.eval.num_samples:
                self.link.call("add_samples", self.step, self.evaluation.samples())
        self.log.leave_out(time.perf_counter() - started)

    def save_checkpoint(self) -> None:
        """Copy the state; it is written while training goes on."""
        if self.saver.in_flight:
            self._collect()
        started = time.perf_counter()
        lines = "".join(json.dumps(row) + "\n" for row in self._rows_since_checkpoint)
        self._rows_since_checkpoint = []
        texts = {TOKENIZER_FILE: tokenizer_json(self.tokenizer), ROWS_FILE: lines}
        # In a bad stretch the checkpoint before it must stay: the run may go back there.
        self.saver.begin(self._state(), texts, prune=not self.log.in_bad_stretch)
        self._blocked(started)

    def _blocked(self, since: float) -> None:
        self._blocked_s += time.perf_counter() - since
        self.log.leave_out(time.perf_counter() - since)

    def _state(self) -> CheckpointState:
        data, position = self.spec.ingest.data, self.log.position
        val_loss = self._val_loss[1] if self._val_loss and self._val_loss[0] == self.step else None
        return CheckpointState(
            step=self.step,
            next_batch=position.next_batch,
            order_hash=position.order_hash,
            val_loss=None if val_loss is None else finite(val_loss),
            tokens_seen=self.step * self.config.train.global_batch_tokens,
            config=self.config.model_dump(),
            manifest_hash=data.hash,
            vocab_hash=data.vocab_hash,
            vocab_size=data.vocab_size,
            order_version=ORDER_VERSION,
            num_workers=self.ranks.world_size,
            skipped_batches=position.skipped,
            loss_scale=self.loss_scale.state() if self.loss_scale else None,
        )

    def _collect(self) -> None:
        """The checkpoint in flight is done, or waited for: say so, here and to Ray."""
        started = time.perf_counter()

        def waiting() -> None:
            # Whoever waits for longer than the storage may be away hangs.
            if time.perf_counter() - started < self.config.run.retry_for_s + WRITE_WITHIN_S:
                self.link.progress()

        saved = self.saver.collect(waiting)
        self._tell_ray(saved.path, saved.state)
        self._blocked(started)
        self.link.event(
            saved.state.step,
            "checkpoint",
            **{
                "perf/checkpoint_blocked_s": round(self._blocked_s, 4),
                "perf/checkpoint_write_s": round(saved.write_s, 3),
            },
        )
        self._blocked_s = 0.0

    def _tell_ray(self, path: Location, state: CheckpointState) -> None:
        """Register a pointer: our catalog is the truth, Ray's results name it."""
        loss = -1.0 if state.val_loss is None else float(state.val_loss)
        metrics = {"step": state.step, "val_loss": loss if math.isfinite(loss) else -1.0}
        pointer = None
        if self.ranks.rank == 0:
            directory = tempfile.mkdtemp(prefix="raytrain-gpt-")
            Path(directory, "pointer.json").write_text(json.dumps({"checkpoint": str(path)}))
            pointer = ray.train.Checkpoint.from_directory(directory)
        # A report waits for the controller's next poll; training need not.
        ray.train.report(
            metrics,
            checkpoint=pointer,
            checkpoint_dir_name=f"step={state.step:08d}",
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
            delete_local_checkpoint_after_upload=True,
        )

    def should_stop(self) -> bool:
        """Whether any rank was asked to leave; asked once a step, the same answer on all ranks.

        What else all ranks must do in the same step is agreed on here as well: to finish a checkpoint
        that all of them have written, and to ask Ray whether a node will be taken away.
        """
        now = time.monotonic()
        ask = self.ranks.rank == 0 and now - self._preemption_asked_at >= PREEMPTION_CHECK_S
        stop, writing, ask = self.ranks.any(self.link.stop.is_set(), self.saver.writing, ask)
        if self.saver.in_flight and not writing:
            self._collect()
        if ask:
            self._preemption_asked_at = now
            notice = ray.train.get_preemption_info()
            if notice is not None and self._leaves_for is None:
                self._leaves_for = "preempted"
                self.link.event(self.step, "preemption_notice", ranks=notice.preempted_ranks)
        if stop and self._leaves_for is None:
            self._leaves_for = "stopped"
        return self._leaves_for is not None

    def await_scheduler(self) -> bool:
        """In a trial, wait with the last evaluation for the sweep's decision; else True at once."""
        if not self.spec.is_trial:
            return True
        if self.saver.in_flight:
            self._collect()
        started = time.perf_counter()
        if self.ranks.rank == 0:
            self.link.call("evaluated", self._evaluated)
        goes_on = self.link.await_scheduler()
        if not goes_on:
            self._leaves_for = "stopped"
        self.log.leave_out(time.perf_counter() - started)
        return goes_on

    def finish(self) -> None:
        """Wait for the checkpoint in flight and until the recorder has taken all that was sent."""
        if self.saver.in_flight:
            self._collect()
        if self.ranks.rank == 0:
            done = self.step == self.config.train.max_steps
            self.link.call("left", None if done else self._leaves_for, self.log.bad_stretch)
        self.link.close()
