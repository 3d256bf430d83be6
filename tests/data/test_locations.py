"""Locations from the configuration: endpoints, and configuration files in an object store."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_gpt.config.load import start_of
from raytrain_gpt.config.schema import Config
from raytrain_gpt.data.locations import file_on_disk, find_in, location
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.runs.summary import next_line
from raytrain_gpt.storage.location import Location
from tests.conftest import raises_line

ENDPOINT = "http://store:9000"


def test_the_endpoint_of_a_run_is_for_s3_alone() -> None:
    config = Config().updated({"s3_endpoint": ENDPOINT})
    assert location(config, "s3://b/runs").endpoint == ENDPOINT
    assert location(config, "gs://b/data").endpoint is None
    assert find_in(config, "s3://b/runs/x").endpoint == ENDPOINT


def test_the_next_command_names_an_endpoint_that_only_the_configuration_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    run_dir = Location.of("s3://b/runs/x", endpoint=ENDPOINT)
    assert next_line(run_dir, "eval x") == f"next: AWS_ENDPOINT_URL={ENDPOINT} eval x"
    monkeypatch.setenv("AWS_ENDPOINT_URL", ENDPOINT)
    assert next_line(run_dir, "eval x") == "next: eval x"
    assert next_line(Location.of("runs/x"), "eval x") == "next: eval x"


def test_a_configuration_is_read_from_a_store(bucket: Location) -> None:
    (bucket / "sweep" / "best.yaml").write_text("optim: {peak_lr: 0.5}\n")
    with file_on_disk(f"{bucket}/sweep/best.yaml") as file:
        _, config = start_of(None, file, {})
    assert (config.run.run_name, config.optim.peak_lr) == ("best", 0.5)
    missing = f"{bucket}/sweep/none.yaml"
    with raises_line(ConfigError, missing, "no such file"), file_on_disk(missing):
        pass


def test_a_local_configuration_is_read_where_it_is(tmp_path: Path) -> None:
    with file_on_disk(tmp_path / "a.yaml") as file:
        assert file == tmp_path / "a.yaml"
