"""One Ray cluster and a few finished runs, shared by all tests of the session."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

from raytrain_gpt import cli
from raytrain_gpt.config import Config, load_preset
from raytrain_gpt.data.storage import Location
from raytrain_gpt.data.tokenize import prepare_here
from raytrain_gpt.runtime.launch import train
from raytrain_gpt.runtime.supervisor import RunSummary
from tests.s3 import S3Server

CLUSTER_CPUS = 6

SMALL = {
    "num_layers": 2,
    "num_heads": 2,
    "embd_size": 32,
    "seq_len": 32,
    "global_batch_tokens": 12 * 32,
    "micro_batch_sequences": 2,
    "max_steps": 50,
    "warmup_steps": 5,
    "peak_lr": 1e-3,
    "min_lr": 1e-4,
    "log_every_steps": 5,
    "checkpoint_every_steps": 10,
    "eval_every_steps": 25,
    "eval_tokens": 4096,
    "num_samples": 1,
    "max_new_tokens": 8,
    "cpus_per_worker": 1,
    "num_workers": 1,
    "min_workers": None,
}
"""A run of seconds: 12 sequences a step, which 1, 2, 3, 4 and 6 workers share."""


@pytest.fixture(scope="session")
def cluster(s3: S3Server) -> Iterator[str]:
    """Address of a cluster that the tests' own process and commands started by them use.

    Its processes have the variables for the object store, which must be set before it starts.
    """
    context = ray.init("local", num_cpus=CLUSTER_CPUS, include_dashboard=False, log_to_driver=False)
    yield context.address_info["gcs_address"]
    ray.shutdown()


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory, test_data: Path | None) -> Path:
    """Real text where there is some, else Python's own sources, as bytes."""
    source = str(test_data / "text" / "tinyshakespeare.txt") if test_data else "stdlib"
    out = tmp_path_factory.mktemp("data") / "dataset"
    prepare_here([source], out, "bytes", val_fraction=0.05)
    return out


@pytest.fixture(scope="session")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the session's runs."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def bucket(s3: S3Server) -> Location:
    """A bucket for the runs of the session."""
    s3.make_bucket("runs")
    return Location.of("s3://runs", retry_for_s=30)


@pytest.fixture
def remote_dir(bucket: Location, request: pytest.FixtureRequest) -> Location:
    """A run's directory of the test's own in an object store, empty."""
    name = hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:12]
    return bucket / name


@pytest.fixture(params=["local", "s3"])
def run_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    """A run's directory that is not there yet, on a disk and in an object store."""
    if request.param == "local":
        return Location.of(tmp_path / "run")
    found: Location = request.getfixturevalue("remote_dir")
    return found


MakeConfig = Callable[..., Config]


@pytest.fixture(scope="session")
def make_config(dataset: Path, storage: Path) -> MakeConfig:
    """A small run's configuration with some leaves changed."""

    def make(**changes: object) -> Config:
        values = {**SMALL, "data_path": str(dataset), "storage_path": str(storage), **changes}
        values.setdefault("mlflow_uri", None)
        return load_preset("quickstart").updated(values)

    return make


@pytest.fixture(scope="session")
def straight(cluster: str, make_config: MakeConfig) -> Callable[[int], RunSummary]:
    """An unbroken run of 50 steps at some world size; each is made once."""
    made: dict[int, RunSummary] = {}

    def run(num_workers: int) -> RunSummary:
        if num_workers not in made:
            config = make_config(num_workers=num_workers, run_name=f"straight-{num_workers}")
            made[num_workers] = train(config, print)
        return made[num_workers]

    return run


@pytest.fixture
def run_cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command in this process: exit code, stdout, stderr."""

    def run(*argv: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_info:
            cli.main([str(argument) for argument in argv])
        captured = capsys.readouterr()
        return int(exit_info.value.code or 0), captured.out, captured.err

    return run


def flags(config: Config) -> list[str]:
    """The flags that give a configuration."""
    return [
        f"--{name}={'null' if value is None else str(value).lower() if isinstance(value, bool) else value}"
        for name, value in config.leaves().items()
    ]


def command(*argv: str) -> list[str]:
    """A command line of a process of its own."""
    return [sys.executable, "-m", "raytrain_gpt.cli", *argv]


def environment(cluster: str) -> dict[str, str]:
    """Environment of a process that uses the session's cluster."""
    return {**os.environ, "RAY_ADDRESS": cluster, "PYTHONUNBUFFERED": "1"}
