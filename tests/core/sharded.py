"""Jobs that `test_parallel.py` runs on the ranks of a sharded model, one process per rank."""

from __future__ import annotations

import contextlib
import faulthandler
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from raytrain_gpt.config.built_in import Qwen3Settings
from raytrain_gpt.config.sections import OptimSection
from raytrain_gpt.core.accumulation import FloatAccumulator
from raytrain_gpt.core.device import make_autocast, matmul_dtype
from raytrain_gpt.core.loop import Autocast, MicroBatch, warm_up_ddp_buckets
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.optim import loss_scale_for
from raytrain_gpt.core.parallel import full_tensor, gathered_weights, shard, unsharded_twin
from raytrain_gpt.core.registry import build_optimizer, new_model
from raytrain_gpt.core.state import HostSnapshot, load_model, load_optimizer
from tests.core.conftest import QWEN3, SHAPES
from tests.core.conftest import TINY as SHAPE
from tests.training import steps

ODD = replace(
    SHAPE, num_layers=3, architecture="qwen3", settings=Qwen3Settings(num_kv_heads=1, mlp_size=67)
)
"""Shape in which neither the matrices of one shape nor their rows divide evenly over the ranks."""
ADAMW, MUON = OptimSection(), OptimSection(optimizer="muon")
NORMUON = MUON.model_copy(
    update={"muon_head_group": 1, "normuon_beta2": 0.9, "embedding_lr_factor": 3.0}
)
STEPS = 6
BAD_STEP = 3
"""Step in which the last rank's loss is NaN."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    precision: str = "fp32"
    recompute: str = "none"
    dropout: float = 0.0
    document_end: int | None = None
    shape: GPTShape = SHAPE
    optim: OptimSection = ADAMW


CASES = {
    "fp32": Case(),
    "bf16": Case(precision="bf16"),
    "fp16": Case(precision="fp16"),
    "bf16, selective": Case(precision="bf16", recompute="selective", dropout=0.1),
    "bf16, documents": Case(precision="bf16", recompute="full", document_end=50),
    "qwen3, bf16, selective": Case("bf16", "selective", document_end=50, shape=QWEN3),
    "muon": Case(optim=MUON),
    "muon, odd": Case(shape=ODD, optim=MUON),
    "normuon, odd": Case(shape=ODD, optim=NORMUON),
    "normuon, wide heads": Case(shape=SHAPES["llama"], optim=NORMUON),
    "qwen2, bf16": Case("bf16", shape=SHAPES["qwen2"]),
}
MUON_CASES = [name for name, case in CASES.items() if case.optim is not ADAMW]


class Trained:
    """One rank's model and optimizer, initially untrained.

    Args:
        case: Training settings.
        sharded: Whether to shard the model; otherwise it is wrapped in DDP.
        from_checkpoint: Checkpoint to resume from, or None to start from initial weights.
    """

    def __init__(self, case: Case, sharded: bool, from_checkpoint: Path | None = None) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.autocast = make_autocast(case.precision, CPU)
        self.loss_scale = loss_scale_for(case.precision, CPU)
        shape = replace(case.shape, dropout=case.dropout)
        self.raw_model = new_model(shape, case.recompute, case.document_end)
        self.raw_model.init_weights(0)
        if from_checkpoint is not None:
            load_model(from_checkpoint, self.raw_model)
        self.model: nn.Module = self.raw_model
        if sharded:
            shard(self.raw_model, CPU, matmul_dtype(case.precision))
        else:
            self.model = DistributedDataParallel(self.raw_model, gradient_as_bucket_view=True)
        self.optimizer = build_optimizer(
            self.raw_model, case.optim, matmul_dtype(case.precision), dist.group.WORLD
        )
        if from_checkpoint is not None:
            load_optimizer(from_checkpoint, self.raw_model, self.optimizer)
        warm_up_ddp_buckets(self.model, batch_of(0, self.rank), self.autocast)

    def train(self, first: int, stop: int, bad_step: int | None = None) -> list[dict[str, Any]]:
        """Train, and return each step's loss and gradient norm on this rank."""
        results = steps(
            self.model,
            self.optimizer,
            self._micro_batches(first),
            stop,
            first_step=first,
            accumulator=FloatAccumulator(self.model, 2, self.rank),
            autocast=self._spoiling(bad_step, first),
            loss_scale=self.loss_scale,
        )
        return [{"loss": float(r.loss), "grad_norm": float(r.grad_norm)} for r in results]

    def _micro_batches(self, first: int) -> Iterator[MicroBatch]:
        micro_batch = 2 * first
        while True:
            yield batch_of(micro_batch, self.rank)
            micro_batch += 1

    def _spoiling(self, bad_step: int | None, first: int) -> Autocast:
        """Return the case's autocast, and make the last rank's loss NaN once in the bad step."""
        passes = 0

        def spoil(_model: nn.Module, _inputs: Any, loss: Tensor) -> Tensor | None:
            spoilt = bad_step is not None and passes == 2 * (bad_step - first) - 1
            return loss * torch.nan if spoilt and self.rank == self.world_size - 1 else None

        def counted() -> contextlib.AbstractContextManager[object]:
            nonlocal passes
            passes += 1
            return self.autocast()

        self.model.register_forward_hook(spoil)
        return counted

    def save(self, directory: Path) -> None:
        copy = HostSnapshot(self.raw_model, self.optimizer, self.rank, self.world_size)
        copy.refresh()
        for file in copy.files():
            copy.write(file, directory / file)

    def weights(self) -> dict[str, Tensor]:
        """Return the unsharded weights, on every rank."""
        named = self.raw_model.named_parameters()
        return {name: full_tensor(parameter.detach()).clone() for name, parameter in named}

    def steps_done(self) -> set[float]:
        """Return the distinct step counts that the optimizer stores for its parameters."""
        states = self.optimizer.state.values()
        return {float(state["step"]) for state in states if "step" in state}

    def kept_numbers(self) -> tuple[int, int]:
        """Return how many elements this rank stores, as (weights, moments)."""

        def mine(tensor: Tensor) -> int:
            return (
                int(getattr(tensor, "to_local", lambda: tensor)().untyped_storage().nbytes()) // 4
            )

        moments = [
            kept
            for state in self.optimizer.state.values()
            for key, kept in state.items()
            if key != "step" and isinstance(kept, Tensor)
        ]
        return sum(map(mine, self.raw_model.parameters())), sum(map(mine, moments))

    def evaluated(self) -> list[float]:
        """Return the losses of this rank's batches and, on rank 0 only, also a greedy token.

        Rank 0 has three batches, every other rank has `rank - 1`.
        """
        model = unsharded_twin(self.raw_model)
        with gathered_weights(self.raw_model, model), torch.no_grad(), self.autocast():
            model.eval()
            batches = [batch_of(n, 0) for n in range(3 if self.rank == 0 else self.rank - 1)]
            losses = [float(model(*batch)) for batch in batches]
            if self.rank == 0:
                losses.append(float(model.logits(batches[0][0])[0, -1].argmax()))
        return losses


def batch_of(micro_batch: int, rank: int) -> MicroBatch:
    """Return four sequences unique to this micro-batch and rank."""
    i = torch.arange(4 * 17) + 68 * (7 * micro_batch + rank)
    tokens = ((7 * i + i // 50) % 97).view(4, 17)
    return tokens[:, :-1], tokens[:, 1:]


def in_ranks(rank: int, world_size: int, directory: Path, job: Callable[[Path], Any]) -> None:
    """Run a job as one rank in this process, and save its result in `rank-N.pt`."""
    faulthandler.enable()  # a crash prints its lines
    torch.set_num_threads(1)
    rendezvous = f"file://{directory / 'rendezvous'}"
    dist.init_process_group("gloo", rendezvous, rank=rank, world_size=world_size)
    torch.save(job(directory), directory / f"rank-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def train_all_cases(directory: Path) -> dict[str, Any]:
    """Train every case in DDP and sharded, then resume a sharded run from its checkpoint at step 3."""
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        for kind in ("ddp", "fsdp"):
            run = Trained(case, sharded=kind == "fsdp")
            steps = run.train(0, STEPS, BAD_STEP)
            found[f"{kind} {name}"] = {
                "steps": steps,
                "weights": run.weights(),
                "steps_done": run.steps_done(),
                "kept": run.kept_numbers(),
                "evaluated": run.evaluated(),
                "weights after": run.weights(),
            }
    for kind in ("ddp", "fsdp"):
        (directory / kind).mkdir(exist_ok=True)
        run = Trained(CASES["fp32"], sharded=kind == "fsdp")
        run.train(0, 3)
        run.save(directory / kind)
    found["at 3"] = run.weights()
    found["went on"] = (run.train(3, STEPS), run.weights())
    dist.barrier()
    again = Trained(CASES["fp32"], sharded=True, from_checkpoint=directory / "fsdp")
    found["read"] = (again.weights(), again.kept_numbers())
    found["again"] = (again.train(3, STEPS), again.weights())
    return found


def train_muon(directory: Path) -> dict[str, Any]:
    """Train the Muon cases in DDP and sharded, and save their checkpoints."""
    found = {}
    for name in MUON_CASES:
        for kind in ("ddp", "fsdp"):
            run = Trained(CASES[name], sharded=kind == "fsdp")
            steps = run.train(0, STEPS, BAD_STEP)
            found[f"{kind} {name}"] = {"steps": steps, "weights": run.weights()}
            (directory / f"{kind} {name}").mkdir(exist_ok=True)
            run.save(directory / f"{kind} {name}")
    return found


def rewrite_muon(directory: Path) -> None:
    """Load every sharded checkpoint in `from` into DDP and sharded models, and save it again."""
    for name in MUON_CASES:
        for kind in ("ddp", "fsdp"):
            source = directory / "from" / f"fsdp {name}"
            run = Trained(CASES[name], kind == "fsdp", from_checkpoint=source)
            (directory / f"{kind} {name}").mkdir(exist_ok=True)
            run.save(directory / f"{kind} {name}")


def go_on_from(directory: Path) -> dict[str, Any]:
    """Load the checkpoint in `from`, save it again unchanged, then train from it."""
    run = Trained(CASES["fp32"], sharded=True, from_checkpoint=directory / "from")
    (directory / "written").mkdir(exist_ok=True)
    run.save(directory / "written")
    return {"steps": run.train(3, STEPS), "weights": run.weights(), "kept": run.kept_numbers()}
