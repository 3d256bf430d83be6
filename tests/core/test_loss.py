"""Chunked loss: same value and gradients as with all logits at once, for any chunk size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from raytrain_gpt.core import loss
from raytrain_gpt.core.loss import IGNORE_INDEX, head_loss

VOCAB, CHANNELS = 192, 24
SetChunk = Callable[[int], None]


@pytest.fixture
def chunk_of(monkeypatch: pytest.MonkeyPatch) -> SetChunk:
    """Return a function that sets the number of tokens per chunk."""

    def set_to(tokens: int) -> None:
        monkeypatch.setitem(loss.CHUNK_BYTES, "cpu", tokens * 4 * VOCAB)

    return set_to


def drawn(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return random hidden states (3, 17, D), a head weight (V, D) and targets (3, 17).

    The losses are far from those of uniform guessing.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 17, CHANNELS, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, CHANNELS, generator=generator).requires_grad_()
    targets = torch.randint(0, VOCAB, (3, 17), generator=generator)
    targets[0, 5:9], targets[2, :] = IGNORE_INDEX, IGNORE_INDEX
    return hidden, weight, targets


def results(
    at_once: bool, autocast: torch.dtype | None = None, hidden_dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Return the loss and its gradients, from the plain formula or from `head_loss`."""
    hidden, weight, targets = drawn(hidden_dtype)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        if at_once:
            value = F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), targets.flatten())
        else:
            value = head_loss(hidden, weight, targets)
    (value * 3).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [value.detach(), hidden.grad, weight.grad]


@pytest.mark.parametrize("tokens", [1, 17, 51])
def test_chunks_give_the_loss_and_gradients_of_all_at_once(chunk_of: SetChunk, tokens: int) -> None:
    chunk_of(tokens)
    for found, expected in zip(results(False), results(True), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_under_autocast_they_differ_by_its_rounding(
    chunk_of: SetChunk, autocast: torch.dtype, hidden_dtype: torch.dtype
) -> None:
    chunk_of(7)
    found = results(False, autocast, hidden_dtype)
    expected = results(True, autocast, hidden_dtype)
    exact = results(True, None, torch.float32)
    assert [t.dtype for t in found] == [torch.float32, hidden_dtype, torch.float32]
    for ours, theirs, true in zip(found, expected, exact, strict=True):
        error = (ours.float() - true).norm()
        assert error <= 1.5 * (theirs.float() - true).norm() + 1e-4 * true.norm()


@pytest.mark.parametrize("gradients", [False, True])
def test_losses_of_tokens_and_their_mean_need_no_gradient(
    chunk_of: SetChunk, gradients: bool
) -> None:
    hidden, weight, targets = drawn()
    with torch.set_grad_enabled(gradients):
        every = head_loss(hidden, weight, targets, "none")
        mean = head_loss(hidden, weight, targets)
        chunk_of(4)
        torch.testing.assert_close(head_loss(hidden, weight, targets, "none"), every)
        torch.testing.assert_close(head_loss(hidden, weight, targets), mean)
    assert every.shape == targets.shape
    assert (every[targets == IGNORE_INDEX] == 0).all()


def test_logits_of_a_chunk_alone_are_made(chunk_of: SetChunk) -> None:
    chunk_of(4)
    hidden, weight, targets = drawn()
    with torch.profiler.profile(record_shapes=True, acc_events=True) as profile:
        head_loss(hidden, weight, targets).backward()
    shapes = [shape for event in profile.events() for shape in event.input_shapes]
    rows = [shape[0] for shape in shapes if len(shape) == 2 and shape[1] == VOCAB]
    assert rows
    assert max(rows) <= max(4, CHANNELS)


@pytest.mark.slow
def test_a_compiled_loss_is_one_graph_of_all_logits(chunk_of: SetChunk) -> None:
    chunk_of(4)
    torch.compiler.reset()
    compiled = torch.compile(head_loss, backend="aot_eager", fullgraph=True)
    hidden, weight, targets = drawn()
    found = compiled(hidden, weight, targets)
    found.backward()
    value, *expected = results(True)
    torch.testing.assert_close(found.detach(), value)
    for tensor, gradient in zip((hidden, weight), expected, strict=True):
        torch.testing.assert_close(3 * tensor.grad, gradient)


def test_a_small_vocabulary_is_computed_at_once() -> None:
    """Byte vocabularies need no chunks up to 100,000 tokens; GPT-2's needs them from a few hundred."""
    assert loss.chunk_tokens(320, "cpu") > 100_000
    assert 500 < loss.chunk_tokens(50_304, "cpu") < loss.chunk_tokens(50_304, "cuda") < 4096
