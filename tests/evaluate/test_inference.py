"""A checkpoint is sampled in this process: what is shown while it is, and what comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_gpt.core import generate
from raytrain_gpt.evaluate.inference import RULE, sample_checkpoint
from tests.serve.checkpoints import write_checkpoint


def test_the_first_sample_is_shown_while_it_is_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "run", 10, 3.0)
    events: list[str] = []
    step = generate.DecodingBatch.step

    def counted(batch: generate.DecodingBatch) -> list[generate.Drawn]:
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
    assert events[1] == "a", "the first line is there after the first token"
