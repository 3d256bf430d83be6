"""One server for all tests: two replicas that follow a run, open to other hosts with a key."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from raytrain_gpt.config.call_options import SamplingOptions
from raytrain_gpt.core.generate import DecodingBatch
from raytrain_gpt.serve.replica import load_weights
from raytrain_gpt.serve.serve_options import KEY_VARIABLE
from tests.ports import free_port
from tests.runs import command
from tests.serve.checkpoints import RUN_NAME, write_checkpoint

KEY = "a-key-of-the-server's"
CONTEXT_TOKENS = 4096
"""Context length at which a long request outlasts others."""
MAX_BATCH = 16
MAX_QUEUE = 84
"""Plus one batch makes 100 sequences, in case one replica gets all of them."""
WITHIN_S = 120


class Server:
    """`serve --follow` in a separate process."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.ray_dir = Path(tempfile.mkdtemp(prefix="own-", dir="/tmp"))  # sockets need short paths
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.headers = {"Authorization": f"Bearer {KEY}"}
        options = {"host": "0.0.0.0", "port": self.port, "num_replicas": 2}
        options |= {"max_batch": MAX_BATCH, "max_queue": MAX_QUEUE}
        flags = [f"--{name}={value}" for name, value in options.items()]
        self.process = subprocess.Popen(
            command("serve", str(run_dir), "--follow", *flags),
            env={**os.environ, "RAY_TMPDIR": str(self.ray_dir), KEY_VARIABLE: KEY},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output = ""
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._started: list[psutil.Process] = []

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            self._lines.put(line)

    def said(self, words: str) -> str:
        """Wait for the next line that contains `words` and return it."""
        while words not in (line := self._lines.get(timeout=WITHIN_S)):
            pass
        return line

    def facts(self) -> dict[str, Any]:
        """Return the server's description of the current model."""
        answer = httpx2.get(f"{self.url}/v1/models", headers=self.headers, timeout=WITHIN_S)
        found: dict[str, Any] = answer.json()["data"][0]
        return found

    def terminate(self) -> None:
        self._started = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGTERM)

    def ended(self) -> int:
        """Wait until the server and its descendants exit and the output is complete; return the exit code."""
        code = self.process.wait(WITHIN_S)
        _, left = psutil.wait_procs(self._started, timeout=WITHIN_S)
        assert not left, left
        self._reader.join(WITHIN_S)
        assert not self._reader.is_alive()
        return code

    def alone(self, step: int, prompt: bytes, options: SamplingOptions, stream: int = 0) -> bytes:
        """Return the continuation of a prompt by the model of a step, in a batch of one."""
        weights = load_weights(str(self.run_dir / "checkpoints" / f"step={step:08d}"))
        batch = DecodingBatch(weights.model, weights.tokenizer.eot_token, 1)
        batch.add(prompt, options, stream)
        tokens: list[int] = []
        while batch.num_active:
            tokens += [drawn.token for drawn in batch.step() if drawn.token is not None]
        return bytes(tokens)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve step 10 of a run until a test writes a better checkpoint."""
    run_dir = tmp_path_factory.mktemp("served") / RUN_NAME
    write_checkpoint(run_dir, 10, 3.0, CONTEXT_TOKENS)
    started = Server(run_dir)
    try:
        started.said("next: curl")
        yield started
        if started.process.poll() is None:
            started.terminate()
            started.ended()
    finally:
        started.process.kill()
        shutil.rmtree(started.ray_dir, ignore_errors=True)
