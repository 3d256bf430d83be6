"""`prepare`, killed repeatedly, produces the same bytes as an undisturbed preparation."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from pathlib import Path

import pytest

from raytrain_gpt.data.shards import MANIFEST_FILE
from tests.data.shard_tools import prepare_here
from tests.runs import command, environment

from .conftest import ROOT
from .gates import wait_until

pytestmark = pytest.mark.faults

NUM_FILES = 30
NUM_KILLS = 5
SHARD_TOKENS = 500_000
NUM_BAD = NUM_FILES
WORDS = "a few words " * 2000


@pytest.fixture
def sources(tmp_path: Path) -> str:
    """Write files for one task each; every file has duplicates and one bad line."""
    (tmp_path / "in").mkdir()
    draw = random.Random(0)
    for i in range(NUM_FILES):
        words = [
            f"file {i % 20} document {j} " + WORDS[: draw.randrange(20) * 1000] for j in range(100)
        ]
        lines = [json.dumps({"text": text}) for text in words]
        lines.insert(draw.randrange(1, 100), "no JSON")
        (tmp_path / "in" / f"{i:02d}.jsonl").write_text("\n".join([*lines, lines[0]]))
    return str(tmp_path / "in")


def all_files(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def written(directory: Path) -> set[str]:
    """Return the complete files; directories may vanish during the walk."""
    found = {str(Path(parent, name)) for parent, _, names in os.walk(directory) for name in names}
    return {name for name in found if not name.endswith(".unfinished")}


@pytest.mark.timeout(600)  # six commands, one after the other
def test_killed_five_times_it_ends_with_the_same_bytes(
    cluster: str, sources: str, tmp_path: Path
) -> None:
    options = {"shard_tokens": SHARD_TOKENS, "val_fraction": 0.05}
    options |= {"dedupe": "exact", "max_bad_documents": NUM_BAD}
    whole = prepare_here([sources], tmp_path / "whole", "bytes", **options)
    assert whole.source["bad_documents"] == NUM_BAD
    assert whole.source["duplicates"] > NUM_FILES
    out, log = tmp_path / "out", tmp_path / "log"
    argv = command("prepare", sources, "--out", str(out), "--shard_tokens", str(SHARD_TOKENS),
                   "--val_fraction", "0.05", "--dedupe", "exact",
                   "--max_bad_documents", str(NUM_BAD))  # fmt: skip

    def start() -> subprocess.Popen[bytes]:
        with log.open("a") as output:
            return subprocess.Popen(
                argv,
                cwd=ROOT,
                env=environment(cluster),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    # Files of hashes, shards and task results; kills in the last quarter might come after the end.
    num_written = 2 + 2 * NUM_FILES + len(whole.shards)
    moments = random.Random(1).sample(range(1, num_written * 3 // 4), NUM_KILLS)
    assert sum(moment > 2 + NUM_FILES for moment in moments) >= 2, "too few kills during shards"
    for moment in sorted(moments):
        process = start()
        try:
            wait_until(
                lambda p=process, m=moment: p.poll() is not None or len(written(out)) >= m,
                f"file {moment}",
            )
            assert process.poll() is None, f"ended before file {moment}: {log.read_text()}"
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        assert not (out / MANIFEST_FILE).exists()
    assert start().wait(300) == 0, log.read_text()
    assert all_files(out) == all_files(tmp_path / "whole")
