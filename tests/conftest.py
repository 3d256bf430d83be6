"""Shared fixtures and helpers: data, one Ray cluster, a few finished runs, and checks of error lines."""

from __future__ import annotations

import gc
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import ray
import torch
from hypothesis import settings
from ray._private import ray_constants

from raytrain_gpt import cli
from raytrain_gpt.config.code import Code
from raytrain_gpt.config.kinds import Registry
from raytrain_gpt.config.schema import Config, parse_config
from raytrain_gpt.data.tokenizer import Tiktoken, load_tokenizer
from raytrain_gpt.runs.summary import RunSummary
from raytrain_gpt.storage.location import Location
from tests import forked_worker
from tests.data.shard_tools import prepare_here
from tests.made_runs import CLUSTER_CPUS, SMALL, MakeConfig, Straight
from tests.s3 import KEYS, S3Server

settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.register_profile("long", max_examples=3000, deadline=None, database=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

CLUSTER_ENVIRONMENT = {
    # As in the clusters that the package starts: these statistics are not used.
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_event_stats": "0",
    "RAY_io_context_monitor_probe_interval_ms": "10000",
    "REPORTER_UPDATE_INTERVAL_MS": "3600000",
    # Each poll takes one report, so a run of 1 s with ten checkpoints ends with ten polls.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
}

ForksWorkers = Callable[[], AbstractContextManager[None]]


@contextmanager
def raises_line(kind: type[Exception], *words: str) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect, as `pytest.raises` does, an error whose one-line message contains the given words."""
    with pytest.raises(kind) as caught:
        yield caught
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


class RunCli:
    """Runner of commands in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *argv: object) -> tuple[int, str, str]:
        """Return the exit code, stdout and stderr."""
        with pytest.raises(SystemExit) as exit_info:
            cli.main([str(argument) for argument in argv])
        captured = self._capsys.readouterr()
        return int(exit_info.value.code or 0), captured.out, captured.err

    def succeeds(self, *argv: object) -> str:
        """Return stdout; stderr must be empty."""
        code, shown, errors = self(*argv)
        assert (code, errors) == (0, "")
        return shown

    def refuses(self, *argv: object) -> str:
        """Return the one line on stderr that explains an exit code of 2."""
        code, _, errors = self(*argv)
        assert (code, errors.count("\n")) == (2, 1), errors
        return errors


@pytest.fixture(scope="session", autouse=True)
def test_data() -> Iterator[Path | None]:
    """Return the directory named by RAYTRAIN_GPT_TEST_DATA, or None if it is unset.

    The directory contains text/*.txt, scaling/, hellaswag_val_1000.jsonl, and tiktoken/, a filled
    TIKTOKEN_CACHE_DIR.
    """
    named = os.environ.get("RAYTRAIN_GPT_TEST_DATA")
    if not named:
        yield None
        return
    directory = Path(named).absolute()
    assert (directory / "text").is_dir(), f"RAYTRAIN_GPT_TEST_DATA={named} has no folder text"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(directory / "tiktoken"))
        yield directory


@pytest.fixture(scope="session")
def gpt2(test_data: Path | None) -> Tiktoken:
    """Load the gpt2 tokenizer from the test data, without a download."""
    if test_data is None:
        pytest.skip("the gpt2 vocabulary needs RAYTRAIN_GPT_TEST_DATA")
    return load_tokenizer("gpt2")


@pytest.fixture(params=["bytes", "gpt2"])
def tokenizer(request: pytest.FixtureRequest) -> str:
    """Return the name of each tokenizer in turn."""
    if request.param == "gpt2":
        request.getfixturevalue("gpt2")
    return str(request.param)


@pytest.fixture(scope="session", autouse=True)
def made_keys() -> Iterator[None]:
    """Set only the test object store's AWS_* variables, before a cluster inherits them."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in KEYS.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def s3(made_keys: None) -> Iterator[S3Server]:
    """Start an S3 server and set AWS_ENDPOINT_URL to its address."""
    server = S3Server()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        yield server
    server.close()


@pytest.fixture(scope="session")
def forks_workers() -> Iterator[ForksWorkers]:
    """Return a context manager in which Ray nodes started by this process fork their workers."""

    @contextmanager
    def forks() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as start:
            start.setenv(forked_worker.ADDRESS, address)
            start.setattr(ray_constants, "SETUP_WORKER_FILENAME", forked_worker.__file__)
            yield

    with tempfile.TemporaryDirectory(prefix="fork-") as directory:
        address = str(Path(directory, "server"))
        with subprocess.Popen(
            [sys.executable, forked_worker.__file__, "serve", address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as server:
            assert server.stdin is not None
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            yield forks
            server.stdin.close()


@pytest.fixture(scope="session")
def cluster(s3: S3Server, forks_workers: ForksWorkers) -> Iterator[str]:
    """Return the address of a cluster for this process and for commands started by tests.

    Its processes inherit the object store's variables, which must be set before it starts.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CLUSTER_ENVIRONMENT.items():
            patch.setenv(name, value)
        with forks_workers():
            context = ray.init(
                "local", num_cpus=CLUSTER_CPUS, include_dashboard=False, log_to_driver=False
            )
        ray._private.worker._global_node.kill_log_monitor(check_alive=False)  # as the package does
        yield context.address_info["gcs_address"]
        ray.shutdown()


@pytest.fixture(scope="session", autouse=True)
def imports_are_no_garbage() -> None:
    """Freeze the objects of Ray, torch and transformers, so that `gc.collect()` in tests skips them."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup() -> None:
    """Use one thread: tiny tensors are fastest, and their sums are the same on every machine.

    Runs before each test and its fixtures, since training and generation here set a thread count.
    """
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory, test_data: Path | None) -> Path:
    """Prepare tinyshakespeare as bytes, or Python's standard library if there is no test data."""
    source = str(test_data / "text" / "tinyshakespeare.txt") if test_data else "stdlib"
    out = tmp_path_factory.mktemp("data") / "dataset"
    prepare_here([source], out, "bytes", val_fraction=0.05)
    return out


@pytest.fixture(scope="session")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the session's runs."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def bucket(s3: S3Server) -> Location:
    """Create a bucket for the session's runs."""
    s3.make_bucket("runs")
    return Location.of("s3://runs", retry_for_s=30)


@pytest.fixture
def remote_dir(bucket: Location, request: pytest.FixtureRequest) -> Location:
    """Return an empty run directory in an object store, different for each test."""
    name = hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:12]
    return bucket / name


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.slow)])
def run_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    """Return a run directory that does not exist yet, on disk and in an object store."""
    if request.param == "local":
        return Location.of(tmp_path / "run")
    found: Location = request.getfixturevalue("remote_dir")
    return found


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Return a function that mounts a small file system, such as small_disk("64k").

    Without root, or if tmpfs cannot be mounted, the test is skipped.
    """
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    path = tmp_path / "disk"

    def mount(size: str) -> Path:
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
        if subprocess.run(command, check=False).returncode:
            pytest.skip("this machine mounts no tmpfs")
        return path

    yield mount
    if path.is_mount():
        # Failed tasks may hold a file open for a moment.
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.fixture(scope="session")
def make_config(dataset: Path, storage: Path) -> MakeConfig:
    """Return a function that makes a small run's configuration with some fields changed, or with code."""

    def make(code: Code | None = None, **changes: object) -> Config:
        values = {**SMALL, "data_path": str(dataset), "storage_path": str(storage), **changes}
        values.setdefault("mlflow_uri", None)
        return parse_config({}, "defaults", Registry(code)).updated(values)

    return make


@pytest.fixture(scope="session")
def straight(request: pytest.FixtureRequest, make_config: MakeConfig) -> Straight:
    """Return a function that makes an uninterrupted run of 50 steps on a number of workers.

    0 workers: in this process. Each run is made once.
    """
    from raytrain_gpt.train.launch import train  # here: it takes 1 s, which most test folders save

    made: dict[int, RunSummary] = {}

    def run(num_workers: int) -> RunSummary:
        if num_workers not in made:
            if num_workers:
                request.getfixturevalue("cluster")
            config = make_config(num_workers=num_workers, run_name=f"straight-{num_workers}")
            made[num_workers] = train(config, print)
        return made[num_workers]

    return run


@pytest.fixture
def run_cli(capsys: pytest.CaptureFixture[str]) -> RunCli:
    return RunCli(capsys)
