"""A run's steps again, in this process, from the checkpoint before them.

The order is a pure function and a step repeats bit for bit, so a run need not record everything.
The weights after each step are those of the run if the software and the number of threads are, and
if it had one worker, two, or exact sums. Other sums of several workers round differently.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raytrain_gpt.checkpoint.catalog import CODE_FILE, Catalog, resume_step
from raytrain_gpt.checkpoint.collectives import Collectives
from raytrain_gpt.columns import Row, finite
from raytrain_gpt.config.code import Code
from raytrain_gpt.config.kinds import Registry
from raytrain_gpt.config.plan import Plan, check_shares, micro_batch_for
from raytrain_gpt.config.schema import changed_fields, parse_config
from raytrain_gpt.core.accumulation import FloatAccumulator
from raytrain_gpt.core.device import seed_everything
from raytrain_gpt.core.loop import MicroBatch, train_steps
from raytrain_gpt.core.loss import IGNORE_INDEX
from raytrain_gpt.core.muon import Muon
from raytrain_gpt.core.optim import learning_rate
from raytrain_gpt.data.order import Position
from raytrain_gpt.errors import ConfigError, damage_as
from raytrain_gpt.format import Log, shell
from raytrain_gpt.ingest.feed import to_device
from raytrain_gpt.ingest.ray_dataset import IngestSpec, chunks_in_process, rank_chunks
from raytrain_gpt.runs.provenance import RunProvenance
from raytrain_gpt.train.local_mode import T, in_local_mode
from raytrain_gpt.train.model_setup import set_up_training

_COMPARED = ("step", "train/loss", "optim/lr", "optim/grad_norm")
_REPLAYED = ("model", "data", "optim", "train")
_FITTED = ("micro_batch_sequences", "activation_checkpointing")
_NOT_REPLAYED = ("data_path", "parallel", "gradient_dtype", *_FITTED)


class Replay:
    """The steps `first` to `last` of a run, from the checkpoint before; made and used in local mode.

    Args:
        codes: User code; that of the run is used, or the first if the run has no checkpoint.
        new_code: User code to use instead.
        settings: Changed configuration fields.
        masked: Ids of sequences that no loss counts.
        log: Gets the first row that is not as recorded, unless a change was declared.

    Attributes:
        step: Steps done.
        as_recorded: Whether all rows so far were.
        rows: Trains a step; yields its `step`, `train/loss`, `optim/lr` and `optim/grad_norm`.
    """

    def __init__(
        self,
        run: RunProvenance,
        first: int,
        last: int,
        codes: Sequence[Code | None],
        *,
        new_code: Code | None = None,
        settings: Mapping[str, Any] = MappingProxyType({}),
        masked: Sequence[int] = (),
        log: Log,
    ) -> None:
        _ = run.batch_of(first), run.batch_of(last)  # checks that they exist
        start = Catalog(run.dir).pick("before", log, first)
        if start is None and run.begins_at:
            raise ConfigError(f"no checkpoint before step {first} in {run.dir}; give a later one")
        self.step, self.run, self._masked, self._log = resume_step(start), run, masked, log
        self._recorded = {} if new_code or settings or masked else run.steps
        self.as_recorded = True
        begun = run.attempt_of(first)
        source, sha256, holder = run.source_of(first)
        for step in (self.step + 1, last):
            if run.source_of(step)[:2] != (source, sha256):
                raise ConfigError(
                    f"step {step} had other settings or code than {first}; replay it alone"
                )
        with damage_as(ConfigError, f"the record of step {first} in {run.dir}"):
            self._threads, self._num_workers = begun["threads"], begun["num_workers"]
            on_gpu = torch.cuda.is_available() and "cpu" not in begun["device"].lower()
            here = {"num_workers": 0, "cpus_per_worker": self._threads, "use_gpu": on_gpu}
            here |= {name: begun[name] for name in ("precision", *_FITTED)}
        code = next((code for code in codes if code and code.sha256 == sha256), None)
        if sha256 and not code:
            theirs = shell(holder / CODE_FILE)
            raise ConfigError(f"no given code is the run's; if you trust it, give --code {theirs}")
        registry = Registry(new_code or code)
        for name in settings:
            if registry.field(name)[0] not in _REPLAYED or name in _NOT_REPLAYED:
                raise ConfigError(f"a replay cannot change {name}; leave it out")
        with self._its_threads():
            source = parse_config(source.model_dump(), str(holder), registry)
            config = source.updated({**here, **settings})
            check_shares(config, self._num_workers)
            micro = int(micro_batch_for(config, self._num_workers))
            self._plan = Plan.of(config, 1, micro, begun["activation_checkpointing"])
            device, ranks = torch.device("cuda:0" if on_gpu else "cpu"), Collectives(0, 1)
            seed_everything(config.train.seed, 0)
            self._setup = set_up_training(self._plan, run.data, start, device, ranks)
        self.model = self._setup.raw_model
        position = start.state.position if start else run.data.start
        self.rows = self._rows(replace(position, skipped=run.skipped), last)

    @contextmanager
    def _its_threads(self) -> Iterator[None]:
        """Use this replay's number of threads, and then that before."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    def run_to(self, step: int) -> None:
        """Train until `step` steps are done."""
        while self.step < step and next(self.rows, None):
            pass

    def _rows(self, position: Position, last: int) -> Iterator[Row]:
        setup, config, per_step = self._setup, self._plan.config, self._plan.micro_batches_per_step
        accumulation = setup.strategy.accumulation(setup.model, per_step)
        if self._num_workers > 1 and isinstance(accumulation, FloatAccumulator):
            accumulation = SequentialRanks(self.model, per_step, self._num_workers)
            if isinstance(setup.optimizer, Muon):
                setup.optimizer.num_shares = self._num_workers
        results = train_steps(
            setup.model,
            setup.optimizer,
            self._micro_batches(position, last - self.step),
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
            with self._its_threads():
                if (result := next(results, None)) is None:
                    return
            self.step, norm = result.step, float(result.grad_norm.float())
            values = (result.step, finite(float(result.loss)), result.lr, finite(norm))
            row = dict(zip(_COMPARED, values, strict=True))
            if changes := changed_fields(compared(self._recorded.get(self.step, row)), row):
                what = "does not come out as recorded"
                self._log(f"step {self.step} {what}: {list_changes(changes)}")
                self._recorded, self.as_recorded = {}, False
            yield row

    def _micro_batches(self, position: Position, num_batches: int) -> Iterator[MicroBatch]:
        spec = IngestSpec(self._plan, self.run.data, position)
        per_step = self._plan.micro_batches_per_step
        chunks = rank_chunks(chunks_in_process(spec, num_batches, 0), spec, 0)
        next(chunks)  # the validation sequences
        for chunk in chunks:
            for batch in zip(chunk.tokens, chunk.ids, strict=True):
                for tokens, ids in zip(*(np.split(part, per_step) for part in batch), strict=True):
                    inputs, targets = to_device(tokens, self._setup.device)
                    hit = torch.from_numpy(np.isin(ids, self._masked)).to(targets.device)
                    if hit.all():
                        raise ConfigError("all of a micro-batch is masked; mask fewer sequences")
                    yield inputs, torch.where(hit[:, None], IGNORE_INDEX, targets)

    def sequence_gradients(self, ids: Sequence[int]) -> Iterator[tuple[float, list[Tensor]]]:
        """Yield loss and gradient of each sequence, with the present weights and without dropout."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        tokens, _ = self.run.data.read("train", self.run.seq_len, np.array(ids, np.int64))
        self.model.eval()
        for sequence in tokens:
            with self._its_threads(), self._setup.autocast():
                loss = self.model(*to_device(sequence[None], self._setup.device))
                gradient = [*torch.autograd.grad(loss, trained)]
            yield float(loss.detach()), gradient


class SequentialRanks(FloatAccumulator):
    """Float sums of several ranks, one after another, added like DDP's: exactly those of two."""

    def __init__(self, model: nn.Module, micro_batches_per_step: int, num_ranks: int) -> None:
        super().__init__(model, micro_batches_per_step)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._num_ranks, self._per_rank = num_ranks, micro_batches_per_step // num_ranks
        self._of_rank = FloatAccumulator(model, self._per_rank)
        self._sums: list[Tensor] = []

    def random_stream(self, micro_batch: int) -> int | None:
        return None if micro_batch % self._per_rank else micro_batch // self._per_rank

    @contextmanager
    def synchronized(self, micro_batch: int) -> Iterator[None]:
        yield
        if (micro_batch + 1) % self._per_rank == 0:
            self._losses.append(self._of_rank.finish())
            gradients = [p.grad / self._num_ranks for p in self._parameters if p.grad is not None]
            self._sums = [*torch._foreach_add(self._sums, gradients)] if self._sums else gradients
            for parameter in self._parameters:
                parameter.grad = None

    def backward(self, loss: Tensor, factor: Tensor | None) -> None:
        self._of_rank.backward(loss, factor)

    def finish(self) -> Tensor:
        losses, self._losses, sums, self._sums = self._losses, [], self._sums, []
        for parameter, total in zip(self._parameters, sums, strict=True):
            parameter.grad = total
        return torch.stack(losses).double().mean()


def undisturbed(replay: Callable[[], T]) -> T:
    """Call a function in local mode that uses replays; afterwards this process computes as before it."""
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    with torch.random.fork_rng(), ExitStack() as after:
        after.callback(random.setstate, random.getstate())
        after.callback(np.random.set_state, np.random.get_state())
        after.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        after.callback(torch.use_deterministic_algorithms, is_deterministic)
        return in_local_mode(replay)


def compared(row: Row) -> Row:
    """Return the values of a step's row that follow from its math."""
    return {name: row.get(name) for name in _COMPARED}


def list_changes(changes: Mapping[str, str]) -> str:
    """Format changes for the console."""
    return ", ".join(f"{name} {change}" for name, change in changes.items()) or "the same"


def sha256(tensor: Tensor) -> str:
    """Return the SHA-256 (hex) of a tensor's bytes."""
    flat = tensor.detach().cpu().reshape(-1).contiguous()
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()
