"""`sample --batch`: one output line per input line, in order, for any number of replicas."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.config.call_options import SamplingOptions
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core import kv_cache
from raytrain_gpt.core.attention import attention
from raytrain_gpt.core.gpt2 import GPT2
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.state import MODEL_FILE
from raytrain_gpt.data.tokenizer import TOKENIZER_FILE, load_tokenizer, tokenizer_json
from raytrain_gpt.errors import DataError
from raytrain_gpt.evaluate import inference
from raytrain_gpt.export import batch_generation
from raytrain_gpt.export.batch_generation import TASK_PROMPTS, Generator, sample_batch
from raytrain_gpt.storage.location import Location
from tests.conftest import RunCli, raises_line
from tests.training import STATE

OPTIONS = SamplingOptions(max_new_tokens=8, temperature=2.0, top_k=None, seed=7)
PROMPTS: list[dict[str, Any]] = [
    {"prompt": f"{'word ' * (i % 9)}{i}", "id": i, "more": {"of": [i, None]}}
    for i in range(TASK_PROMPTS + 6)
]
PROMPTS[3] = {"prompt": ""}
PROMPTS[4] = {"prompt": "é 漢 \ud800"}
"""Prompts for two tasks; those of seven and eight words exceed the context of 32 tokens."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Location:
    """Return a checkpoint of a tiny byte-level model."""
    tokenizer = load_tokenizer("bytes")
    config = Config().updated({"num_layers": 1, "num_heads": 2, "embd_size": 16, "seq_len": 32})
    model = GPT2(GPTShape.of(config, 257))
    model.init_weights(1)
    state = replace(STATE, step=10, next_batch=10, config=config.model_dump())
    draft = Catalog(Location.of(tmp_path_factory.mktemp("run"))).draft(10, "001")
    weights = draft.add(MODEL_FILE, lambda path: save_file(model.state_dict(), path))
    return draft.commit(state, {MODEL_FILE: weights}, {TOKENIZER_FILE: tokenizer_json(tokenizer)})


@pytest.mark.ray
@pytest.mark.models
def test_every_line_has_its_continuations_in_order_and_as_one_replica_draws_them(
    cluster: str, checkpoint: Location, run_cli: RunCli, tmp_path: Path
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "new" / "out.jsonl"
    prompts.write_text("\n".join(json.dumps(row) for row in PROMPTS) + "\n\n", "utf-8")
    flags = ["--max_new_tokens", 8, "--temperature", 2, "--top_k", 300, "--seed", 7]
    shown = run_cli.succeeds(
        *("sample", checkpoint, "--batch", prompts, "--out", out, "--num_samples", 3), *flags
    )
    assert "replicas: 2" in shown
    assert "8 prompts longer than 32 tokens" in shown
    found = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    added = [(row.pop("continuations"), row.pop("finish_reasons")) for row in found]
    assert found == PROMPTS
    assert {len(texts) for texts, _ in added} == {len(reasons) for _, reasons in added} == {3}
    assert {reason for _, reasons in added for reason in reasons} <= {"stop", "length"}

    alone = Generator(checkpoint, 3, OPTIONS, None)
    lines = []
    for first in range(0, len(PROMPTS), TASK_PROMPTS):
        own = [json.dumps(row) for row in PROMPTS[first : first + TASK_PROMPTS]]
        lines += alone({"first": first, "lines": own})["lines"]
    assert out.read_text("utf-8").splitlines() == lines
    assert [path.name for path in out.parent.iterdir()] == ["out.jsonl"]


@pytest.mark.parametrize("module", [batch_generation, inference])
def test_as_on_a_gpu_samples_are_drawn_in_bf16(
    checkpoint: Location, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def autocast(_: torch.device) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16)

    def spy(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        types.append(q.dtype)
        return attention(q, k, v, **options)

    def draw() -> object:
        if module is inference:
            more = {"max_new_tokens": 8, "num_samples": 1}
            return inference.sample_checkpoint(checkpoint.path, "a", print, **more)
        return Generator(checkpoint, 1, OPTIONS, None)({"first": 0, "lines": ['{"prompt": "a"}']})

    types: list[torch.dtype] = []
    monkeypatch.setattr(kv_cache, "attention", spy)
    draw()
    assert set(types) == {torch.float32}
    types.clear()
    monkeypatch.setattr(module, "inference_autocast", autocast)
    draw()
    assert set(types) == {torch.bfloat16}


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'["prompt"]', "list instead of an object"),
        (b'{"text": "a"}', "no text in field prompt"),
        (b'{"prompt": 3}', "no text in field prompt"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        ('{"prompt": "a"}'.encode("utf-16"), "not UTF-8"),
        (b'{"prompt": "a", "continuations": []}', "field continuations would be overwritten"),
    ],
    ids=lambda value: value[:20] if isinstance(value, bytes) else None,
)
def test_a_line_that_is_no_prompt_is_named_before_a_model_is_read(
    tmp_path: Path, line: bytes, word: str
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes(b'{"prompt": "good"}\r\n\n' + line + b"\n")
    with raises_line(DataError, f"{prompts} line 3: {word}"):
        start("no checkpoint", prompts, tmp_path / "out.jsonl")


def start(checkpoint: Location | str, prompts: Path, out: Path) -> None:
    sample_batch(checkpoint, prompts, out, print, num_samples=1, max_new_tokens=8)


def test_what_cannot_be_read_or_written_is_refused_first(tmp_path: Path) -> None:
    prompts, file = tmp_path / "prompts.jsonl", tmp_path / "file"
    prompts.write_text("\n")
    file.write_text("")
    for out, word in (
        (prompts, "choose another --out"),
        (tmp_path, "is a directory"),
        (file / "below" / "out.jsonl", "cannot write"),
    ):
        with raises_line(DataError, str(out), word):
            start("no checkpoint", prompts, out)
    with raises_line(DataError, "prompts.jsonl has no prompts"):
        start("no checkpoint", prompts, tmp_path / "out.jsonl")
    with raises_line(DataError, "cannot read", "missing.jsonl"):
        start("no checkpoint", tmp_path / "missing.jsonl", tmp_path / "out.jsonl")


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ([], "--prompt TEXT, or --batch FILE"),
        (["--prompt", "a", "--batch", "b", "--out", "c"], "either --prompt"),
        (["--batch", "prompts.jsonl"], "--out FILE"),
        (["--prompt", "a", "--out", "out.jsonl"], "--batch FILE"),
        (["--prompt", "a", "--top_p", "1.5"], "top_p='1.5'"),
        (["--prompt", "a", "--num_samples", "0"], "num_samples='0'"),
        (["--prompt", "a", "--max_new_tokens", "0"], "max_new_tokens='0'"),
    ],
    ids=str,
)
def test_flags_that_do_not_fit_are_refused_in_one_line(
    checkpoint: Location, run_cli: RunCli, flags: list[str], word: str
) -> None:
    assert word in run_cli.refuses("sample", checkpoint, *flags)
