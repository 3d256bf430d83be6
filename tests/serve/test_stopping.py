"""The end of the server, after all other tests of it: the files' names order them."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import httpx2
import pytest

from raytrain_gpt.checkpoint.catalog import CHECKPOINTS_DIR, HASHES_FILE, STATE_FILE
from raytrain_gpt.config.call_options import SamplingOptions
from tests.serve.conftest import MAX_BATCH, WITHIN_S, Server

pytestmark = pytest.mark.serve

JSON = {"Content-Type": "application/json"}


class Reading(threading.Thread):
    """Reads an answer's events as they come."""

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


def hold_follower(run_dir: Path, tmp_path: Path) -> int:
    """A checkpoint at which whoever looks at the run waits until what is returned is closed."""
    directory = tmp_path / "step=99999999"
    directory.mkdir()
    (directory / HASHES_FILE).write_text("{}")
    os.mkfifo(directory / STATE_FILE)
    place = directory.rename(run_dir / CHECKPOINTS_DIR / directory.name)
    opened: list[int] = []
    opening = threading.Thread(
        target=lambda: opened.append(os.open(place / STATE_FILE, os.O_WRONLY)), daemon=True
    )
    opening.start()  # it is open when the other side is
    opening.join(WITHIN_S)
    return opened[0]


def test_it_ends_after_what_is_in_flight_and_leaves_nothing(server: Server, tmp_path: Path) -> None:
    """Also while it looks at the run, as for a swap that takes long."""
    step, length = server.facts()["step"], 1000
    held = hold_follower(server.run_dir, tmp_path)
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
    assert sum(came > stopping for came in times) > 1, "more than the end came after it said so"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert sum(choice["finish_reason"] is not None for choice in choices) == MAX_BATCH
    drawn = SamplingOptions(max_new_tokens=length, temperature=0.3, top_k=None, seed=3)
    first = "".join(choice["text"] for choice in choices if choice["index"] == 0)
    assert first == server.alone(step, b"a", drawn).decode("utf-8", "replace")
    assert server.ended() == 130
    os.close(held)
    assert server.output.endswith("stopped\n")
    assert "Traceback" not in server.output
