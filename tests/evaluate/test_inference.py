"""Sampling a checkpoint in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from raytrain_gpt.core import generate
from raytrain_gpt.core.attention import attention
from raytrain_gpt.evaluate import inference
from raytrain_gpt.evaluate.inference import sample_checkpoint
from tests.checkpoints import write_checkpoint


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
