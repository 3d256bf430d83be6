"""Sampling tokens: frequencies match probabilities, for any other rows and for unusual logits."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from raytrain_gpt.config.call_options import SamplingOptions
from raytrain_gpt.core.sampling import draw_tokens
from tests.core.conftest import WAYS

LOGITS = torch.full((100,), -math.inf)
LOGITS[[3, 20, 41, 60]] = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))


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
    options = SamplingOptions(max_new_tokens=1, **{"top_k": None, **changes})
    uniforms = [(row + 0.5) / rows for row in range(rows)]
    tokens = draw_tokens(LOGITS.expand(rows, -1), [options] * rows, uniforms)
    shares = [tokens.count(token) / rows for token in (3, 20, 41, 60)]
    assert shares == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("way", WAYS)
def test_a_number_next_to_1_does_not_lead_out_of_the_likely_tokens(way: str) -> None:
    options = SamplingOptions(max_new_tokens=1, **WAYS[way])
    for uniform in (math.nextafter(1, 0), 0.0):
        (token,) = draw_tokens(LOGITS[None], [options], [uniform])
        assert LOGITS[token] > -math.inf


def test_a_model_that_is_not_finite_draws_tokens_that_exist() -> None:
    for value, way in itertools.product((math.nan, math.inf, -math.inf), WAYS.values()):
        (token,) = draw_tokens(
            torch.full((1, 100), value), [SamplingOptions(max_new_tokens=1, **way)], [0.5]
        )
        assert 0 <= token < 100


def test_options_of_others_do_not_change_a_row() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(WAYS), 100, generator=generator)
    options = [SamplingOptions(max_new_tokens=1, **way) for way in WAYS.values()]
    uniforms = [0.9, 0.7, 0.5, 0.3, 0.1]
    alone = [
        draw_tokens(logits[i : i + 1], options[i : i + 1], uniforms[i : i + 1])[0]
        for i in range(len(WAYS))
    ]
    assert draw_tokens(logits, options, uniforms) == alone
