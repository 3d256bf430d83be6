"""Sampling: repeatable, never a padded id, never a change to training's randomness."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from raytrain_gpt.core.model import GPT
from raytrain_gpt.core.sample import sample_tokens


def sample(model: GPT, prompt: list[int], **changes: Any) -> Tensor:
    settings: dict[str, Any] = {
        "num_samples": 3,
        "max_new_tokens": 12,
        "top_k": 50,
        "temperature": 1.0,
        "seed": 42,
    }
    return sample_tokens(model, torch.tensor(prompt), **{**settings, **changes})


def test_samples_are_continuations_of_the_asked_size(model: GPT) -> None:
    drawn = sample(model, [1, 2, 3], num_samples=5, max_new_tokens=7)
    assert drawn.shape == (5, 7)
    assert drawn.dtype == torch.int64
    assert len({tuple(row) for row in drawn.tolist()}) == 5


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("top_k", [1, 50, 1000])
def test_padded_ids_are_never_drawn_even_as_the_likeliest(
    model: GPT, temperature: float, top_k: int
) -> None:
    with torch.no_grad():
        model.ln_f.weight.zero_()
        model.ln_f.bias.fill_(1.0)
        model.wte.weight[100:] = 50.0
        assert (model.logits(torch.tensor([[1, 2, 3]]))[0, -1].argmax() >= 100).item()
    drawn = sample(model, [1, 2, 3], temperature=temperature, top_k=top_k)
    assert (drawn < 100).all()


def test_the_seed_decides_the_sample(model: GPT) -> None:
    one = sample(model, [1, 2, 3])
    torch.manual_seed(5)
    assert torch.equal(sample(model, [1, 2, 3]), one)
    assert not torch.equal(sample(model, [1, 2, 3], seed=43), one)


def test_sampling_leaves_torchs_generator_alone(model: GPT) -> None:
    before = torch.get_rng_state()
    sample(model, [1, 2, 3])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("prompt", [[7], [1, 2, 3], [*range(40)]], ids=["one", "short", "long"])
def test_temperature_0_is_the_likeliest_token_of_the_last_context(
    model: GPT, prompt: list[int]
) -> None:
    ids = list(prompt)
    for _ in range(20):
        with torch.no_grad():
            logits = model.eval().logits(torch.tensor([ids[-16:]]))[0, -1, :100]
        ids.append(int(logits.argmax()))
    drawn = sample(model, prompt, temperature=0.0, max_new_tokens=20, num_samples=2)
    assert drawn.tolist() == [ids[len(prompt) :]] * 2


def test_top_1_is_the_likeliest_token(model: GPT) -> None:
    assert torch.equal(sample(model, [5], top_k=1), sample(model, [5], temperature=0.0))


def test_only_the_top_k_are_drawn_as_often_as_they_are_likely(model: GPT) -> None:
    with torch.no_grad():
        model.ln_f.weight.zero_()
        model.ln_f.bias.zero_()[0] = 1.0
        model.wte.weight[:, 0] = 0.0
        model.wte.weight[[3, 20, 41, 60], 0] = torch.tensor([2.0, 1.5, 1.0, 0.5])
    drawn = sample(
        model, [5, 6], num_samples=20_000, max_new_tokens=1, top_k=3, temperature=0.5
    ).flatten()
    counts = torch.bincount(drawn, minlength=100)
    assert counts[[3, 20, 41]].sum() == 20_000
    expected = torch.softmax(torch.tensor([4.0, 3.0, 2.0]), 0)
    torch.testing.assert_close(counts[[3, 20, 41]] / 20_000, expected, rtol=0, atol=0.015)
