"""Open ports, and the secrecy of tokens, passwords and keys, also on real clusters."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import psutil
import pytest

from raytrain_gpt.cluster.failures import root_cause
from raytrain_gpt.cluster.head import keep_token_private
from raytrain_gpt.redact import has_secret, redacted
from tests.conftest import RunCli
from tests.made_runs import MakeConfig, command, flags

LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
PASSWORD = "a-tracker's-password"
SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "a-store's-secret-key",
    "MLFLOW_TRACKING_USERNAME": "someone",
    "MLFLOW_TRACKING_PASSWORD": PASSWORD,
    "WANDB_API_KEY": "a-key-of-another-service",
}


@pytest.mark.parametrize(
    ("url", "is_secret"),
    [
        ("https://me:pass@word@host/x?a=1", True),
        ("https://token@host", True),
        ("https://me:p/w@host/x", True),
        ("postgresql://me@host/db", False),
        ("postgresql://me:p/w#1?2@host/db", True),
        ("postgresql://host/db?user=me&password=p&a=1", True),
        ("mssql://host/db?UID=me;PWD={p;w};a=1", True),
        ("http://host:5000/?tokenizer=bytes", False),
        ("sqlite:////runs/a:b@c/mlflow.db", False),
        ("s3://K:SE/CRET@bucket/x", True),
        ("s3://secret@bucket", True),
        ("s3://a/x=0.5,gs://K:S@b/y=0.5", True),
        ("s3://bucket/a:b@c", False),
        ("s3://bucket/runs/book@1200", False),
    ],
)
def test_secrets_in_urls_are_found(url: str, is_secret: bool) -> None:
    assert has_secret(url) == is_secret


def test_values_of_secret_variables_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/somewhere/token")
    monkeypatch.setenv("SHORT_KEY", "step")
    assert (
        redacted(f"step 1 of /somewhere/token: {PASSWORD}!") == "step 1 of /somewhere/token: ***!"
    )
    for form in (quote(PASSWORD, safe=""), json.dumps(PASSWORD)):
        assert redacted(f"<{form}>").strip('<">') == "***"
    assert root_cause(ValueError(f"{PASSWORD} is wrong\nsee")) == "ValueError: *** is wrong"


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        *((name, True) for name in ("AWS_SESSION_TOKEN", "DB_PASSWD", "MYSQL_PWD", "GITHUB_PAT")),
        *((name, True) for name in ("KEY", "API_KEYS", "PGPASSWORD", "AZURE_CONNECTION_STRING")),
        *((name, False) for name in ("PWD", "OLDPWD", "TOKENIZER", "KEYBOARD_LAYOUT", "KEY_FILE")),
    ],
)
def test_which_variables_are_secret(
    monkeypatch: pytest.MonkeyPatch, name: str, is_secret: bool
) -> None:
    monkeypatch.setenv(name, "a-long-value\n")
    assert redacted("with a-long-value") == ("with ***" if is_secret else "with a-long-value")


def test_what_libraries_print_is_filtered(run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    def show(*_: object) -> None:
        print(f"out {PASSWORD}")
        print(f"log {PASSWORD}", file=sys.stderr)
        raise ValueError(PASSWORD)

    monkeypatch.setenv("A_PASSWORD", PASSWORD)
    monkeypatch.setattr("raytrain_gpt.runs.listing.describe_runs", show)
    code, out, errors = run_cli("runs", "list")
    assert (code, out) == (1, "out ***\n")
    assert errors.startswith("log ***\nTraceback")
    assert PASSWORD not in errors


def test_a_url_with_the_value_of_a_secret_variable_is_refused(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_TOKEN", "my-secret-value")
    code, out, errors = run_cli("train", "--dry_run", "--mlflow_uri", "http://h/my-secret-value")
    assert (code, errors.count("\n")) == (2, 1)
    assert "mlflow_uri has a user, password or key in its URL" in errors
    assert "my-secret" not in out + errors


@pytest.mark.parametrize("command", ["eval", "data show", "train --config"])
def test_a_url_with_a_secret_is_one_line_without_it(run_cli: RunCli, command: str) -> None:
    code, out, errors = run_cli(*command.split(), "s3://KEY:AB/C9D@bucket/x")
    assert (code, errors.count("\n")) == (2, 1)
    assert "***@bucket" in errors
    assert "C9D" not in out + errors


@pytest.mark.parametrize(
    ("leaf", "value", "way_out"),
    [
        ("mlflow_uri", "mssql+pyodbc:///?odbc_connect=PWD%3Dmy-secret", "MLFLOW_TRACKING_PASSWORD"),
        ("storage_path", "s3://me:my-secret/x@bucket/runs", "AWS_SECRET_ACCESS_KEY"),
        ("s3_endpoint", "https://my-secret@host", "AWS_SECRET_ACCESS_KEY"),
    ],
)
def test_a_configuration_with_a_secret_is_refused_without_showing_it(
    run_cli: RunCli, leaf: str, value: str, way_out: str
) -> None:
    code, out, errors = run_cli("train", "--dry_run", f"--{leaf}", value)
    assert code == 2
    assert leaf in errors
    assert way_out in errors
    assert errors.count("\n") == 1
    assert "my-secret" not in out + errors


def test_a_token_file_becomes_private_and_no_more_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    keep_token_private()
    for before, after in ((0o644, 0o600), (0o640, 0o600), (0o400, 0o400)):
        token.touch()
        token.chmod(before)
        keep_token_private()
        assert token.stat().st_mode & 0o777 == after


class Tracker(BaseHTTPRequestHandler):
    """HTTP handler that refuses every request and repeats the password it received."""

    def do_GET(self) -> None:
        given = self.headers.get("Authorization", "").removeprefix("Basic ")
        answer = b"not with " + base64.b64decode(given)
        self.send_response(403)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        """Discard the log message."""


@dataclass(frozen=True)
class Seen:
    """Observations of a run on its private cluster.

    Attributes:
        listening: (process title, IP) of every port that the run's processes listened on.
        ray_modes: Mode of every directory that contained Ray's files.
        ray_logs: Contents of Ray's log files before the run exited.
        ray_left: Files of Ray that remained after the run.
        token: Path of the generated token.
    """

    listening: list[tuple[str, str]]
    output: str
    run_dir: Path
    ray_modes: list[int]
    ray_logs: list[bytes]
    ray_left: list[Path]
    token: Path


@pytest.fixture(scope="module")
def seen(make_config: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """Train as a user who has no token yet; inspect the run during training, then stop it by SIGTERM."""
    tracker = ThreadingHTTPServer(("127.0.0.1", 0), Tracker)
    threading.Thread(target=tracker.serve_forever, daemon=True).start()
    home = tmp_path_factory.mktemp("home")
    ray_dir = Path(tempfile.mkdtemp(prefix="own-", dir="/tmp"))  # socket paths must be short
    uri = f"http://127.0.0.1:{tracker.server_port}"
    config = make_config(run_name="own", num_workers=2, max_steps=100_000, mlflow_uri=uri)
    env = {k: v for k, v in os.environ.items() if k not in ("RAY_AUTH_TOKEN", "RAY_AUTH_MODE")}
    env |= {**SECRETS, "RAY_ADDRESS": "local", "RAY_TMPDIR": str(ray_dir), "HOME": str(home)}
    run = subprocess.Popen(
        command("train", *flags(config)),
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert run.stdout is not None
        lines: list[str] = []
        for line in run.stdout:
            lines.append(line)
            if "| loss" in line and any("MLflow" in said for said in lines):
                break
        listening = list(listening_on(psutil.Process(run.pid)))
        modes = [path.stat().st_mode & 0o777 for path in ray_dir.iterdir()]
        logs = [path.read_bytes() for path in ray_dir.glob("**/logs/**/*.*") if path.is_file()]
        run.send_signal(signal.SIGTERM)
        rest, _ = run.communicate(timeout=300)
        output = "".join(lines) + rest
        assert run.returncode == 130, output
        run_dir = Path(config.run.storage_path, "own")
        left = list(ray_dir.iterdir())
        yield Seen(listening, output, run_dir, modes, logs, left, home / ".ray" / "auth_token")
    finally:
        run.kill()
        tracker.shutdown()
        tracker.server_close()
        shutil.rmtree(ray_dir)


def listening_on(root: psutil.Process) -> Iterator[tuple[str, str]]:
    """Yield (title, IP) of the listening ports of a process and its descendants."""
    for process in [root, *root.children(recursive=True)]:
        try:
            title, connections = process.cmdline()[0], process.net_connections("inet")
        except (psutil.Error, IndexError):  # exited in the meantime
            continue
        for connection in connections:
            if connection.status == psutil.CONN_LISTEN:
                yield title, connection.laddr.ip


@pytest.mark.long
def test_a_cluster_of_our_own_listens_on_this_machine_alone(seen: Seen) -> None:
    assert sum("RayTrainWorker" in title for title, _ in seen.listening) >= 2
    assert any("gcs_server" in title for title, _ in seen.listening)
    assert not [title for title, address in seen.listening if address not in LOOPBACK]


@pytest.mark.long
def test_a_cluster_of_our_own_is_private_and_leaves_nothing(seen: Seen) -> None:
    assert seen.ray_modes == [0o700]
    assert seen.ray_left == []


@pytest.mark.long
def test_the_token_that_ray_makes_is_for_its_user_alone(seen: Seen) -> None:
    assert len(seen.token.read_text()) >= 32
    assert seen.token.stat().st_mode & 0o777 == 0o600


@pytest.mark.long
@pytest.mark.fault("secrets in configuration or environment", "never printed or written")
def test_no_secret_is_printed_or_written(seen: Seen) -> None:
    assert "not with someone:***" in seen.output
    secrets = [*SECRETS.values(), seen.token.read_text()]
    secrets.remove("someone")
    assert not [secret for secret in secrets if secret in seen.output]
    written = [path for path in seen.run_dir.rglob("*") if path.is_file()]
    names = {path.name for path in written}
    assert names >= {"config.yaml", "metrics.jsonl", "log.txt", "report.html", "state.json"}
    assert seen.ray_logs
    for content in [*(path.read_bytes() for path in written), *seen.ray_logs]:
        assert not [secret for secret in secrets if secret.encode() in content], content
