"""A run's steps again, in this process, from the checkpoint before them.

The order is a pure function and a step repeats bit for bit, so a run need not record what may be asked later.
The weights after each step are those of the run if the software and the number of threads are, and
if it had one worker, two, or exact sums. Other sums of several workers round differently.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import tee
from pathlib import Path
from typing import Any

import numpy as np
import ray.train.torch
import torch
from torch import Tensor, nn

from raytrain_gpt.checkpoint.catalog import CODE_FILE, Catalog, resume_step
from raytrain_gpt.checkpoint.code_check import check_executable
from raytrain_gpt.checkpoint.collectives import Collectives
from raytrain_gpt.config import kinds
from raytrain_gpt.config.code import Code
from raytrain_gpt.config.resolved import RunPlan
from raytrain_gpt.config.schema import changed_fields, field_section
from raytrain_gpt.core.accumulation import FloatAccumulator
from raytrain_gpt.core.device import seed_everything
from raytrain_gpt.core.loop import MicroBatch, StepResult, train_steps
from raytrain_gpt.core.loss import IGNORE_INDEX
from raytrain_gpt.core.optim import learning_rate
from raytrain_gpt.data.locations import recorded
from raytrain_gpt.data.order import Ids
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.format import Log, shell
from raytrain_gpt.ingest.feed import TrainFeed, to_device
from raytrain_gpt.ingest.ray_dataset import IngestSpec, chunks_in_process, rank_chunks
from raytrain_gpt.tracking.run_files import Row, finite
from raytrain_gpt.train.model_setup import set_up_training
from raytrain_gpt.train.provenance import RunProvenance

COMPARED = ("step", "train/loss", "optim/lr", "optim/grad_norm")
_REPLAYED = ("model", "data", "optim", "train")
_NOT_REPLAYED = ("data_path", "parallel", "gradient_dtype")
_CHOSEN_AT_START = ("precision", "micro_batch_sequences", "activation_checkpointing")


class Replay:
    """A run from the checkpoint before step `first` on; made and used in local mode.

    Args:
        codes: User code; the one with the run's hash is used, or the first if the run has no checkpoint.
        new_code: At most one, to use instead.
        settings: Changed configuration fields.
        masked: Ids of sequences that no loss counts.
        log: Gets the first row that is not as recorded, unless a change was declared.

    Attributes:
        step: Steps done.
        as_recorded: Whether all rows so far were.
    """

    def __init__(
        self,
        source: RunProvenance,
        first: int,
        codes: Sequence[Code],
        *,
        new_code: Sequence[Code] = (),
        settings: Mapping[str, Any] | None = None,
        masked: Sequence[int] = (),
        log: Log,
    ) -> None:
        source.batch_of(first)  # checks that it exists
        catalog = Catalog(source.dir)
        start = catalog.pick("before", log, first)
        if start is None and source.begins_at:
            raise ConfigError(
                f"run {source.dir} keeps no checkpoint before step {first}; give a later one"
            )
        self.step, self._masked, self._code = resume_step(start), masked, next(iter(codes), None)
        self._source, self._log = source, log
        self._recorded = {} if new_code or settings or masked else source.steps
        self.as_recorded = True
        # The attempt that trained the step; each may have had other workers.
        begun = next((a.row for a in source.attempts if first in a.kept), {})
        self._threads = int(begun.get("threads", torch.get_num_threads()))
        self._num_workers = int(begun.get("num_workers", 1))
        on_gpu = torch.cuda.is_available() and "cpu" not in str(begun.get("device", "cpu")).lower()
        fields = {name: begun[name] for name in _CHOSEN_AT_START if name in begun}
        fields |= {"num_workers": 0, "cpus_per_worker": self._threads, "use_gpu": on_gpu}
        if (saved := start or source.newest) is not None:
            sha256 = saved.state.code_sha256
            self._code = next((code for code in codes if code.sha256 == sha256), None)
            if codes and sha256 and not self._code:
                code = shell(saved.path / CODE_FILE)
                raise ConfigError(
                    f"no given code is that of the run; if you trust it, give {code} too"
                )
            with self._context():
                check_executable(saved, log)
        self._code = next(iter(new_code), self._code)
        with self._context():
            config = recorded(start.state.config, str(start.path)) if start else source.config
            for name in settings or {}:
                if field_section(name) not in _REPLAYED or name in _NOT_REPLAYED:
                    raise ConfigError(f"a replay does not use {name}, so it cannot change it")
            config = config.updated(fields).updated(settings or {})
            train, sequences = config.train, config.batch_sequences // self._num_workers
            micro, mode = train.micro_batch_sequences, train.activation_checkpointing
            if micro == "auto" or mode == "auto" or sequences % micro:
                raise ConfigError(
                    f"micro_batch_sequences={micro}, activation_checkpointing={mode}: a replay has no auto, "
                    f"and its micro-batches divide a worker's {sequences} sequences; set such values"
                )
            self._plan = RunPlan.of(config, 1, micro, mode)
            first_batch = start.state.next_batch if start else 0
            ingest = IngestSpec.of(self._plan, source.data)
            self._ingest = replace(ingest, first_batch=first_batch, skipped=source.skipped)
            seed_everything(train.seed, 0)
            device = ray.train.torch.get_device() if on_gpu else torch.device("cpu")
            alone = Collectives(0, 1)
            self._setup = set_up_training(self._plan.config, source.data, start, device, alone)
        self.model = self._setup.raw_model

    @contextmanager
    def _context(self) -> Iterator[None]:
        """Use this replay's code and threads, and then those before."""
        code, threads = kinds.used_code(), torch.get_num_threads()
        kinds.set_user_code(self._code)
        torch.set_num_threads(self._threads)
        try:
            yield
        finally:
            kinds.set_user_code(code)
            torch.set_num_threads(threads)

    def rows(self, last: int) -> Iterator[Row]:
        """Train up to step `last`; yield `step`, `train/loss`, `optim/lr` and `optim/grad_norm` of each."""
        setup, config, per_step = self._setup, self._plan.config, self._plan.micro_batches_per_step
        chunks = rank_chunks(chunks_in_process(self._ingest, last - self.step, 0), self._ingest, 0)
        next(chunks)  # the validation sequences
        chunks, same = tee(chunks)
        ids = (part for chunk in same for batch in chunk.ids for part in np.split(batch, per_step))
        feed = TrainFeed(chunks, config.train.micro_batch_sequences, setup.device)
        accumulation = setup.strategy.accumulation(setup.model, per_step)
        if self._num_workers > 1 and isinstance(accumulation, FloatAccumulator):
            accumulation = _InTurn(self.model, per_step, self._num_workers)
        results = train_steps(
            setup.model,
            setup.optimizer,
            map(self._without_masked, feed.micro_batches(), ids),
            accumulation,
            first_step=self.step,
            max_steps=last,
            learning_rate=lambda step: learning_rate(step, config.optim, config.train.max_steps),
            grad_clip=config.optim.grad_clip,
            autocast=setup.autocast,
            seed=config.train.seed,
            loss_scale=setup.loss_scale,
        )
        while True:
            with self._context():
                if (result := next(results, None)) is None:
                    return
            self.step, row = result.step, _row(result)
            if changes := changed_fields(compared(self._recorded.get(self.step, row)), row):
                self._log(
                    f"step {self.step} does not come out as recorded: {list_changes(changes)}"
                )
                self._recorded, self.as_recorded = {}, False
            yield row

    def sequence_gradients(self, ids: Sequence[int]) -> Iterator[tuple[float, list[Tensor]]]:
        """Yield loss and gradient of each sequence, with the present weights and without dropout."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        tokens, _ = self._source.data.read("train", self._source.seq_len, np.array(ids, np.int64))
        self.model.eval()
        for sequence in tokens:
            with self._context(), self._setup.autocast():
                loss = self.model(*to_device(sequence[None], self._setup.device))
                gradient = [*torch.autograd.grad(loss, trained)]
            yield float(loss.detach()), gradient

    def _without_masked(self, micro_batch: MicroBatch, ids: Ids) -> MicroBatch:
        inputs, targets = micro_batch
        hit = torch.from_numpy(np.isin(ids, self._masked)).to(targets.device)
        if hit.all():
            raise ConfigError(f"all {len(ids)} sequences of a micro-batch are masked; mask fewer")
        return inputs, torch.where(hit[:, None], IGNORE_INDEX, targets)


class _InTurn(FloatAccumulator):
    """Float sums of several ranks, one after another, added like DDP's: exactly those of two."""

    def __init__(self, model: nn.Module, micro_batches_per_step: int, num_ranks: int) -> None:
        super().__init__(model, micro_batches_per_step)
        self._per_rank = micro_batches_per_step // num_ranks
        self._ranks = [FloatAccumulator(model, self._per_rank, rank) for rank in range(num_ranks)]
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._sums = list[Tensor]()
        self._done = 0

    def random_stream(self, micro_batch: int) -> int | None:
        return None if micro_batch % self._per_rank else micro_batch // self._per_rank

    def backward(self, loss: Tensor, factor: Tensor | None) -> None:
        self._ranks[self._done // self._per_rank].backward(loss, factor)
        self._done += 1
        if self._done % self._per_rank == 0:
            gradients = [p.grad / len(self._ranks) for p in self._parameters if p.grad is not None]
            self._sums = [*torch._foreach_add(self._sums, gradients)] if self._sums else gradients
            for parameter in self._parameters:
                parameter.grad = None

    def finish(self) -> Tensor:
        for parameter, total in zip(self._parameters, self._sums, strict=True):
            parameter.grad = total
        self._sums, self._done = [], 0
        return torch.stack([rank.finish() for rank in self._ranks]).double().mean()


def read_code(files: Sequence[str | Path]) -> list[Code]:
    """Read files as one code, or none; raises ConfigError if one is missing or not UTF-8."""
    return [Code.read(*map(Path, files))] if files else []


def _row(result: StepResult) -> Row:
    values = (finite(float(result.loss)), result.lr, finite(float(result.grad_norm.float())))
    return dict(zip(COMPARED, (result.step, *values), strict=True))


def compared(row: Row) -> Row:
    """Return the values of a step's row that follow from its math."""
    return {name: row.get(name) for name in COMPARED}


def list_changes(changes: Mapping[str, str]) -> str:
    """Format changes for the console."""
    return ", ".join(f"{name} {change}" for name, change in changes.items()) or "the same"


def sha256(tensor: Tensor) -> str:
    """Return the SHA-256 (hex) of a tensor's bytes."""
    content = tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy()
    return hashlib.sha256(content.tobytes()).hexdigest()
