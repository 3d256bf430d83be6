"""torch.compile of the model in DDP, sharded and with documents; nothing is compiled twice.

Graphs are captured as for a GPU and run by torch's eager operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.nn.attention import flex_attention
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from raytrain_gpt.core.attention import SPARSE_BLOCK_TOKENS, block_sparse_attention
from raytrain_gpt.core.loop import MicroBatch, warm_up_ddp_buckets
from raytrain_gpt.core.model import GPT, GPTShape
from raytrain_gpt.core.parallel import shard
from raytrain_gpt.core.registry import new_model
from raytrain_gpt.ingest.feed import to_device
from tests.core.conftest import SHAPES

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SHAPE = GPTShape(num_layers=4, num_heads=4, embd_size=128, seq_len=160, vocab_size=300)
"""Shape with 3.4 MB of gradients, and sequences longer than one sparse-attention block."""
DOCUMENT_END = 7
never_again = partial(torch._dynamo.config.patch, error_on_recompile=True)


def bf16() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Start a process group with this process as its only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """Make this process rank 0 of a fake group of four, whose collectives leave tensors unchanged."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def made(shape: GPTShape = SHAPE, recompute: str = "none", document_end: int | None = None) -> GPT:
    model = new_model(shape, recompute, document_end)
    model.init_weights(0)
    return model.train()


def batch(number: int, shape: GPTShape = SHAPE) -> MicroBatch:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, shape.vocab_size, (2, shape.seq_len + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def replicated(model: nn.Module, bucket_mb: int = 1) -> DistributedDataParallel:
    return DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)


def gradients(model: nn.Module, number: int) -> list[Tensor]:
    model.zero_grad()
    model(*batch(number)).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def compare(model: nn.Module, expected: nn.Module, number: int) -> None:
    for pair in zip(gradients(model, number), gradients(expected, number), strict=True):
        torch.testing.assert_close(*pair)


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_ddp_cuts_the_graph_at_its_buckets_whatever_is_recomputed(
    one_rank: None, recompute: str
) -> None:
    model, expected = made(recompute=recompute), made()
    model.compile(backend="aot_eager")
    wrapped = replicated(model)
    for number in range(3):
        compare(wrapped, expected, number)


def test_a_start_compiles_one_graph_to_train_and_one_to_evaluate(one_rank: None) -> None:
    sizes: list[list[Any]] = []

    def backend(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        sizes.append([one for one in inputs if isinstance(one, torch.SymInt)])
        return graph.forward

    shape = SHAPES["qwen3"]
    model = made(shape)
    model.compile(backend=backend, fullgraph=True)
    wrapped = replicated(model)

    def tokens(number: int) -> MicroBatch:
        draws = np.random.default_rng(number)
        return to_device(draws.integers(99, size=(2, shape.seq_len + 1), dtype=np.uint16), CPU)

    def evaluate() -> None:
        with torch.no_grad():
            model.eval()(*tokens(3), reduction="none")

    warm_up_ddp_buckets(wrapped, to_device(np.zeros((2, shape.seq_len + 1), np.uint16), CPU), bf16)
    for number in range(2):
        with bf16():
            wrapped.train()(*tokens(number)).backward()
            evaluate()
    assert sizes == [[], []]  # no symbolic sizes


def test_sparse_attention_is_the_masked_one_and_is_compiled_once_for_all_documents(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This GPU attention also has a working CPU backward pass, once torch's device check is off."""
    assert SHAPE.seq_len > SPARSE_BLOCK_TOKENS
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    model, expected = (made(document_end=DOCUMENT_END) for _ in range(2))
    monkeypatch.setattr(model, "_attend_within", lambda starts, _: block_sparse_attention(starts))
    model.compile(backend="aot_eager")
    wrapped = replicated(model)
    assert all((batch(number)[0] == DOCUMENT_END).any() for number in range(3))
    compare(wrapped, expected, 0)
    with never_again():
        compare(wrapped, expected, 1)
        compare(wrapped, expected, 2)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch also suppresses it
@pytest.mark.parametrize(("architecture", "recompute"), [("gpt2", "selective"), ("qwen3", "full")])
def test_a_sharded_model_has_one_graph_for_all_blocks(
    four_ranks: None, architecture: str, recompute: str
) -> None:
    """12 blocks exceed torch's recompile limit for one function; the graph includes recomputation."""
    found: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        found.append(graph)
        compiled: Callable[..., Any] = lookup_backend("aot_eager")(graph, inputs)
        return compiled

    shape = replace(SHAPES[architecture], num_layers=12)
    model = made(shape, recompute)
    model.compile(backend=backend)
    shard(model, CPU, torch.bfloat16)

    def step(number: int) -> None:
        with bf16():
            loss = model(*batch(number, shape))
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        model.zero_grad()

    step(0)
    with never_again():
        step(1)
    attending = [graph for graph in found if "scaled_dot_product_attention" in operations(graph)]
    assert len(attending) == 1
    assert operations(attending[0]).count("linear") == (4 if architecture == "gpt2" else 7)


def operations(graph: fx.GraphModule) -> list[str]:
    """Return the names of all operators in a graph, including recomputed ones."""
    parts = [part for part in graph.modules() if isinstance(part, fx.GraphModule)]
    nodes = [node for part in parts for node in part.graph.nodes if node.op == "call_function"]
    return [
        node.target.__name__.split(".")[0] for node in nodes if not isinstance(node.target, str)
    ]
