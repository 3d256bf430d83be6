"""Submit a command to a Ray cluster as a job, follow its log, then stop or detach.

Ray's own command sends no token unless RAY_AUTH_MODE is set, kills a stopped job after 3 s, too soon for
a checkpoint, and reports a wrong address or token as a traceback.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import os
import shlex
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import psutil  # type: ignore[import-untyped]
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

from raytrain_gpt.cluster.tcp_sockets import tcp_sockets
from raytrain_gpt.cluster.token import token_file
from raytrain_gpt.errors import ClusterError
from raytrain_gpt.format import Log

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
STOP_WAIT = {"RAY_JOB_STOP_WAIT_TIME_S": "120"}
"""Seconds from SIGTERM to SIGKILL; Ray's default is 3."""
ANSWER_TIMEOUT_S = 10.0
RECONNECT_FOR_S = 300.0
_RECONNECT_EVERY_S = 2.0
_ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
_NETWORK_ERRORS = (OSError, RuntimeError, HTTPException, aiohttp.ClientError)
"""Errors of Ray's client: `requests` raises OSErrors."""


@dataclass(frozen=True)
class JobServer:
    """The dashboard of a head, which takes jobs."""

    address: str
    is_here: bool


def job_address(given: str | None) -> str:
    """Return the address to submit to: the given one, else from Ray's variables, else DEFAULT_ADDRESS."""
    names = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
    found = (os.environ.get(name, "") for name in names)
    by_http = (address for address in found if address.startswith(("http://", "https://")))
    return (given or next(by_http, DEFAULT_ADDRESS)).rstrip("/")


def ask_job_server(address: str) -> JobServer:
    """Check the address and this machine's token.

    Raises:
        ClusterError: the address is invalid, nothing answers there, a stranger's process does, or it refuses
            the token.
    """
    check_owner(address)
    has_token = bool(_token_header())
    try:
        facts = _get(f"{address}/api/version")
    except urllib.error.HTTPError as error:
        if error.code not in (401, 403):
            raise ClusterError(
                f"{address} answers {error.code} {error.reason}; set --address to the head's dashboard"
            ) from None
        where = token_file() or "RAY_AUTH_TOKEN"
        wrong = (
            f"refuses the token of {where}; use the one that the head was started with"
            if has_token
            else "requires a token, and this machine has none; copy the head's ~/.ray/auth_token, mode 0600"
        )
        raise ClusterError(f"the cluster at {address} {wrong}") from None
    except (OSError, ValueError, HTTPException) as error:
        cause = str(getattr(error, "reason", error)).strip() or type(error).__name__
        raise ClusterError(
            f"no cluster answers at {address} ({cause}); start it, open a tunnel with `ray dashboard "
            "cluster.yaml`, or set --address"
        ) from None
    session = str(facts.get("session_name", ""))
    return JobServer(address, is_here=bool(session) and _runs_here(session))


def check_owner(address: str) -> None:
    """Refuse a port of this machine on which another user listens, since the token is sent to it.

    Raises:
        ClusterError: a stranger listens, or the address is invalid.
    """
    try:
        url = urlsplit(address)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(address)
        port = url.port or (443 if url.scheme == "https" else 80)
        found = {row[4][0] for row in socket.getaddrinfo(url.hostname, port)}
    except ValueError:
        raise ClusterError(
            f"address {address} is not a dashboard's; set --address to one such as {DEFAULT_ADDRESS}"
        ) from None
    except OSError as error:
        raise ClusterError(
            f"no host {url.hostname} ({error.strerror}); correct --address"
        ) from None
    addresses = [ipaddress.ip_address(str(one).partition("%")[0]) for one in found]
    if not any(one.is_loopback or one.is_unspecified for one in addresses):
        return
    for name in ("no_proxy", "NO_PROXY"):  # a proxy would get the token
        if url.hostname not in (hosts := os.environ.get(name, "").split(",")):
            os.environ[name] = ",".join([*filter(None, hosts), url.hostname])
    owners = {row.uid for row in tcp_sockets() if row.listens and row.port == port}
    if strangers := owners - {0, os.getuid()}:
        raise ClusterError(
            f"another user (uid {min(strangers)}) listens at {address}, and would get the token; set "
            "--address to your own cluster's"
        )


def _runs_here(session: str) -> bool:
    """Whether a process of this machine belongs to a Ray session; names have start time and process id."""
    commands = (process.info["cmdline"] for process in psutil.process_iter(["cmdline"]))
    return any(session in word for command in commands for word in command or ())


def _token_header() -> dict[str, str]:
    """Return the header with this machine's token, whatever RAY_AUTH_MODE is; empty without a token."""
    loader = AuthenticationTokenLoader.instance()
    return dict(loader.get_token_for_http_header(ignore_auth_mode=True))


def _get(url: str) -> dict[str, object]:
    request = urllib.request.Request(url, headers=_token_header())
    with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
        content = json.loads(answer.read(2**20))
    if not isinstance(content, dict):
        raise ValueError("not a Ray dashboard")
    return content


def plain_command(address: str, words: Sequence[str], *, uploads: bool) -> str:
    """Return the `ray job submit` command that `submit` stands for."""
    given = ["--address", address, *["--working-dir", "."] * uploads]
    given += ["--runtime-env-json", json.dumps({"env_vars": STOP_WAIT})]
    return f"RAY_AUTH_MODE=token ray job submit {shlex.join(given)} -- {shlex.join(words)}"


class SubmittedJob:
    """A submitted job.

    Args:
        directory: Holds the files to upload, or None for none.

    Raises:
        ClusterError: the head refuses it.
    """

    def __init__(self, server: JobServer, words: Sequence[str], directory: Path | None) -> None:
        from ray.job_submission import JobSubmissionClient

        for module in ("job.sdk", "dashboard_sdk"):  # they report uploads and closed connections
            logging.getLogger(f"ray.dashboard.modules.{module}").setLevel(logging.WARNING)
        self._server, self._printed = server, 0
        environment: dict[str, object] = {"env_vars": STOP_WAIT}
        if directory is not None:
            environment["working_dir"] = str(directory)
        try:
            self._client = JobSubmissionClient(server.address, headers=_token_header())
            self.id: str = self._client.submit_job(
                entrypoint=shlex.join(words), runtime_env=environment
            )
        except (*_NETWORK_ERRORS, ValueError) as error:
            raise ClusterError(f"{server.address} does not take the job: {error}") from None

    def follow(self, write: Callable[[str], object]) -> int:
        """Pass on the log until the job ends; returns its exit code, 130 if it was stopped.

        Raises:
            KeyboardInterrupt: Ctrl+C; the job keeps running, and a later call continues the log.
            ClusterError: the connection was lost for RECONNECT_FOR_S, or a stranger took the port.
        """
        lost_since: float | None = None
        while True:
            printed = self._printed
            try:
                check_owner(self._server.address)
                asyncio.run(self._tail(write))
                info = self._client.get_job_info(self.id)
                if str(info.status) in _ENDED:
                    return {"SUCCEEDED": 0, "STOPPED": 130}.get(
                        str(info.status), info.driver_exit_code or 1
                    )
                lost_since = None
            except _NETWORK_ERRORS as error:
                if lost_since is None or self._printed > printed:
                    lost_since = time.monotonic()
                if time.monotonic() - lost_since > RECONNECT_FOR_S:
                    raise ClusterError(
                        f"lost {self._server.address} ({error}); job {self.id} may still run: "
                        f"{self.log_command}"
                    ) from None
            time.sleep(_RECONNECT_EVERY_S)

    async def _tail(self, write: Callable[[str], object]) -> None:
        seen = 0
        async for text in self._client.tail_job_logs(self.id):
            seen += len(text)  # each connection sends the log from its start
            if seen > self._printed:
                write(text[-(seen - self._printed) :])
                self._printed = seen

    def stop(self) -> None:
        """Ask the job to save and stop.

        Raises:
            ClusterError: the head does not answer.
        """
        try:
            check_owner(self._server.address)
            self._client.stop_job(self.id)
        except _NETWORK_ERRORS as error:
            raise ClusterError(f"{self._server.address} does not answer ({error})") from None

    @property
    def log_command(self) -> str:
        return self._command("logs", "--follow")

    @property
    def stop_command(self) -> str:
        return self._command("stop")

    def _command(self, *words: str) -> str:
        return f"RAY_AUTH_MODE=token ray job {shlex.join(words)} --address {self._server.address} {self.id}"


def follow_until_end(job: SubmittedJob, log: Log) -> int:
    """Follow a job; Ctrl+C asks whether to detach or to stop it. Returns an exit code."""
    stopping = False
    while True:
        try:
            return job.follow(_write)
        except KeyboardInterrupt:
            answer = "d" if stopping else _ask()
            if answer == "s":
                try:
                    job.stop()
                except ClusterError as error:
                    log(f"not stopped: {error}")
                    continue
                log(f"stopping {job.id}: it saves a checkpoint first; Ctrl+C detaches")
                stopping = True
            elif answer == "d":
                log(f"detached; {job.id} keeps running")
                log(f"log:  {job.log_command}")
                log(f"stop: {job.stop_command}")
                return 0


def _ask() -> str:
    """Return the meaning of Ctrl+C: `d`, `s`, or other text to continue. Without a terminal, `d`."""
    if not sys.stdin.isatty():
        return "d"
    try:
        return input("\n[d]etach, [s]top and save, or Enter to continue: ").strip().lower()[:1]
    except (KeyboardInterrupt, EOFError):
        return "d"


def _write(text: str) -> None:
    print(text, end="", flush=True)
