"""`submit`: which files go along, and what is refused before anything is sent."""

from __future__ import annotations

import http.server
import os
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest

from raytrain_gpt.cluster import job, job_files
from raytrain_gpt.cluster.tcp_sockets import TcpSocket
from raytrain_gpt.errors import ClusterError, ConfigError
from tests.conftest import RunCli, raises_line


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a repository with tracked, changed, ignored and unknown files the current directory."""
    texts = {
        "train.py": "1",
        "docs/a.md": "x",
        "pkg/own.py": "2",
        "raytrain_gpt/cli.py": "",
        ".rayignore": ".?*\n/docs\n",
        ".gitignore": "runs/\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    (tmp_path / "pkg" / "own.py").write_text("changed")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "model.bin").write_bytes(bytes(1000))
    (tmp_path / "big.bin").write_bytes(bytes(1000))
    (tmp_path / "new.py").write_text("3")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_files_that_git_tracks_go_along_as_they_are_now(checkout: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    files = job_files.job_files(checkout, [], lines.append)
    assert files == [Path("pkg/own.py"), Path("raytrain_gpt/cli.py"), Path("train.py")]
    assert lines == [
        "not uploaded, since git does not track them: new.py; name needed ones in --files"
    ]
    copy = tmp_path / "runs" / "copy"
    copy.mkdir()
    assert job_files.copy_files(checkout, files, copy) == len("changed") + 1
    assert (copy / "pkg" / "own.py").read_text() == "changed"
    more = job_files.job_files(checkout, ["new.py", "runs"], lines.append)
    assert set(more) - set(files) >= {Path("new.py"), Path("runs/model.bin")}
    assert len(lines) == 1


def test_files_that_cannot_go_along(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with raises_line(ConfigError, "no.py does not exist", "--files"):
        job_files.job_files(checkout, ["no.py"], print)
    other = tmp_path_factory.mktemp("other") / "a.py"
    other.write_text("")
    with raises_line(ConfigError, "outside of", "copy it"):
        job_files.job_files(checkout, [str(other)], print)
    monkeypatch.setattr(job_files, "MAX_BYTES", 500)
    with raises_line(ConfigError, "big.bin (1.0 kB)", "500 B"):
        job_files.job_files(checkout, ["big.bin"], print)


def test_without_a_repository_only_named_files_go_along(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("")
    assert job_files.job_files(tmp_path, [], print) == []
    assert job_files.job_files(tmp_path, ["a.py"], print) == [Path("a.py")]


class FakeDashboard(http.server.BaseHTTPRequestHandler):
    """A head elsewhere, which requires the token `right`."""

    def do_GET(self) -> None:
        right = self.headers["Authorization"] == "Bearer right"
        self.send_response(200 if right else 401 if not self.headers["Authorization"] else 403)
        self.end_headers()
        self.wfile.write(b'{"ray_version": "2.60.0", "session_name": "session_elsewhere_1"}')

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def dashboard() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeDashboard)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the header to send, which a test may change."""
    header = {"authorization": "Bearer right"}
    monkeypatch.setattr(job, "_token_header", lambda: header)
    return header


def test_a_relative_path_is_refused_if_the_head_is_elsewhere(
    checkout: Path, dashboard: str, token: dict[str, str], run_cli: RunCli
) -> None:
    flags = ["--address", dashboard, "--dry_run", "--data_path", "s3://bucket/data"]
    refused = run_cli.refuses("submit", *flags)
    assert "storage_path=runs is relative" in refused
    assert "s3:// or gs:// URL" in refused
    shown = run_cli.succeeds("submit", *flags, "--storage_path", "/shared/runs", "--max_steps", "9")
    assert shown.splitlines()[-1].startswith(
        f"RAY_AUTH_MODE=token ray job submit --address {dashboard} --working-dir . --runtime-env-json"
    )
    assert shown.rstrip().endswith(
        "-- python train.py --data_path=s3://bucket/data --storage_path=/shared/runs --max_steps=9"
    )


def test_relative_paths_become_absolute_on_the_heads_machine(
    checkout: Path,
    dashboard: str,
    token: dict[str, str],
    run_cli: RunCli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job, "_runs_here", lambda session: session == "session_elsewhere_1")
    shown = run_cli.succeeds("submit", "--address", dashboard, "--dry_run")
    assert f"--data_path={checkout}/data/stdlib --storage_path={checkout}/runs" in shown


def test_a_configuration_goes_along_under_its_relative_name(
    checkout: Path, dashboard: str, token: dict[str, str], run_cli: RunCli
) -> None:
    (checkout / "runs" / "my.yaml").write_text("run: {storage_path: /shared/runs}")
    flags = ["--address", dashboard, "--dry_run", "--data_path", "/shared/data"]
    shown = run_cli.succeeds("submit", *flags, "--config", checkout / "runs" / "my.yaml")
    assert "-- python train.py --config=runs/my.yaml --data_path=/shared/data\n" in shown


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ({"authorization": "Bearer wrong"}, ("refuses the token", "the head was started with")),
        ({}, ("requires a token, and this machine has none", "~/.ray/auth_token")),
    ],
)
def test_a_wrong_or_missing_token(
    sent: dict[str, str], words: tuple[str, ...], dashboard: str, token: dict[str, str]
) -> None:
    token.clear()
    token.update(sent)
    with raises_line(ClusterError, *words):
        job.ask_job_server(dashboard)


@pytest.mark.parametrize(
    "address", ["127.0.0.1:8265", "ftp://a", "http://", "http://a:x", "ray://a:1", "http://[::1"]
)
def test_an_address_that_is_none(address: str, token: dict[str, str]) -> None:
    with raises_line(
        ClusterError, f"address {address} is not a dashboard's", "http://127.0.0.1:8265"
    ):
        job.ask_job_server(address)


def test_an_address_where_nobody_or_a_stranger_answers(
    dashboard: str, token: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with raises_line(ClusterError, "no cluster answers at http://127.0.0.1:9", "--address"):
        job.ask_job_server("http://127.0.0.1:9")
    port = int(dashboard.rpartition(":")[2])
    stranger = TcpSocket(f"0100007F:{port:04X}", "00000000:0000", True, 12345, "1")
    monkeypatch.setattr(job, "tcp_sockets", lambda: [stranger])
    with raises_line(ClusterError, "another user (uid 12345) listens", "would get the token"):
        job.ask_job_server(dashboard)


@pytest.mark.parametrize("host", ["127.1", "127.0.0.2", "localhost", "0.0.0.0"])
def test_every_name_of_this_machine_is_asked_for_its_owner(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = TcpSocket("0100007F:2049", "00000000:0000", True, 12345, "1")
    monkeypatch.setattr(job, "tcp_sockets", lambda: [stranger])
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("NO_PROXY", "")
    with raises_line(ClusterError, "another user (uid 12345)"):
        job.check_owner(f"http://{host}:8265")
    assert os.environ["no_proxy"] == host


def test_a_port_that_speaks_no_http(token: dict[str, str]) -> None:
    def answer(server: socket.socket) -> None:
        connection, _ = server.accept()
        connection.sendall(b"\0\0\0nothing\n\n")
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer, args=(server,), daemon=True).start()
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        with raises_line(ClusterError, f"no cluster answers at {address}"):
            job.ask_job_server(address)


def test_the_address_comes_from_rays_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert job.job_address(None) == "http://127.0.0.1:8265"
    monkeypatch.setenv("RAY_ADDRESS", "http://10.0.0.1:8265/")
    assert job.job_address(None) == "http://10.0.0.1:8265"
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "https://head")
    assert job.job_address(None) == "https://head"
    assert job.job_address("http://b:1") == "http://b:1"


class MadeClient:
    """Ray's client of a job whose connection fails as listed, before the job ends."""

    def __init__(self, *fails: Exception) -> None:
        self._fails = list(fails)

    async def tail_job_logs(self, _job: str) -> AsyncIterator[str]:
        yield "first\n"
        if self._fails:
            raise self._fails.pop(0)
        yield "last\n"

    def get_job_info(self, _job: str) -> SimpleNamespace:
        return SimpleNamespace(status="FAILED", driver_exit_code=7)

    def stop_job(self, _job: str) -> None:
        raise ConnectionError("refused")


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> job.SubmittedJob:
    monkeypatch.setattr(job, "_RECONNECT_EVERY_S", 0)
    monkeypatch.setattr(job, "check_owner", lambda address: None)
    made = object.__new__(job.SubmittedJob)
    made.id, made._printed = "job-1", 0
    made._server = job.JobServer("http://127.0.0.1:8265", True)
    return made


def test_a_lost_connection_is_opened_again_and_no_line_is_printed_twice(
    submitted: job.SubmittedJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = (aiohttp.ServerDisconnectedError(), ConnectionError("refused"), RuntimeError("closed"))
    submitted._client = MadeClient(*fails)  # type: ignore[assignment]
    printed: list[str] = []
    assert submitted.follow(printed.append) == 7
    assert "".join(printed) == "first\nlast\n"
    monkeypatch.setattr(job, "RECONNECT_FOR_S", -1)
    submitted._client = MadeClient(*[ConnectionError("refused")] * 3)  # type: ignore[assignment]
    with raises_line(ClusterError, "lost http://127.0.0.1:8265", "ray job logs"):
        submitted.follow(printed.append)
    with raises_line(ClusterError, "does not answer (refused)"):
        submitted.stop()


class MadeJob:
    """A job whose log ends, or is interrupted by Ctrl+C, as listed."""

    id, log_command, stop_command = "job-1", "ray job logs", "ray job stop"

    def __init__(self, *ends: int | None) -> None:
        self._ends, self.stops = iter(ends), 0

    def follow(self, _write: object) -> int:
        code = next(self._ends)
        if code is None:
            raise KeyboardInterrupt
        return code

    def stop(self) -> None:
        self.stops += 1


@pytest.mark.parametrize(
    ("ends", "answers", "code", "stops"),
    [
        ((3,), (), 3, 0),
        ((None,), ("d",), 0, 0),
        ((None, 130), ("s",), 130, 1),
        ((None, None), ("s",), 0, 1),  # Ctrl+C again while it saves
        ((None, 0), ("",), 0, 0),
    ],
)
def test_ctrl_c_asks(
    ends: tuple[int | None, ...],
    answers: tuple[str, ...],
    code: int,
    stops: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = iter(answers)
    monkeypatch.setattr(job, "_ask", lambda: next(given))
    made = MadeJob(*ends)
    assert job.follow_until_end(made, print) == code  # type: ignore[arg-type]
    assert made.stops == stops
