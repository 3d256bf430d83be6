"""Sampling: frequencies match probabilities; sequences get the tokens that they get alone, without cache."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from raytrain_gpt.config.call_options import SamplingOptions
from raytrain_gpt.core import generate
from raytrain_gpt.core.attention import attention
from raytrain_gpt.core.generate import draw_tokens, sample_tokens
from raytrain_gpt.core.gpt2 import GPT2
from raytrain_gpt.core.model import GPT, GPTShape
from raytrain_gpt.core.registry import new_model
from tests.core.conftest import QWEN3, TINY, WAYS

END = 99
LONG = [*range(40)]
"""Prompt longer than the tiny model's context."""
LOGITS = torch.full((100,), -math.inf)
LOGITS[[3, 20, 41, 60]] = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))


def random_model(shape: GPTShape, document_end: int | None = None) -> GPT:
    """Return a model that is more confident in its next token than an untrained one."""
    model = new_model(shape, document_end=document_end)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return model


MODEL = random_model(TINY)


def sampling(max_new_tokens: int = 20, **changes: Any) -> SamplingOptions:
    return SamplingOptions(max_new_tokens=max_new_tokens, **changes)


def reference(
    model: GPT, prompt: Sequence[int], options: SamplingOptions, index: int = 0
) -> list[int]:
    """Return a continuation, computed without a cache, batching or torch's sampling."""
    generator = random.Random(f"{options.seed}/{index}")
    tokens = list(prompt)
    for _ in range(options.max_new_tokens):
        window = torch.tensor([tokens[-model.shape.seq_len :]])
        with torch.no_grad():
            logits = model.eval().logits(window)[0, -1, : model.shape.vocab_size].double().numpy()
        uniform = generator.random()
        if options.temperature == 0:
            tokens.append(int(logits.argmax()))
            continue
        in_order = options.top_k is None and options.top_p == 1
        ids = np.arange(len(logits)) if in_order else np.argsort(-logits)[: options.top_k]
        weights = np.exp((logits[ids] - logits.max()) / options.temperature)
        weights /= weights.sum()
        weights[np.cumsum(weights) - weights >= options.top_p] = 0
        reached = np.cumsum(weights)
        tokens.append(int(ids[np.searchsorted(reached, uniform * reached[-1], side="right")]))
    return tokens[len(prompt) :]


def references(
    model: GPT, prompt: Sequence[int], num: int, options: SamplingOptions
) -> list[list[int]]:
    return [reference(model, prompt, options, index) for index in range(num)]


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[torch.Size, torch.Size]]:
    """Return a counter of the (query shape, key shape) pairs seen by attention while decoding."""
    found: Counter[tuple[torch.Size, torch.Size]] = Counter()

    def spy(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        found[q.shape, k.shape] += 1
        return attention(q, k, v, **options)

    monkeypatch.setattr(generate, "attention", spy)
    return found


@pytest.mark.slow
def test_as_on_a_gpu_few_shapes_occur_and_the_tokens_stay_the_same(
    shapes: Counter[tuple[torch.Size, torch.Size]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(replace(QWEN3, seq_len=160))
    options = sampling(80, top_k=20)
    prompt = [*range(60)]
    wanted = sample_tokens(model, None, prompt, 3, options)
    assert len(shapes) == 80  # the prompt, then a new number of keys per token
    shapes.clear()
    monkeypatch.setitem(generate._KEY_MULTIPLES, "cpu", 64)
    assert sample_tokens(model, None, prompt, 3, options) == wanted
    assert [keys[2] for _, keys in shapes] == [60, 64, 128, 160]
    assert set(shapes.values()) == {2, 2 * 4, 2 * 64, 2 * 11}  # in two layers
    assert wanted == references(model, prompt, 3, options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "way", "multiple"),
    [
        (TINY, "greedy", 1),
        (TINY, "top_p", 8),
        (GPTShape(1, 1, 8, 1, 70), "all", 1),
        (QWEN3, "top_k", 8),
    ],
    ids=str,
)
def test_tokens_are_those_without_a_cache_also_past_the_context(
    shape: GPTShape, way: str, multiple: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(generate._KEY_MULTIPLES, "cpu", multiple)
    model, options = random_model(shape), sampling(6, **WAYS[way])
    for prompt in ([7], LONG, [5] * 12, [5] * 16):
        wanted = references(model, prompt, 2, options)
        assert sample_tokens(model, None, prompt, 2, options) == wanted


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "way"), [(TINY, "greedy"), (QWEN3, "all")], ids=str)
def test_a_document_begins_anew_where_attention_stays_within_documents(
    way: str, shape: GPTShape
) -> None:
    plain, options = random_model(shape), sampling(10, **WAYS[way])
    end = reference(plain, [7], options)[4]
    model = random_model(shape, end)
    differs = False
    for prompt in ([7], [end], [1, end, 2], [*LONG, end, 5]):
        found = sample_tokens(model, None, prompt, 2, options)
        assert found == references(model, prompt, 2, options)
        assert prompt != [7] or end in found[0][:5]
        differs |= found != references(plain, prompt, 2, options)
    assert differs


@pytest.mark.slow
@settings(max_examples=5)
@given(
    length=st.integers(1, 20),
    num=st.integers(0, 12),
    way=st.sampled_from(list(WAYS)),
    document_end=st.sampled_from([None, END, 3]),
    at_a_time=st.sampled_from([1, 3, 64]),
    pass_tokens=st.sampled_from([10, 4096]),
)
def test_no_sequence_depends_on_the_others_or_on_what_fits_at_a_time(
    length: int, num: int, way: str, document_end: int | None, at_a_time: int, pass_tokens: int
) -> None:
    """The model ends some texts early, so that rows move."""
    model, options = random_model(TINY, document_end), sampling(12, **WAYS[way])
    endless = references(model, range(length), num, options)
    end = endless[0][6] if endless else END
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "_MAX_SEQUENCES", at_a_time)
        patch.setattr(generate, "_PASS_TOKENS", pass_tokens)
        found = sample_tokens(model, end, range(length), num, options)
    assert found == [[*itertools.takewhile(lambda t: t != end, tokens)] for tokens in endless]


@pytest.mark.parametrize("way", WAYS)
def test_padded_ids_are_never_drawn_even_as_the_likeliest(model: GPT, way: str) -> None:
    with torch.no_grad():
        model.ln_f.weight.zero_()
        model.ln_f.bias.fill_(1.0)
        model.wte.weight[100:] = 50.0
        assert model.logits(torch.tensor([[1, 2, 3]]))[0, -1].argmax() >= 100
    (tokens,) = sample_tokens(model, None, [1, 2, 3], 1, sampling(**WAYS[way]))
    assert max(tokens) < 100


def test_seed_and_index_alone_decide_what_is_drawn_and_nothing_of_the_process_changes() -> None:
    def drawn(seed: int) -> list[list[int]]:
        return sample_tokens(MODEL, None, [1, 2, 3], 2, sampling(temperature=2.0, seed=seed))

    one = drawn(7)
    torch.manual_seed(5)
    random.seed(5)
    before = torch.get_rng_state(), random.getstate()
    assert drawn(7) == one
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    others = [*one, *drawn(8), *drawn(-7), *drawn(2**63 - 1)]
    assert all(a != b for a, b in itertools.combinations(others, 2))


def test_dropout_is_off_while_sampling() -> None:
    model, options = GPT2(replace(TINY, dropout=0.5)), sampling(temperature=0)
    model.load_state_dict(MODEL.state_dict())
    found = sample_tokens(model.train(), None, [1, 2, 3], 1, options)
    assert found == [reference(MODEL, [1, 2, 3], options)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_k": 3}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"top_k": 1000}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_p": 0.69}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.71}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"top_p": 1e-9}, [1, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.4}, [1, 0, 0, 0]),
        ({"top_k": 2, "temperature": 0.5}, [16 / 25, 9 / 25, 0, 0]),
        ({"temperature": 0.0}, [1, 0, 0, 0]),
        ({"temperature": 1e-40}, [1, 0, 0, 0]),
        ({"temperature": 1e30, "top_k": 4, "top_p": 0.5}, [0.5, 0.5, 0, 0]),
    ],
    ids=str,
)
def test_tokens_are_drawn_as_often_as_they_are_likely(
    changes: dict[str, float], expected: list[float]
) -> None:
    rows = 10_000
    uniforms = [(row + 0.5) / rows for row in range(rows)]
    tokens = draw_tokens(LOGITS.expand(rows, -1), sampling(**{"top_k": None, **changes}), uniforms)
    shares = [tokens.count(token) / rows for token in (3, 20, 41, 60)]
    assert shares == pytest.approx(expected, abs=2e-4)
