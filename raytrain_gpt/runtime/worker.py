"""What every worker of a run does: `train_worker` is Ray Train's `train_loop_per_worker`."""

from __future__ import annotations

import json
import math
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import tiktoken
import torch
import torch.distributed as dist
from torch import Tensor

from raytrain_gpt.config import Config
from raytrain_gpt.core.device import autocast_of, resolve_precision, seed_everything
from raytrain_gpt.core.evaluate import eval_result, evaluation_sums
from raytrain_gpt.core.flops import flops_per_token, peak_flops
from raytrain_gpt.core.loop import StepResult, settle_gradient_buckets, train_steps
from raytrain_gpt.core.model import GPT, GPTShape
from raytrain_gpt.core.optim import build_optimizer
from raytrain_gpt.core.sample import sample_tokens
from raytrain_gpt.core.schedule import learning_rate
from raytrain_gpt.core.state import load_model, load_optimizer, save_state
from raytrain_gpt.data.order import ORDER_VERSION, extend_order_hash
from raytrain_gpt.data.tokenizer import TOKENIZER_FILE, read_tokenizer, token_bytes, tokenizer_json
from raytrain_gpt.runtime.checkpoints import ROWS_FILE, Catalogue, CheckpointState
from raytrain_gpt.runtime.feed import EvalFeed, TrainFeed, rank_chunks
from raytrain_gpt.runtime.ingest import IngestSpec
from raytrain_gpt.runtime.run_files import Row

SEND_EVERY_S = 1.0


@dataclass(frozen=True)
class WorkerSpec:
    """What the driver tells every worker.

    Attributes:
        config: Resolved; `micro_batch_sequences` fits the world size.
        run_dir: The run's directory.
        ingest: What is read.
        resume_dir: Checkpoint to go on from, or None.
        resume_state: Its state.
        recorder: Handle of the recorder actor.
    """

    config: Config
    run_dir: Path
    ingest: IngestSpec
    resume_dir: Path | None
    resume_state: CheckpointState | None
    recorder: Any


def train_worker(spec: WorkerSpec) -> None:
    """Train one rank from the resumed step to the last one, or until a stop is asked for."""
    worker = Worker(spec)
    train, evaluation = spec.config.train, spec.config.eval
    for result in worker.steps():
        worker.record(result)
        step, last = result.step, result.step == train.max_steps
        stop = worker.stop_agreed()
        if last or step % train.log_every_steps == 0:
            worker.flush()
        if last or step % evaluation.eval_every_steps == 0:
            worker.evaluate()
        if last or stop or step % train.checkpoint_every_steps == 0:
            worker.save_checkpoint()
        if stop:
            break
    worker.finish()


class Worker:
    """One rank: model, optimizer, feeds, and what is not yet reported."""

    def __init__(self, spec: WorkerSpec) -> None:
        context = ray.train.get_context()
        self.rank, self.world_size = context.get_world_rank(), context.get_world_size()
        self.spec, self.config = spec, spec.config
        self.step = spec.resume_state.step if spec.resume_state else 0
        self.next_batch = spec.resume_state.next_batch if spec.resume_state else 0
        self.order_hash = (
            spec.resume_state.order_hash if spec.resume_state else spec.ingest.manifest.hash
        )
        self.order = spec.ingest.order()
        # Small sums go over the hosts, so that asking for them never waits for the devices.
        self._hosts = dist.new_group(backend="gloo") if self.world_size > 1 else None

        cpus = self.config.cluster.cpus_per_worker
        assert isinstance(cpus, int), "the driver resolves cpus_per_worker"
        torch.set_num_threads(cpus)
        seed_everything(self.config.train.seed, self.rank)
        self.device = ray.train.torch.get_device()
        precision = resolve_precision(self.config.train.precision, self.device)
        self.autocast = autocast_of(precision, self.device)
        self._build_model()
        device_name = (
            torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        )
        self.flops_per_token = flops_per_token(self.raw_model.shape)
        self.peak_flops = peak_flops(device_name, precision)

        self._open_feeds()
        self._pending: list[StepResult] = []
        self._rows: list[Row] = []
        self._rows_since_checkpoint: list[Row] = []
        self._val_loss: tuple[int, float] | None = None
        self._clock_from = time.perf_counter()
        self._sent_at = 0.0
        self._stop = threading.Event()
        if self.rank == 0:
            threading.Thread(target=self._wait_for_stop, daemon=True).start()
        self._device_name, self._precision = device_name, precision
        self._call(
            "log",
            self.rank,
            f"{device_name} on {socket.gethostname()}, {torch.get_num_threads()} threads, {precision}, "
            f"{self.share} of {self.config.batch_sequences} sequences a step",
        )

    def _hardware(self) -> dict[str, Any]:
        return {
            "num_workers": self.world_size,
            "device": self._device_name,
            "threads": torch.get_num_threads(),
            "precision": self._precision,
        }

    def _build_model(self) -> None:
        config = self.config
        self.tokenizer: tiktoken.Encoding = read_tokenizer(self.spec.ingest.directory)
        shape = GPTShape.of(config, self.tokenizer.max_token_value + 1)
        self.raw_model = GPT(shape, config.train.activation_checkpointing)
        if self.spec.resume_dir:
            load_model(self.spec.resume_dir, self.raw_model)
        elif config.model.init_from:
            load_model(Path(config.model.init_from), self.raw_model)
        else:
            self.raw_model.init_weights(config.train.seed)
        if config.train.compile:
            self.raw_model.compile()
        self.model = ray.train.torch.prepare_model(
            self.raw_model, parallel_strategy_kwargs={"gradient_as_bucket_view": True}
        )
        self.optimizer = build_optimizer(self.raw_model, config.optim)
        if self.spec.resume_dir:
            load_optimizer(self.spec.resume_dir, self.raw_model, self.optimizer)
        lengths = token_bytes(self.tokenizer, shape.padded_vocab_size)
        self.token_bytes = torch.from_numpy(lengths).to(self.device)

    def _open_feeds(self) -> None:
        micro = self.config.train.micro_batch_sequences
        self.share = self.config.batch_sequences // self.world_size
        tables = ray.train.get_dataset_shard("train").iter_batches(
            batch_size=1, batch_format="pyarrow", prefetch_batches=1
        )
        chunks = rank_chunks(tables, self.spec.ingest, self.rank, self.next_batch)
        val = next(chunks)
        self.eval_feed = EvalFeed(val.tokens[0], val.ids[0], micro, self.device)
        self.feed = TrainFeed(chunks, micro, self.device)

    def steps(self) -> Iterator[StepResult]:
        """The results of all steps to come."""
        config = self.config
        if self.world_size > 1:
            dummy = torch.zeros(
                config.train.micro_batch_sequences, config.data.seq_len, dtype=torch.int64
            ).to(self.device)
            settle_gradient_buckets(self.model, (dummy, dummy), self.autocast)
        if self._agreed(self._stop.is_set()):
            return
        self._call("training_started")
        if self.rank == 0:
            event = "resume" if self.spec.resume_dir else "start"
            self._call("add_event", self.step, event, **self._hardware())
        self._clock_from = time.perf_counter()
        yield from train_steps(
            self.model,
            self.optimizer,
            self.feed.micro_batches(),
            first_step=self.step,
            max_steps=config.train.max_steps,
            micro_batches_per_step=self.share // config.train.micro_batch_sequences,
            learning_rate=lambda step: learning_rate(step, config.optim, config.train.max_steps),
            grad_clip=config.optim.grad_clip,
            autocast=self.autocast,
            seed=config.train.seed,
            rank=self.rank,
        )

    def record(self, result: StepResult) -> None:
        """Keep a result; nothing is read from the device yet."""
        self.step = result.step
        self._pending.append(result)

    def flush(self) -> None:
        """Reduce what is pending over the ranks (the one place that waits for the device)."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        sums = [self.feed.take_hash_sums() for _ in pending]
        losses = self._summed(torch.stack([r.loss.float() for r in pending])) / self.world_size
        delivered = self._summed(torch.tensor([own for own, _ in sums]))
        waits = self._summed(torch.tensor([r.data_wait_s for r in pending])) / self.world_size
        norms = torch.stack([r.grad_norm.float() for r in pending]).tolist()
        now = time.perf_counter()
        step_time_s = (now - self._clock_from) / len(pending)
        self._clock_from = now
        for i, result in enumerate(pending):
            if int(delivered[i]) != sums[i][1]:
                raise RuntimeError(
                    f"step {result.step}: the ranks did not receive the sequences of the plan"
                )
            self.order_hash = extend_order_hash(self.order_hash, sums[i][1])
            values = (float(losses[i]), norms[i], step_time_s, float(waits[i]))
            self._add_row(self._step_row(result, *values))
            self.next_batch += 1
        self._send(force=False)

    def _step_row(
        self, result: StepResult, loss: float, norm: float, step_time_s: float, wait_s: float
    ) -> Row:
        tokens = self.config.train.global_batch_tokens
        tokens_per_s = tokens / step_time_s
        mfu = None
        if self.peak_flops is not None:
            mfu = tokens_per_s * self.flops_per_token / (self.peak_flops * self.world_size)
        return {
            "step": result.step,
            "train/loss": _finite(loss),
            "optim/lr": result.lr,
            "optim/grad_norm": _finite(norm),
            "perf/tokens_per_s": tokens_per_s,
            "perf/step_time_s": step_time_s,
            "perf/data_wait_s": wait_s,
            "perf/mfu": mfu,
            "data/epoch": self.order.epoch(self.next_batch),
            "data/tokens_seen": result.step * tokens,
            "data/order_hash": self.order_hash,
        }

    def evaluate(self) -> None:
        """Validation loss over all ranks, and samples; not counted as training time."""
        self.flush()
        started = time.perf_counter()
        batches = self.eval_feed.micro_batches()
        own = evaluation_sums(self.raw_model, batches, self.token_bytes, self.autocast)
        result = eval_result(self._summed(own))
        self._val_loss = (self.step, result.loss)
        metrics = {name: _finite(value) for name, value in result.metrics().items()}
        self._add_row({"step": self.step, **metrics, "perf/eval_s": time.perf_counter() - started})
        self._send(force=True)
        if self.rank == 0 and self.config.eval.num_samples:
            self._call("add_samples", self.step, self._samples())
        self._clock_from += time.perf_counter() - started

    def _samples(self) -> str:
        e = self.config.eval
        eot = self.tokenizer.eot_token
        prompt = torch.tensor(self.tokenizer.encode_ordinary(e.sample_prompt) or [eot])
        with self.autocast():
            drawn = sample_tokens(
                self.raw_model,
                prompt.to(self.device),
                num_samples=e.num_samples,
                max_new_tokens=e.max_new_tokens,
                top_k=e.top_k,
                temperature=e.temperature,
                seed=self.config.train.seed,
            )
        texts = [e.sample_prompt + self.tokenizer.decode(ids) for ids in drawn.tolist()]
        return "\n".join(f"{i}: {text!r}" for i, text in enumerate(texts))

    def save_checkpoint(self) -> None:
        """Write a checkpoint and tell Ray; a barrier of all ranks."""
        self.flush()
        started = time.perf_counter()
        val_loss = self._val_loss[1] if self._val_loss and self._val_loss[0] == self.step else None
        path = ""
        if self.rank == 0:
            catalogue = Catalogue(self.spec.run_dir)
            path = str(catalogue.write(self._state(val_loss), self._fill))
            catalogue.prune(self.config.train.keep_checkpoints)
            self._rows_since_checkpoint = []
            self._send(force=True)
            seconds = round(time.perf_counter() - started, 3)
            self._call("add_event", self.step, "checkpoint", seconds=seconds)
        self._tell_ray(path, val_loss)
        self._clock_from += time.perf_counter() - started

    def _state(self, val_loss: float | None) -> CheckpointState:
        manifest = self.spec.ingest.manifest
        return CheckpointState(
            step=self.step,
            next_batch=self.next_batch,
            order_hash=self.order_hash,
            val_loss=None if val_loss is None else _finite(val_loss),
            tokens_seen=self.step * self.config.train.global_batch_tokens,
            config=self.config.model_dump(),
            manifest_hash=manifest.hash,
            vocab_hash=manifest.vocab_hash,
            vocab_size=manifest.vocab_size,
            order_version=ORDER_VERSION,
            num_workers=self.world_size,
        )

    def _fill(self, directory: Path) -> None:
        save_state(directory, self.raw_model, self.optimizer)
        (directory / TOKENIZER_FILE).write_text(tokenizer_json(self.tokenizer), "utf-8")
        lines = "".join(json.dumps(row) + "\n" for row in self._rows_since_checkpoint)
        (directory / ROWS_FILE).write_text(lines, "utf-8")

    def _tell_ray(self, path: str, val_loss: float | None) -> None:
        """Register a pointer: our catalogue is the truth, Ray's results name it."""
        metrics = {"step": self.step, "val_loss": -1.0 if val_loss is None else float(val_loss)}
        if not math.isfinite(metrics["val_loss"]):
            metrics[
                "val_loss"
            ] = -1.0  # a value that is not finite would end the run in Ray's index
        if self.rank != 0:
            ray.train.report(metrics)
            return
        with tempfile.TemporaryDirectory() as pointer_dir:
            Path(pointer_dir, "pointer.json").write_text(json.dumps({"checkpoint": path}))
            pointer = ray.train.Checkpoint.from_directory(pointer_dir)
            name = f"step={self.step:08d}"
            ray.train.report(metrics, checkpoint=pointer, checkpoint_dir_name=name)

    def stop_agreed(self) -> bool:
        """Whether any rank was asked to stop; the same answer on all ranks."""
        return self._agreed(self._stop.is_set())

    def _wait_for_stop(self) -> None:
        ray.get(self.spec.recorder.wait_for_stop.remote())
        self._stop.set()

    def _agreed(self, wish: bool) -> bool:
        if self._hosts is None:
            return wish
        flag = torch.tensor([int(wish)])
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._hosts)
        return bool(flag.item())

    def _summed(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, on the CPU."""
        tensor = tensor.cpu()
        if self._hosts is not None:
            dist.all_reduce(tensor, group=self._hosts)
        return tensor

    def _add_row(self, row: Row) -> None:
        if self.rank == 0:
            self._rows.append(row)
            self._rows_since_checkpoint.append(row)

    def _send(self, force: bool) -> None:
        """Hand rows to the recorder, without waiting and at most once a second."""
        due = time.monotonic() - self._sent_at >= SEND_EVERY_S or self.step == self._last_step
        if self._rows and (force or due):
            self._call("add_rows", self._rows)
            self._rows, self._sent_at = [], time.monotonic()

    @property
    def _last_step(self) -> int:
        return self.config.train.max_steps

    def _call(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Call the recorder and forget."""
        remote: Callable[..., Any] = getattr(self.spec.recorder, method).remote
        self._last_call = remote(*args, **kwargs)

    def finish(self) -> None:
        """Wait until the recorder has taken all that this rank sent."""
        ray.get(self._last_call)


def _finite(value: float) -> float | None:
    """The value, or None where it is not finite: JSON has no NaN."""
    return value if math.isfinite(value) else None
