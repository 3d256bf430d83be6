"""Decoding with a KV cache: each sequence gets the tokens of decoding it separately without a cache."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from raytrain_gpt.config.built_in import Qwen3Settings
from raytrain_gpt.config.call_options import SamplingOptions
from raytrain_gpt.core import generate, kv_cache
from raytrain_gpt.core.attention import attention, without_cudnn_sdpa
from raytrain_gpt.core.generate import DecodingBatch, SampledToken, sample_tokens
from raytrain_gpt.core.gpt2 import GPT2
from raytrain_gpt.core.model import GPT, GPTShape
from raytrain_gpt.core.registry import new_model
from raytrain_gpt.errors import ConfigError, DataError
from tests.conftest import raises_line
from tests.core.conftest import BOTH, QWEN3, TINY, WAYS

EOT = 99
LONG = [*range(40)]
"""Prompt longer than the tiny model's context."""


def random_model(shape: GPTShape, document_end: int | None = None) -> GPT:
    """Return a model that is more confident in its next token than an untrained one."""
    model = new_model(shape, document_end=document_end)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return model


MODEL = random_model(TINY)


def reference(
    model: GPT, prompt: Sequence[int], options: SamplingOptions, stream: int = 0
) -> list[int]:
    """Return a continuation, computed without a cache, batching or torch's sampling."""
    generator = random.Random(f"{options.seed}/{stream}")
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


def run(batch: DecodingBatch) -> dict[int, list[int | None]]:
    """Run the batch to its end, and return the sampled tokens by handle."""
    tokens = defaultdict(list)
    while batch.num_active:
        for drawn in batch.step():
            tokens[drawn.handle].append(drawn.token)
    return tokens


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[torch.Size, torch.Size]]:
    """Return a counter of the (query shape, key shape) pairs seen by attention while decoding."""
    found: Counter[tuple[torch.Size, torch.Size]] = Counter()

    def spy(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        found[q.shape, k.shape] += 1
        return attention(q, k, v, **options)

    monkeypatch.setattr(kv_cache, "attention", spy)
    return found


@BOTH
def test_as_on_a_gpu_few_shapes_occur_and_the_tokens_stay_the_same(
    shape: GPTShape, shapes: Counter[tuple[torch.Size, torch.Size]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(replace(shape, seq_len=160))
    options = SamplingOptions(max_new_tokens=100, top_k=20, stop_at_eot=False)
    prompts = [[7], [*range(30)], [*range(60)]]
    wanted = sample_tokens(model, EOT, prompts, options)
    assert len(shapes) == 100  # the prompts, then a new number of keys per token
    shapes.clear()
    monkeypatch.setitem(kv_cache.KEY_MULTIPLES, "cpu", 64)
    assert sample_tokens(model, EOT, prompts, options) == wanted
    assert [keys[2] for _, keys in shapes] == [60, 64, 128, 160]
    assert set(shapes.values()) == {2, 2 * 4, 2 * 64, 2 * 31}  # in two layers
    assert [one.tokens for one in wanted] == [
        reference(model, prompt, options, stream) for stream, prompt in enumerate(prompts)
    ]


def test_decoding_runs_in_kernels_for_any_shape_and_the_head_outside_autocast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def as_on_a_gpu(_: torch.device) -> contextlib.AbstractContextManager[object]:
        return without_cudnn_sdpa(torch.device("cuda"))

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        is_head = weight is MODEL.head_weight
        assert torch.is_autocast_enabled("cuda") is not is_head
        assert torch.backends.cuda.cudnn_sdp_enabled() is is_head
        heads.append(is_head)
        return of_torch(x, weight, bias)

    heads: list[bool] = []
    of_torch = torch.nn.functional.linear
    options = SamplingOptions(max_new_tokens=20, stop_at_eot=False)
    wanted = sample_tokens(MODEL, EOT, [[1, 2]], options)
    monkeypatch.setattr(generate, "without_cudnn_sdpa", as_on_a_gpu)
    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    torch.set_autocast_enabled("cuda", True)
    try:
        assert sample_tokens(MODEL, EOT, [[1, 2]], options) == wanted
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert sum(heads) == 20 < len(heads)


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "shape",
    [
        TINY,
        GPTShape(3, 4, 64, 33, 257),
        GPTShape(1, 3, 48, 8, 300),
        GPTShape(1, 1, 8, 1, 70),
        QWEN3,
    ],
    ids=str,
)
def test_tokens_are_those_without_a_cache_also_past_the_context(
    shape: GPTShape, way: str, multiple: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(kv_cache.KEY_MULTIPLES, "cpu", multiple)
    model = random_model(shape)
    options = SamplingOptions(max_new_tokens=12, **WAYS[way], stop_at_eot=False)
    prompts = [[7], [1, 2, 3], [*range(12)], [*range(33)], LONG, [5] * 15, [5] * 16, [5] * 17]
    batch = DecodingBatch(model, EOT, len(prompts))
    handles = [batch.add(prompt, options, stream) for stream, prompt in enumerate(prompts)]
    found = run(batch)
    for stream, (handle, prompt) in enumerate(zip(handles, prompts, strict=True)):
        assert found[handle] == reference(model, prompt, options, stream), prompt


@pytest.mark.parametrize("shape", [TINY, QWEN3], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_a_document_begins_anew_where_attention_stays_within_documents(
    way: str, shape: GPTShape
) -> None:
    plain = random_model(shape)
    options = SamplingOptions(max_new_tokens=20, **WAYS[way], stop_at_eot=False)
    end = reference(plain, [7], options)[4]
    model = random_model(shape, end)
    prompts = [[7], [end], [end, end], [1, end, 2, 3], [*range(12), end], [*LONG, end, 5], LONG]
    elsewise = [reference(plain, prompt, options, stream) for stream, prompt in enumerate(prompts)]
    batch = DecodingBatch(model, end, len(prompts))
    handles = [batch.add(prompt, options, stream) for stream, prompt in enumerate(prompts)]
    found = run(batch)
    for stream, (handle, prompt) in enumerate(zip(handles, prompts, strict=True)):
        assert found[handle] == reference(model, prompt, options, stream), prompt
    assert end in found[handles[0]][:5]
    assert [found[handle] for handle in handles] != elsewise


@BOTH
@pytest.mark.parametrize("document_end", [None, 7])
def test_scores_are_log_probabilities_of_the_model_and_change_no_token(
    shape: GPTShape, document_end: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "SCORED_TOKENS", 3)
    model = random_model(shape, document_end)
    prompts = [[5], [1, 7, 2, 3], [*range(8)], [7, 7], [*range(14)], [5, 6]]
    ways = [{"scored": scored, **way} for scored in ("all", "new", "none") for way in WAYS.values()]
    for way in ways:
        options = SamplingOptions(max_new_tokens=2, **way, stop_at_eot=False)
        batch = DecodingBatch(model, EOT, len(prompts))
        drawn = defaultdict(list)
        for stream, prompt in enumerate(prompts):
            batch.add(prompt, options, stream)
        while batch.num_active:
            for one in batch.step():
                drawn[one.handle].append(one)
        for stream, prompt in enumerate(prompts):
            text = [*prompt, *(one.token for one in drawn[stream])]
            assert text[len(prompt) :] == reference(model, prompt, options, stream)
            scores = [score for one in drawn[stream] for score in one.scores]
            start = {"all": 0, "new": len(prompt), "none": len(text)}[options.scored]
            assert [score.token for score in scores] == text[start:]
            with torch.no_grad():
                logits = model.logits(torch.tensor([text]))[0, :, : shape.vocab_size]
            wanted = logits.log_softmax(1)
            for place, score in enumerate(scores, start):
                if place == 0:
                    assert (score.logprob, score.top) == (None, ())
                    continue
                assert score.logprob == pytest.approx(
                    wanted[place - 1, score.token].item(), abs=1e-4
                )
                ids, values = zip(*score.top, strict=True)
                assert values == pytest.approx(wanted[place - 1].topk(5).values.tolist(), abs=1e-4)
                assert values == pytest.approx(wanted[place - 1, list(ids)].tolist(), abs=1e-4)


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 20),  # tokens of the prompt
            st.integers(1, 12),  # tokens to draw
            st.sampled_from(list(WAYS)),
            st.integers(0, 5),  # steps before the next sequence is added
            st.none() | st.integers(0, 8),  # tokens after which it is cancelled
        ),
        min_size=1,
        max_size=12,
    )
)
def test_who_comes_and_goes_changes_no_other_sequence(
    visits: list[tuple[int, int, str, int, int | None]],
) -> None:
    batch = DecodingBatch(MODEL, EOT, 4)
    found: dict[int, list[int | None]] = {}
    cancelled_after: dict[int, int | None] = {}
    wanted: dict[int, list[int]] = {}

    def step() -> None:
        for drawn in batch.step():
            found[drawn.handle].append(drawn.token)
            if len(found[drawn.handle]) == cancelled_after[drawn.handle]:
                batch.cancel(drawn.handle)

    for stream, (length, new, way, pause, cancel) in enumerate(visits):
        while not batch.num_free:
            step()
        prompt = [(stream + i) % 90 for i in range(length)]
        options = SamplingOptions(max_new_tokens=new, **WAYS[way], stop_at_eot=False)
        handle = batch.add(prompt, options, stream)
        found[handle], cancelled_after[handle] = [], cancel
        wanted[handle] = reference(MODEL, prompt, options, stream)[:cancel]
        if cancel == 0:
            batch.cancel(handle)
        for _ in range(pause):
            step()
    while batch.num_active:
        step()
    assert found == wanted
    assert batch.num_free == 4


def test_prompts_that_do_not_fit_into_one_forward_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "PREFILL_TOKENS", 10)
    options = SamplingOptions(max_new_tokens=4, temperature=0, stop_at_eot=False)
    prompts = [[1, 2, 3, 4], [5, 6], [7], [*range(14)], [8]]
    batch = DecodingBatch(MODEL, EOT, 5)
    for prompt in prompts:
        batch.add(prompt, options)
    forwards = [[drawn.handle for drawn in batch.step()] for _ in range(4)]
    assert forwards == [[0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]
    again = DecodingBatch(MODEL, EOT, 5)
    for prompt in prompts:
        again.add(prompt, options)
    assert run(again) == {i: reference(MODEL, prompt, options) for i, prompt in enumerate(prompts)}


def eot_model() -> GPT:
    """Return a model whose next token depends only on the position: 3, 4, EOT, then 5."""
    model = GPT2(TINY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.ln_f.weight.fill_(1)
        for place, token in enumerate((3, 4, EOT, 5, 5, 5)):
            model.wte.weight[token, place] = 1
            model.wpe.weight[place, place] = 9
    return model


def test_the_end_of_the_text_ends_it_and_is_not_part_of_it() -> None:
    model = eot_model()
    batch = DecodingBatch(model, EOT, 2)
    batch.add([0], SamplingOptions(max_new_tokens=5, temperature=0))
    batch.add([0], SamplingOptions(max_new_tokens=4, temperature=0, stop_at_eot=False))
    steps = [batch.step() for _ in range(4)]
    assert [drawn for step in steps for drawn in step if drawn.handle == 0] == [
        SampledToken(0, 3, None),
        SampledToken(0, 4, None),
        SampledToken(0, None, "stop"),
    ]
    assert [drawn for step in steps for drawn in step if drawn.handle == 1] == [
        SampledToken(1, 3, None),
        SampledToken(1, 4, None),
        SampledToken(1, EOT, None),
        SampledToken(1, 5, "length"),
    ]
    assert batch.num_active == 0
    assert batch.step() == []
    batch.add([0, 3, 4], SamplingOptions(max_new_tokens=5, temperature=0, scored="new"))
    (ended,) = batch.step()
    assert (ended.token, [score.token for score in ended.scores]) == (None, [EOT])


@pytest.mark.parametrize("way", WAYS)
def test_padded_ids_are_never_drawn_even_as_the_likeliest(model: GPT, way: str) -> None:
    with torch.no_grad():
        model.ln_f.weight.zero_()
        model.ln_f.bias.fill_(1.0)
        model.wte.weight[100:] = 50.0
        assert model.logits(torch.tensor([[1, 2, 3]]))[0, -1].argmax() >= 100
    batch = DecodingBatch(model, EOT, 1)
    batch.add([1, 2, 3], SamplingOptions(max_new_tokens=20, **WAYS[way], stop_at_eot=False))
    assert all(token is not None and token < 100 for token in run(batch)[0])


def test_seed_and_stream_alone_decide_what_is_drawn() -> None:
    def drawn(seed: int, stream: int) -> list[int | None]:
        batch = DecodingBatch(MODEL, EOT, 1)
        options = SamplingOptions(max_new_tokens=12, temperature=2.0, seed=seed, stop_at_eot=False)
        batch.add([1, 2, 3], options, stream)
        return run(batch)[0]

    one = drawn(7, 0)
    torch.manual_seed(5)
    random.seed(5)
    assert drawn(7, 0) == one
    others = [drawn(7, 1), drawn(8, 0), drawn(-7, 0), drawn(2**63 - 1, 0)]
    assert all(a != b for a, b in itertools.combinations([one, *others], 2))


def test_nothing_of_the_process_changes() -> None:
    torch_before, python_before = torch.get_rng_state(), random.getstate()
    batch = DecodingBatch(MODEL, EOT, 1)
    batch.add([1, 2, 3], SamplingOptions(max_new_tokens=20))
    run(batch)
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert random.getstate() == python_before


def test_a_compiled_model_is_run_eagerly(model: GPT) -> None:
    def backend(*_: object) -> None:
        pytest.fail("the model was compiled")

    options = SamplingOptions(max_new_tokens=20, temperature=0, stop_at_eot=False)
    wanted = reference(model, [1, 2], options)
    model.compile(backend=backend)
    batch = DecodingBatch(model, EOT, 1)
    batch.add([1, 2], options)
    assert run(batch)[0] == wanted


@pytest.mark.parametrize("model", [MODEL, random_model(QWEN3)], ids=["gpt2", "qwen3"])
def test_in_bf16_nearly_the_same_is_computed(model: GPT) -> None:
    options = SamplingOptions(max_new_tokens=8, temperature=0, stop_at_eot=False)
    batch = DecodingBatch(model, EOT, 1)
    batch.add([1, 2], options)
    with torch.autocast("cpu", torch.bfloat16):
        found = run(batch)[0]
    assert found[0] == reference(model, [1, 2], options)[0]
    assert len(found) == 8


def test_dropout_is_off_while_sampling() -> None:
    model = GPT2(GPTShape(2, 2, 32, 16, 100, dropout=0.5))
    model.load_state_dict(MODEL.state_dict())
    options = SamplingOptions(max_new_tokens=20, temperature=0, stop_at_eot=False)
    batch = DecodingBatch(model.train(), EOT, 1)
    batch.add([1, 2, 3], options)
    assert run(batch)[0] == reference(MODEL, [1, 2, 3], options)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_new_tokens": 0}, ["max_new_tokens=0: must be", "equal to 1 ("]),
        ({"temperature": -0.1}, ["temperature=-0.1: must be", "equal to 0 ("]),
        ({"temperature": math.nan}, ["temperature=nan: must be a finite"]),
        ({"top_k": 0}, ["top_k=0: must be", "equal to 1 ("]),
        ({"top_p": 0.0}, ["top_p=0.0: must be greater than 0 ("]),
        ({"top_p": 1.1}, ["top_p=1.1: must be", "equal to 1 ("]),
        ({"top_p": math.nan}, ["top_p=nan: must be a finite"]),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused_in_one_line(
    changes: dict[str, float], words: list[str]
) -> None:
    with raises_line(ConfigError, *words):
        SamplingOptions(**{"max_new_tokens": 1, **changes})


def test_what_cannot_be_continued_is_refused() -> None:
    batch = DecodingBatch(MODEL, EOT, 1)
    options = SamplingOptions(max_new_tokens=1)
    with raises_line(DataError, "prompt is empty", "at least 1"):
        batch.add([], options)
    for token in (-1, 100, 127, 10**9):
        with raises_line(DataError, f"token {token} ", "100 tokens"):
            batch.add([1, token, 2], options)
    batch.add([1], options)
    with pytest.raises(RuntimeError, match="full"):
        batch.add([1], options)


@pytest.mark.parametrize("at_a_time", [1, 3, 64])
def test_each_prompt_has_its_continuation_whatever_fits_at_a_time(
    model: GPT, monkeypatch: pytest.MonkeyPatch, at_a_time: int
) -> None:
    options = SamplingOptions(max_new_tokens=6, stop_at_eot=False)
    prompts = [[1 + i] * (1 + i) for i in range(7)]
    alone = [sample_tokens(model, EOT, [p], options, i)[0] for i, p in enumerate(prompts)]
    monkeypatch.setattr(generate, "MAX_SEQUENCES", at_a_time)
    assert sample_tokens(model, EOT, prompts, options) == alone
    assert sample_tokens(model, EOT, prompts[2:], options, first_stream=2) == alone[2:]
    assert {len(one.tokens) for one in alone} == {6}
    assert {one.finish_reason for one in alone} == {"length"}


def test_the_same_prompt_has_different_continuations(model: GPT) -> None:
    drawn = sample_tokens(
        model, EOT, [[1, 2, 3]] * 5, SamplingOptions(max_new_tokens=7, stop_at_eot=False)
    )
    assert len({tuple(one.tokens) for one in drawn}) == 5


def test_a_continuation_that_stops_is_without_the_end_of_the_text(model: GPT) -> None:
    prompts = [[1, 2, 3]] * 50
    ended = sample_tokens(model, EOT, prompts, SamplingOptions(max_new_tokens=40, top_k=None))
    endless = SamplingOptions(max_new_tokens=40, top_k=None, stop_at_eot=False)
    whole = sample_tokens(model, EOT, prompts, endless)
    assert {one.finish_reason for one in ended} == {"stop", "length"}
    for short, long in zip(ended, whole, strict=True):
        stops = short.finish_reason == "stop"
        assert short.tokens + [EOT] * stops == long.tokens[: len(short.tokens) + stops]
        assert EOT not in short.tokens
        assert stops or len(short.tokens) == 40


def test_no_prompts_have_no_continuations(model: GPT) -> None:
    assert sample_tokens(model, EOT, [], SamplingOptions(max_new_tokens=5)) == []


@pytest.mark.parametrize(
    ("shape", "longest", "expected"),
    [
        (GPTShape(2, 2, 32, 16, 100), 10**9, 64),
        (GPTShape(12, 12, 768, 1024, 50_257), 10**9, 28),
        (GPTShape(12, 12, 768, 1024, 50_257), 256, 64),
        (GPTShape(48, 25, 1600, 1024, 50_257), 256, 13),
        (
            GPTShape(
                48,
                25,
                1600,
                1024,
                50_257,
                architecture="qwen3",
                settings=Qwen3Settings(num_kv_heads=5),
            ),
            256,
            64,
        ),
        (GPTShape(1000, 1, 4096, 8192, 50_257), 8192, 1),
    ],
    ids=str,
)
def test_as_many_at_a_time_as_their_cache_has_memory(
    shape: GPTShape, longest: int, expected: int
) -> None:
    assert generate._max_sequences(shape, longest) == expected
