"""Sampling a checkpoint in this process: streamed output and returned texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from raytrain_gpt.core import generate
from raytrain_gpt.core.attention import attention
from raytrain_gpt.evaluate import inference
from raytrain_gpt.evaluate.inference import RULE, sample_checkpoint
from tests.checkpoints import write_checkpoint


def test_the_first_sample_is_shown_while_it_is_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "run", 10, 3.0)
    events: list[str] = []
    draw = generate.draw_tokens

    def counted(*args: Any) -> list[int]:
        events.append("step")
        return draw(*args)

    monkeypatch.setattr(generate, "draw_tokens", counted)
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


@pytest.mark.parametrize(("given", "expected"), [({}, 7), ({"max_new_tokens": 5}, 5)])
def test_a_sample_is_as_long_as_those_of_the_run(
    given: dict[str, int], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn(*args: Any, **_: Any) -> list[list[int]]:
        assert args[4].max_new_tokens == expected
        return [[1]]

    monkeypatch.setattr(inference, "sample_tokens", drawn)
    write_checkpoint(tmp_path / "run", 10, 3.0, max_new_tokens=7)
    sample_checkpoint(tmp_path / "run", "a", print, num_samples=1, **given)


def test_as_on_a_gpu_samples_are_drawn_in_bf16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def autocast(_: torch.device) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16)

    def spy(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        types.append(q.dtype)
        return attention(q, k, v, **options)

    types: list[torch.dtype] = []
    monkeypatch.setattr(generate, "attention", spy)
    write_checkpoint(tmp_path / "run", 10, 3.0)
    sample_checkpoint(tmp_path / "run", "a", print, num_samples=1, max_new_tokens=8)
    assert set(types) == {torch.float32}
    types.clear()
    monkeypatch.setattr(inference, "inference_autocast", autocast)
    sample_checkpoint(tmp_path / "run", "a", print, num_samples=1, max_new_tokens=8)
    assert set(types) == {torch.bfloat16}
