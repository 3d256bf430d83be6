"""Shutdown of the server, after all its other tests; the file names determine the order."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import httpx2
import psutil
import pytest

from raytrain_gpt.checkpoint.catalog import CHECKPOINTS_DIR
from raytrain_gpt.checkpoint.hashes import HASHES_FILE
from raytrain_gpt.config.call_options import SamplingOptions
from raytrain_gpt.core.state import MODEL_FILE
from tests.faults.gates import wait_until
from tests.serve.checkpoints import write_checkpoint
from tests.serve.conftest import MAX_BATCH, WITHIN_S, Server

pytestmark = pytest.mark.serve

JSON = {"Content-Type": "application/json"}


class Reading(threading.Thread):
    """Thread that reads a response's events as they arrive."""

    def __init__(self, server: Server, body: dict[str, object]) -> None:
        super().__init__(daemon=True)
        self._server, self._body = server, body
        self.came: list[tuple[float, str]] = []
        self.began = threading.Event()
        self.start()

    def run(self) -> None:
        url, headers = f"{self._server.url}/v1/completions", self._server.headers
        with httpx2.stream(
            "POST", url, json=self._body, headers=headers, timeout=WITHIN_S
        ) as answer:
            for line in filter(None, answer.iter_lines()):
                self.came.append((time.monotonic(), line.removeprefix("data: ")))
                self.began.set()


def hold_follower(server: Server, tmp_path: Path) -> None:
    """Add a best checkpoint that takes minutes to verify, an empty file of 1 TB; wait until it is read."""
    whole = write_checkpoint(tmp_path / "run", step=99_999_999, val_loss=0.0)
    hashes = json.loads((whole / HASHES_FILE).read_text())
    hashes[MODEL_FILE]["bytes"] = 2**40
    (whole / HASHES_FILE).write_text(json.dumps(hashes))
    os.truncate(whole / MODEL_FILE, 2**40)
    place = whole.rename(server.run_dir / CHECKPOINTS_DIR / whole.name)
    files = psutil.Process(server.process.pid).open_files
    wait_until(lambda: str(place / MODEL_FILE) in {file.path for file in files()}, "the check")


def test_it_ends_after_what_is_in_flight_and_leaves_nothing(server: Server, tmp_path: Path) -> None:
    """This also holds while the server verifies a checkpoint of the run, as in a slow swap."""
    step, length = server.facts()["step"], 1000
    hold_follower(server, tmp_path)
    options = {"temperature": 0.3, "seed": 3}
    body = {"prompt": "a", "n": MAX_BATCH, "max_tokens": length, "stream": True, **options}
    reading = Reading(server, body)
    assert reading.began.wait(WITHIN_S)
    server.terminate()
    server.said("stopping; requests in flight may finish")
    stopping = time.monotonic()
    reading.join(WITHIN_S)
    times, events = zip(*reading.came, strict=True)
    assert events[-1] == "[DONE]"
    assert sum(came > stopping for came in times) > 1, "no token came after the stop was logged"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert sum(choice["finish_reason"] is not None for choice in choices) == MAX_BATCH
    drawn = SamplingOptions(max_new_tokens=length, temperature=0.3, top_k=None, seed=3)
    first = "".join(choice["text"] for choice in choices if choice["index"] == 0)
    assert first == server.alone(step, b"a", drawn).decode("utf-8", "replace")
    assert server.ended() == 130
    assert server.output.endswith("stopped\n")
    assert "Traceback" not in server.output
