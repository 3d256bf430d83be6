"""Shards and messages of single ranks out of 512, in a fake process group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from raytrain_gpt.config.sections import OptimSection
from raytrain_gpt.core.model import GPT
from raytrain_gpt.core.optim import update
from raytrain_gpt.core.parallel import full_tensor, gathered_weights, shard, unsharded_twin
from raytrain_gpt.core.registry import build_optimizer, new_model
from tests.core.conftest import QWEN3, TINY

pytestmark = pytest.mark.long

WORLD_SIZE = 512
SHAPES = {
    "gpt2": replace(TINY, vocab_size=1000),
    "qwen3": replace(QWEN3, vocab_size=1000, num_layers=3),
}
"""Shapes with 1,024 embedding rows, two per rank; most ranks have no row of any other parameter."""
RANKS = (0, 1, 31, WORLD_SIZE - 1)
CPU = torch.device("cpu")


@contextmanager
def as_rank(rank: int, world_size: int = WORLD_SIZE) -> Iterator[None]:
    """Make this process one rank of a fake group, whose collectives move no data."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Collectives(TorchDispatchMode):
    """Recorder of the names of called collectives, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Exchanges:
    """Stub of `all_to_all_single`, which the fake group rejects if a rank has nothing to send."""

    def __init__(self) -> None:
        self.got: list[list[int]] = []
        self.sent: list[list[int]] = []

    def __call__(
        self, got: Tensor, sent: Tensor, got_sizes: list[int], sent_sizes: list[int], group: Any
    ) -> None:
        assert (got.numel(), sent.numel()) == (sum(got_sizes), sum(sent_sizes))
        assert len(got_sizes) == len(sent_sizes) == WORLD_SIZE
        self.got.append(got_sizes)
        self.sent.append(sent_sizes)
        got.zero_()


def model_of(architecture: str) -> GPT:
    model = new_model(SHAPES[architecture])
    model.init_weights(0)
    return model


def train(model: GPT, optimizer: str) -> Tensor:
    """Train for two updates, and return the gradient norm of the second one."""
    ours = build_optimizer(model, OptimSection(optimizer=optimizer), group=dist.group.WORLD)
    tokens = torch.arange(32).view(2, 16)
    for _ in range(2):
        model(tokens, tokens).backward()
        norm = update(ours, list(model.parameters()), lr=1e-3, grad_clip=1.0)
    return norm


def rows_of(rank: int, rows: int) -> int:
    most = -(-rows // WORLD_SIZE)
    return max(0, min(most, rows - rank * most))


@pytest.mark.parametrize(("architecture", "optimizer"), [("gpt2", "adamw"), ("qwen3", "muon")])
def test_512_ranks_shard_update_and_gather(
    architecture: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    collectives, exchanges = {}, {}
    for rank in RANKS:
        exchanges[rank] = Exchanges()
        monkeypatch.setattr(dist, "all_to_all_single", exchanges[rank])
        model = model_of(architecture)
        shapes = {name: p.shape for name, p in model.named_parameters()}
        with as_rank(rank), Collectives() as called:
            shard(model, CPU)
            norm = train(model, optimizer)
            assert norm.isfinite()
            for name, parameter in model.named_parameters():
                rows, *others = shapes[name]
                assert parameter.to_local().shape == (rows_of(rank, rows), *others)
                assert full_tensor(parameter.detach()).shape == shapes[name]
            whole = unsharded_twin(model)
            with gathered_weights(model, whole):
                assert {name: p.shape for name, p in whole.named_parameters()} == shapes
        collectives[rank] = called.names
    # A rank without rows or matrices must join the same collectives; otherwise the other ranks hang.
    assert collectives[0]
    assert all(collectives[rank] == collectives[0] for rank in RANKS)
    assert len({len(found.sent) for found in exchanges.values()}) == 1
    for ours, theirs in ((a, b) for a in RANKS for b in RANKS):
        sent = [sizes[theirs] for sizes in exchanges[ours].sent]
        assert sent == [sizes[ours] for sizes in exchanges[theirs].got]
