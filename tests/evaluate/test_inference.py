"""Sampling a checkpoint in this process: streamed output and returned texts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raytrain_gpt.core import generate
from raytrain_gpt.evaluate.inference import RULE, sample_checkpoint, sampling_options
from tests.serve.checkpoints import SEQ_LEN, small_config, write_checkpoint


def test_the_first_sample_is_shown_while_it_is_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "run", 10, 3.0)
    events: list[str] = []
    step = generate.DecodingBatch.step

    def counted(batch: generate.DecodingBatch) -> list[generate.SampledToken]:
        events.append("step")
        return step(batch)

    monkeypatch.setattr(generate.DecodingBatch, "step", counted)
    texts = sample_checkpoint(
        tmp_path / "run", "a\nb", print, num_samples=3, max_new_tokens=40, show=events.append
    )
    shown = [event for event in events if event != "step"]
    assert "\n".join(shown).split(f"\n{RULE}") == [
        texts[0],
        *(f"\n{text}" for text in texts[1:]),
        "",
    ]
    assert events[1] == "a", "the first line is shown after the first token"


def test_a_sample_is_as_long_as_those_of_the_run() -> None:
    config = small_config(SEQ_LEN).updated({"max_new_tokens": 77})
    assert sampling_options(config, {"seed": 1}).max_new_tokens == 77
    assert sampling_options(config, {"max_new_tokens": 5}).max_new_tokens == 5


def test_threads_do_not_wait_for_each_other_over_a_small_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "run", 10, 3.0)
    threads, seen = torch.get_num_threads(), []
    step = generate.DecodingBatch.step

    def watched(batch: generate.DecodingBatch) -> list[generate.SampledToken]:
        seen.append(torch.get_num_threads())
        return step(batch)

    monkeypatch.setattr(generate.DecodingBatch, "step", watched)
    torch.set_num_threads(2)
    try:
        sample_checkpoint(tmp_path / "run", "a", print, num_samples=1, max_new_tokens=2)
        assert ({*seen}, torch.get_num_threads()) == ({1}, 2)
    finally:
        torch.set_num_threads(threads)
