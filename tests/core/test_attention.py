"""Attention within documents: a packed document gets the same results as when it is unpacked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from raytrain_gpt.config.schema import Config
from raytrain_gpt.core import attention
from raytrain_gpt.core.attention import (
    AttentionFn,
    block_sparse_attention,
    causal_attention,
    document_starts,
)
from raytrain_gpt.core.loop import MicroBatch
from raytrain_gpt.core.loss import IGNORE_INDEX
from raytrain_gpt.core.model import GPT
from raytrain_gpt.core.registry import configured_model, new_model
from tests.core import conftest

END = 99
SHAPES = {name: replace(shape, seq_len=48) for name, shape in conftest.SHAPES.items()}
BOTH = pytest.mark.parametrize("architecture", SHAPES)
LAYOUTS = {
    "three": (7, 20, 21),
    "of one token": (1, 1, 30, 1, 15),
    "one": (48,),
    "at the edges": (1, 46, 1),
}
"""Document lengths in tokens, per sequence.

END closes every document but the last, which is cut off at the end of the sequence. The first may start
before the sequence, which is indistinguishable from a document that starts with it.
"""
GENERATOR = torch.Generator()


def documents_of(lengths: tuple[int, ...]) -> list[Tensor]:
    """Return random documents of the given lengths, each int64 (tokens,)."""
    GENERATOR.manual_seed(sum(place * length for place, length in enumerate(lengths, start=1)))
    documents = [torch.randint(0, END, (length,), generator=GENERATOR) for length in lengths]
    for document in documents[:-1]:
        document[-1] = END
    return documents


PACKED = {name: documents_of(lengths) for name, lengths in LAYOUTS.items()}
IDS = torch.stack([torch.cat(documents) for documents in PACKED.values()])  # (4, 48)


def random_model(
    architecture: str = "gpt2",
    document_end: int | None = END,
    recompute: str = "none",
    **sizes: float,
) -> GPT:
    """Return a model whose attention is far from uniform, with the same weights every time."""
    model = new_model(replace(SHAPES[architecture], **sizes), recompute, document_end)
    model.init_weights(0)
    GENERATOR.manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.2, generator=GENERATOR)
    return model


@pytest.fixture(params=[256, 10])
def queries_at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute attention for all queries at once, in several blocks, or one query at a time."""
    monkeypatch.setattr(attention, "_QUERIES_AT_ONCE", request.param)


def gradients(model: GPT, losses: Iterator[Tensor]) -> list[Tensor]:
    for loss in losses:
        loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_a_document_starts_behind_the_end_of_the_one_before() -> None:
    ids = torch.tensor([[5, END, 5, 5, END, END, 5, 5], [END, 5, 5, 5, 5, 5, 5, END]])
    assert document_starts(ids, END).tolist() == [
        [0, 0, 2, 2, 2, 5, 6, 6],
        [0, 1, 1, 1, 1, 1, 1, 1],
    ]
    assert document_starts(ids[:, :1], END).tolist() == [[0], [0]]


@BOTH
@pytest.mark.usefixtures("queries_at_once")
def test_logits_of_a_packed_document_are_those_of_the_document_alone(architecture: str) -> None:
    model = random_model(architecture).eval()
    plain = random_model(architecture, document_end=None).eval()
    with torch.no_grad():
        packed = model.logits(IDS)
        for row, documents in zip(packed, PACKED.values(), strict=True):
            parts = row.split([len(document) for document in documents])
            for part, document in zip(parts, documents, strict=True):
                alone = plain.logits(document[None])[0]
                assert alone.abs().max() > 1
                assert (part - alone).abs().max() <= 1e-5


@BOTH
@pytest.mark.usefixtures("queries_at_once")
def test_gradients_are_the_sum_of_those_of_the_documents_alone(architecture: str) -> None:
    targets = IDS.roll(-1, 1)
    model = random_model(architecture)
    plain = random_model(architecture, document_end=None)
    packed = gradients(model, iter([model(IDS, targets, reduction="none").sum()]))

    def losses_alone() -> Iterator[Tensor]:
        for row, documents in zip(targets, PACKED.values(), strict=True):
            lengths = [len(document) for document in documents]
            for document, own in zip(documents, row.split(lengths), strict=True):
                yield plain(document[None], own[None], reduction="none").sum()

    alone = gradients(plain, losses_alone())
    assert len(packed) == len(alone) == len(list(model.parameters()))
    for ours, theirs in zip(packed, alone, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * max(1, theirs.abs().max().item())


@pytest.mark.parametrize(
    ("architecture", "recompute", "dropout", "bf16", "document_end"),
    [
        ("gpt2", "selective", 0.2, True, END),
        ("gpt2", "full", 0.0, False, None),
        ("qwen3", "selective", 0.0, False, None),
        ("qwen2", "selective", 0.0, True, None),
        ("llama", "selective", 0.0, False, END),
        ("qwen3", "full", 0.2, True, END),
    ],
)
@pytest.mark.parametrize("queries_at_once", [10], indirect=True)
@pytest.mark.usefixtures("queries_at_once")
def test_activation_checkpointing_gives_the_same_gradients(
    architecture: str, recompute: str, dropout: float, bf16: bool, document_end: int | None
) -> None:
    def found(model: GPT) -> list[Tensor]:
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model.train()(IDS, IDS.roll(-1, 1))
        return gradients(model, iter([loss]))

    kept = found(random_model(architecture, document_end, dropout=dropout))
    again = found(random_model(architecture, document_end, recompute, dropout=dropout))
    assert len(kept) == len(again) == len(list(random_model(architecture).parameters()))
    for one, other in zip(kept, again, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "recompute"), [("gpt2", "selective"), ("qwen3", "none")])
def test_one_graph_is_compiled_for_all_layouts(
    architecture: str, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model compiles without a graph break, and new document layouts reuse the graph.

    One layer is enough because all layers are alike.
    """
    monkeypatch.setattr(attention, "_QUERIES_AT_ONCE", 30)
    torch.compiler.reset()
    model, expected = (
        random_model(architecture, recompute=recompute, num_layers=1) for _ in range(2)
    )
    model.compile(backend="aot_eager", fullgraph=True)

    def batches() -> Iterator[MicroBatch]:
        yield IDS, IDS.roll(-1, 1)
        yield IDS.flip(0, 1), IDS.roll(3, 1)
        yield torch.zeros_like(IDS), torch.where(IDS == END, IGNORE_INDEX, IDS)

    for number, batch in enumerate(batches()):
        never_again: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if number:
            never_again = torch._dynamo.config.patch(error_on_recompile=True)
        with never_again:
            found = gradients(model, iter([model(*batch)]))
        for ours, theirs in zip(found, gradients(expected, iter([expected(*batch)])), strict=True):
            torch.testing.assert_close(ours, theirs)


def causal(attend: AttentionFn, tokens: int, kv_heads: int, dtype: torch.dtype) -> list[Tensor]:
    """Return attention of two sequences with four heads, and the gradients of q, k and v."""
    GENERATOR.manual_seed(tokens)
    qkv = [
        (2 * torch.randn(2, tokens, heads, 20, generator=GENERATOR))
        .to(torch.bfloat16)
        .to(dtype)
        .transpose(1, 2)
        .requires_grad_()
        for heads in (4, kv_heads, kv_heads)
    ]
    out = attend(*qkv)
    (out * torch.arange(20)).sum().backward()
    return [out.detach(), *(tensor.grad for tensor in qkv if tensor.grad is not None)]


def by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize(("tokens", "kv_heads"), [(1, 4), (128, 1), (300, 2)])
def test_causal_attention_on_a_cpu_is_that_of_torch(
    tokens: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16, it uses matrix products, which round the scores; a fused kernel does not."""
    exact = causal(by_torch, tokens, kv_heads, torch.float64)
    assert len(exact) == 4
    fused = causal(partial(causal_attention, dropout=0.0), tokens, kv_heads, torch.float64)
    ours = causal(partial(causal_attention, dropout=0.0), tokens, kv_heads, torch.bfloat16)
    for found, true in zip(fused, exact, strict=True):
        torch.testing.assert_close(found, true)
    for found, true in zip(ours, exact, strict=True):
        assert found.dtype == torch.bfloat16
        assert (found - true).norm() <= 0.02 * true.norm()
    monkeypatch.setattr(attention, "_products_are_faster", lambda _: True)
    ours = causal(partial(causal_attention, dropout=0.0), tokens, kv_heads, torch.float64)
    for found, true in zip(ours, exact, strict=True):
        torch.testing.assert_close(found, true)


BLOCK_STARTS = torch.tensor([[0] * 300, [0] * 40 + [40] * 200 + [240] * 60])
"""Document starts (2, 300) that span several blocks; the last block is partial."""


def test_the_blocks_that_are_left_out_are_those_in_which_nothing_may_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "_compiled", lambda function: function)
    blocks = block_sparse_attention(BLOCK_STARTS).keywords["block_mask"]
    at = torch.arange(300)
    sees = (at[None, :] <= at[:, None]) & (at[None, None, :] >= BLOCK_STARTS[:, :, None])
    size = attention.SPARSE_BLOCK_TOKENS
    padded = torch.nn.functional.pad(sees, (0, -300 % size, 0, -300 % size))
    kept = padded.unflatten(2, (-1, size)).unflatten(1, (-1, size)).any(-1).any(2)
    assert not kept.all()
    assert torch.equal(blocks.to_dense()[:, 0].bool(), kept)


def test_the_configuration_decides() -> None:
    config = Config()
    assert configured_model(config, 257, 256).document_end is None
    assert configured_model(config.updated({"document_mask": True}), 257, 256).document_end == 256
