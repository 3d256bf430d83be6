"""Warnings of evaluations that take too much of the time between them."""

from __future__ import annotations

import pytest

from raytrain_gpt.config.load import load_preset
from raytrain_gpt.config.schema import Config
from raytrain_gpt.train.preflight import evaluation_warnings

CONFIG = Config().updated({"eval_every_steps": 10, "global_batch_tokens": 1024})


@pytest.mark.parametrize(("val_tokens", "share"), [(6_144, ""), (6_200, "20%"), (30_720, "100%")])
def test_an_evaluation_may_take_a_fifth_of_the_steps_before_it(val_tokens: int, share: str) -> None:
    found = evaluation_warnings(CONFIG, val_tokens)
    assert len(found) == bool(share)
    assert all(f"about {share} of" in line and "set eval_every_steps to" in line for line in found)
    longer = CONFIG.updated({"eval_every_steps": 50})  # as advised
    assert evaluation_warnings(longer, val_tokens) == []


@pytest.mark.parametrize("preset", ["gpt2-124m", "modern-124m", "gpt2-1.5b"])
def test_presets_do_not_warn(preset: str) -> None:
    assert evaluation_warnings(load_preset(preset), 10**8) == []
