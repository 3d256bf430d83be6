"""Unreachable or full storage: an outage costs only time, and a full disk costs no checkpoint."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.cluster import all_nodes
from raytrain_gpt.cluster.all_nodes import NodeFacts, disk_problem
from raytrain_gpt.errors import ClusterError, StorageError, UserError
from raytrain_gpt.storage.location import Location
from raytrain_gpt.trackers.run_files import read_rows
from raytrain_gpt.train.launch import train
from tests.checkpoint.test_catalog import newest_step
from tests.conftest import raises_line
from tests.faults.conftest import MakeGate
from tests.made_runs import MakeConfig, Straight, assert_same, assert_same_order, steps, weights
from tests.s3 import S3Server

from .gates import Faults, gated
from .test_processes import in_background, train_while

pytestmark = pytest.mark.ray

OUTAGE_S = 20.0


@pytest.fixture(scope="module")
def bucket(s3: S3Server, dataset: Path) -> Location:
    """Make a bucket that contains the dataset."""
    s3.make_bucket("faults")
    made = Location.of("s3://faults", endpoint=s3.endpoint)
    for file in dataset.iterdir():
        (made / "data" / file.name).upload(file)
    return made


@pytest.fixture
def in_bucket(bucket: Location, make_config: MakeConfig) -> Callable[..., Any]:
    """Return a function that makes configurations with data and runs in the bucket."""

    def make(**changes: object) -> Any:
        places = {"data_path": f"{bucket}/data", "storage_path": f"{bucket}/runs"}
        return make_config(num_workers=2, s3_endpoint=bucket.endpoint, **places, **changes)

    return make


@pytest.mark.long
@pytest.mark.fault("object store stalled or refusing", "retried; clean exit after `retry_for_s`")
def test_an_outage_of_the_object_store_costs_nothing_but_time(
    cluster: str,
    s3: S3Server,
    bucket: Location,
    straight: Straight,
    in_bucket: Callable[..., Any],
    gate: MakeGate,
    tmp_path: Path,
) -> None:
    place = gate(0, 25)

    def outage() -> None:
        place.reached()
        s3.stop()
        place.open()
        time.sleep(OUTAGE_S)  # length of the outage, not a wait for an event
        s3.start()

    thread, raised = in_background(outage)
    lines: list[str] = []
    summary = train(in_bucket(run_name="outage"), lines.append, gated(Faults((place,))))
    thread.join()
    assert not raised
    assert summary.step == 50
    assert not [line for line in lines if "failed" in line]
    run = bucket / "runs" / "outage"
    assert weights(run) == weights(straight(2).run_dir)
    for checkpoint in Catalog(run).complete():
        checkpoint.verify()
    (run / "metrics.jsonl").download(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in steps(tmp_path)] == list(range(1, 51))
    stood_still = sum(row.get("perf/checkpoint_blocked_s", 0.0) for row in read_rows(tmp_path))
    assert stood_still > OUTAGE_S / 2, "the outage did not block the run"
    assert {"config.yaml", "log.txt", "report.html", "tensorboard"} <= set(run.names())


@pytest.mark.long
@pytest.mark.fault("object store stalled or refusing")
def test_an_object_store_that_is_gone_for_good_stops_the_run_with_its_newest_checkpoint(
    cluster: str,
    s3: S3Server,
    bucket: Location,
    straight: Straight,
    in_bucket: Callable[..., Any],
    gate: MakeGate,
    tmp_path: Path,
) -> None:
    place = gate(1, 25)

    def go_away() -> None:
        place.reached()
        s3.stop()
        place.open()

    config = in_bucket(run_name="gone", retry_for_s=5)
    thread, raised = in_background(go_away)
    try:
        with raises_line(StorageError, "storage unreachable"):
            train(config, print, gated(Faults((place,))))
    finally:
        thread.join()
        s3.start()
    assert not raised
    newest = newest_step(Catalog(bucket / "runs" / "gone"))
    assert newest in (10, 20)  # that of step 20 may have been in flight
    lines: list[str] = []
    train(config.updated({"num_workers": 0}), lines.append)
    assert any(line.startswith(f"resuming from step {newest}") for line in lines)
    (bucket / "runs" / "gone" / "metrics.jsonl").download(tmp_path / "metrics.jsonl")
    assert_same_order(tmp_path, straight(0))


@pytest.mark.fault("storage read-only", "refused before training")
def test_a_place_that_cannot_be_written_is_refused_before_training(
    cluster: str, make_config: MakeConfig, disk: Path
) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    config = make_config(num_workers=1, run_name="read-only", storage_path=str(disk))
    with raises_line(ClusterError, f"cannot write storage_path {disk}"):
        train(config, print)


@pytest.mark.fault("Ray's disk full", "refused before training")
def test_a_node_without_room_for_ray_is_refused(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = NodeFacts("192.0.2.1", disk=disk_problem(str(disk)))
    monkeypatch.setattr(all_nodes, "ask_nodes", lambda *_: [node])
    with raises_line(ClusterError, "Ray needs", "node 192.0.2.1", "--temp-dir"):
        all_nodes.check_storage(Location.of(tmp_path / "runs" / "x"), [])


@pytest.fixture
def disk(small_disk: Callable[[str], Path]) -> Path:
    """Mount a disk of 40 MB."""
    return small_disk("40m")


def fill(file: Path) -> None:
    """Fill a disk to the last byte."""
    with file.open("wb", buffering=0) as filler:
        while True:
            try:
                filler.write(bytes(4096))
            except OSError:
                break
    assert shutil.disk_usage(file.parent).free == 0


@pytest.mark.fault("disk full at a checkpoint", "older ones stay; resumes once there is space")
def test_a_disk_that_fills_up_costs_no_checkpoint_and_the_run_goes_on_after_room_was_made(
    cluster: str, straight: Straight, make_config: MakeConfig, gate: MakeGate, disk: Path
) -> None:
    place = gate(1, 25)

    def fill_up() -> None:
        place.reached()
        fill(disk / "filler")
        place.open()

    config = make_config(num_workers=2, run_name="full", storage_path=str(disk), keep_checkpoints=3)
    with raises_line(UserError, "no space left", "older checkpoints are intact", "make room"):
        train_while(config, Faults((place,)), fill_up)
    newest = newest_step(Catalog(Location.of(disk / "full")))
    assert newest in (10, 20)
    (disk / "filler").unlink()
    lines: list[str] = []
    train(config, lines.append)
    assert any(line.startswith(f"resuming from step {newest}") for line in lines)
    assert_same(disk / "full", straight(2))
    kept = json.dumps([c.state.step for c in Catalog(Location.of(disk / "full")).complete()])
    assert kept == "[30, 40, 50]"
