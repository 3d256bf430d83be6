"""Prompts continued to their ends: as many as given, in their order, however many fit at a time."""

from __future__ import annotations

import pytest

from raytrain_gpt.core import sample
from raytrain_gpt.core.generate import SamplingOptions
from raytrain_gpt.core.model import GPT, GPTShape
from raytrain_gpt.core.sample import sample_tokens

EOT = 99


@pytest.mark.parametrize("at_a_time", [1, 3, 64])
def test_each_prompt_has_its_continuation_whatever_fits_at_a_time(
    model: GPT, monkeypatch: pytest.MonkeyPatch, at_a_time: int
) -> None:
    options = SamplingOptions(6, stop_at_eot=False)
    prompts = [[1 + i] * (1 + i) for i in range(7)]
    alone = [sample_tokens(model, EOT, [p], options, i)[0] for i, p in enumerate(prompts)]
    monkeypatch.setattr(sample, "MAX_SEQUENCES", at_a_time)
    assert sample_tokens(model, EOT, prompts, options) == alone
    assert sample_tokens(model, EOT, prompts[2:], options, first_stream=2) == alone[2:]
    assert {len(one.tokens) for one in alone} == {6}
    assert {one.finish_reason for one in alone} == {"length"}


def test_the_same_prompt_has_different_continuations(model: GPT) -> None:
    drawn = sample_tokens(model, EOT, [[1, 2, 3]] * 5, SamplingOptions(7, stop_at_eot=False))
    assert len({tuple(one.tokens) for one in drawn}) == 5


def test_a_continuation_that_stops_is_without_the_end_of_the_text(model: GPT) -> None:
    prompts = [[1, 2, 3]] * 50
    ended = sample_tokens(model, EOT, prompts, SamplingOptions(40, top_k=None))
    whole = sample_tokens(model, EOT, prompts, SamplingOptions(40, top_k=None, stop_at_eot=False))
    assert {one.finish_reason for one in ended} == {"stop", "length"}
    for short, long in zip(ended, whole, strict=True):
        stops = short.finish_reason == "stop"
        assert short.tokens + [EOT] * stops == long.tokens[: len(short.tokens) + stops]
        assert EOT not in short.tokens
        assert stops or len(short.tokens) == 40


def test_no_prompts_have_no_continuations(model: GPT) -> None:
    assert sample_tokens(model, EOT, [], SamplingOptions(5)) == []


@pytest.mark.parametrize(
    ("shape", "longest", "expected"),
    [
        (GPTShape(2, 2, 32, 16, 100), 10**9, 64),
        (GPTShape(12, 12, 768, 1024, 50_257), 10**9, 28),
        (GPTShape(12, 12, 768, 1024, 50_257), 256, 64),
        (GPTShape(48, 25, 1600, 1024, 50_257), 256, 13),
        (GPTShape(1000, 1, 4096, 8192, 50_257), 8192, 1),
    ],
    ids=str,
)
def test_as_many_at_a_time_as_their_cache_has_memory(
    shape: GPTShape, longest: int, expected: int
) -> None:
    assert sample._max_sequences(shape, longest) == expected
