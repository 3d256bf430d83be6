"""`prepare` as Ray Data tasks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from raytrain_gpt.runtime.prepare import prepare

pytestmark = pytest.mark.ray


def test_shards_are_byte_identical_for_one_and_four_workers(cluster: str, tmp_path: Path) -> None:
    manifests = [
        prepare(["stdlib"], tmp_path / str(workers), "bytes", log=print, num_cpus=workers)
        for workers in (1, 4)
    ]
    assert manifests[0] == manifests[1]
    names = sorted(path.name for path in (tmp_path / "1").iterdir())
    assert len([name for name in names if name.startswith("train-")]) > 1
    assert names == sorted(path.name for path in (tmp_path / "4").iterdir())
    for name in names:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "4" / name).read_bytes()


def test_prepare_shows_what_it_made_and_is_done_once(
    cluster: str, run_cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    source = tmp_path / "lines.jsonl"
    source.write_text("".join(f'{{"text": "document {i}"}}\n' for i in range(150)))
    out = tmp_path / "out"
    code, shown, _ = run_cli("prepare", source, "--out", out, "--val-fraction", "0.1")
    assert code == 0
    assert "tokens in 135 documents" in shown
    assert "tokens in 15 documents" in shown
    assert "next: raytrain-gpt train" in shown
    assert "already prepared" in run_cli("prepare", source, "--out", out, "--val_fraction=0.1")[1]
    assert run_cli("data", "verify", out)[0] == 0
