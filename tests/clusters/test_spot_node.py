"""Preemption notice of a spot machine, from a simulated metadata server of the cloud."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import pytest

SCRIPT = Path(__file__).parents[2] / "clusters" / "node" / "spot-node.sh"
NODE = """\
#!/usr/bin/env bash
echo "started $*"
trap 'echo asked to leave; exit 7' TERM
while :; do sleep 0.1; done
"""
"""Stand-in for `raytrain-gpt node`, which needs a cluster; both exit on SIGTERM."""


class Cloud(ThreadingHTTPServer):
    """Metadata server of a machine, which is preempted once `taken` is set."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Metadata)
        self.taken = Event()
        self.asked = Event()


class Metadata(BaseHTTPRequestHandler):
    server: Cloud

    def do_PUT(self) -> None:
        named = self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self._answer("a-token" if named and self.path == "/latest/api/token" else None)

    def do_GET(self) -> None:
        taken = self.server.taken.is_set()
        answer = None
        if self.path == "/latest/meta-data/spot/instance-action":
            if self.headers["X-aws-ec2-metadata-token"] == "a-token" and taken:
                answer = '{"action": "terminate"}'
        elif self.headers["Metadata-Flavor"] == "Google":
            assert self.path == "/computeMetadata/v1/instance/preempted"
            answer = "TRUE" if taken else "FALSE"
        self._answer(answer)
        self.server.asked.set()

    def _answer(self, text: str | None) -> None:
        self.send_response(200 if text else 404)
        self.end_headers()
        self.wfile.write((text or "").encode())

    def log_message(self, format: str, *args: object) -> None:
        """Discard the log message."""


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    """Start the metadata server of a machine that is not preempted yet."""
    server = Cloud()
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def start(name: str, cloud: Cloud, directory: Path) -> subprocess.Popen[str]:
    program = directory / "raytrain-gpt"
    program.write_text(NODE)
    program.chmod(0o755)
    address = f"127.0.0.1:{cloud.server_port}"
    return subprocess.Popen(
        ["bash", str(SCRIPT), name, "--address", "head:6379"],
        env={
            "PATH": f"{directory}:{os.environ['PATH']}",
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{address}",
            "GCE_METADATA_HOST": address,
        },
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("name", ["aws", "gcp"])
def test_the_node_is_asked_to_leave_when_the_cloud_takes_the_machine(
    name: str, cloud: Cloud, tmp_path: Path
) -> None:
    process = start(name, cloud, tmp_path)
    assert cloud.asked.wait(30)
    assert process.poll() is None
    cloud.taken.set()
    printed, _ = process.communicate(timeout=30)
    assert printed.splitlines() == [
        "started node --address head:6379",
        f"{name} takes this machine away",
        "asked to leave",
    ]
    assert process.returncode == 7
