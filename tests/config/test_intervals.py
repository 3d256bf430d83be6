"""Warnings of evaluations and checkpoints that take too much of the time between them."""

from __future__ import annotations

import pytest

from raytrain_gpt.config.intervals import interval_warnings
from raytrain_gpt.config.load import load_preset
from raytrain_gpt.config.schema import Config

CONFIG = Config().updated(
    {"eval_every_steps": 10, "global_batch_tokens": 1024, "checkpoint_every_steps": 50}
)


@pytest.mark.parametrize(("val_tokens", "share"), [(6_144, ""), (6_200, "20%"), (30_720, "100%")])
def test_an_evaluation_may_take_a_fifth_of_the_steps_before_it(val_tokens: int, share: str) -> None:
    found = interval_warnings(CONFIG, val_tokens, 10**12, None)
    assert len(found) == bool(share)
    assert all(f"about {share} of" in line and "set eval_every_steps to" in line for line in found)


def test_the_advised_intervals_give_no_warning() -> None:
    found = interval_warnings(CONFIG, 30_720, 10**9, 0.01)
    assert ["eval_every_steps to 50," in found[0], "set it to 500" in found[1]] == [True] * 2
    longer = CONFIG.updated({"eval_every_steps": 50, "checkpoint_every_steps": 500})
    assert interval_warnings(longer, 30_720, 10**9, 0.01) == []


@pytest.mark.parametrize("preset", ["gpt2-124m", "modern-124m", "gpt2-1.5b"])
def test_presets_do_not_warn_on_eight_gpus(preset: str) -> None:
    config = load_preset(preset)
    written, step_time_s = (6.3e9, 1.7) if "1.5b" in preset else (0.5e9, 0.14)
    assert interval_warnings(config, 10**8, int(written), step_time_s) == []
