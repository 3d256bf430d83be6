"""Metrics on Ray's endpoint, scraped by a real Prometheus that answers the queries of the dashboard."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from raytrain_gpt.cluster import private_cluster
from raytrain_gpt.columns import COLUMNS
from raytrain_gpt.config.kinds import Settings
from raytrain_gpt.config.schema import Config
from raytrain_gpt.runs import ray_metrics
from raytrain_gpt.runs.ray_metrics import RayMetrics
from raytrain_gpt.trackers import configured
from raytrain_gpt.trackers.configured import open_trackers
from raytrain_gpt.trackers.tracked_run import TrackedRun
from tests.conftest import CLUSTER_ENVIRONMENT, ForksWorkers
from tests.faults import gates
from tests.faults.conftest import ROOT, Command
from tests.faults.gates import Faults, Gate, wait_until
from tests.faults.test_leaving import Head
from tests.made_runs import MakeConfig, evaluations, steps
from tests.ports import free_port

PANELS = json.loads((ROOT / "clusters/grafana/raytrain-gpt.json").read_text())["panels"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
Query = Callable[[str], list[dict[str, Any]]]


def tracked(directory: Path, lines: list[str] | None = None, **fields: object) -> TrackedRun:
    values = {"tensorboard": False, "mlflow_uri": None, "run_name": "book", **fields}
    log = pytest.fail if lines is None else lines.append
    return TrackedRun(directory, Config().updated(values), 0, {"sweep": "lr"}, log=log)


def test_they_are_on_where_ray_exports_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(ray_metrics: bool = True) -> list[str]:
        return [queue.name for queue in open_trackers(tracked(tmp_path, ray_metrics=ray_metrics))]

    monkeypatch.delenv(configured._SWITCH, raising=False)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    assert opened() == []
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    assert opened() == ["ray_metrics"]
    assert opened(False) == []
    monkeypatch.setenv(configured._SWITCH, private_cluster._ENVIRONMENT[configured._SWITCH])
    assert opened() == []


def test_a_run_without_ray_that_asks_for_them_is_told(tmp_path: Path) -> None:
    lines: list[str] = []
    (queue,) = open_trackers(tracked(tmp_path, lines, trackers="ray_metrics"))
    queue.close("finished")
    assert lines == [
        "ray_metrics is off: only a Ray cluster that the command joins exports metrics"
    ]


def test_the_newest_values_are_gauges_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[tuple[str, str], float] = {}

    class Gauge:
        def __init__(self, name: str, description: str, tag_keys: tuple[str]) -> None:
            self.name = name

        def set(self, value: float, tags: dict[str, str]) -> None:
            seen[self.name, tags["run"]] = value

    monkeypatch.setattr(ray_metrics, "Gauge", Gauge)
    tracker = RayMetrics(tracked(tmp_path, []), Settings())
    tracker.rows([
        {"step": 1, "train/loss": 5.5, "perf/mfu": None, "data/order_hash": "ab"},
        {"step": 2, "train/loss": 5.0},
        {"step": 2, "val/loss": 4.5, "val/loss/books": 4.0, "my eval/f-score": 0.5},
        {"step": 1, "event": "checkpoint", "time": 1.0, "perf/checkpoint_write_s": 2.0},
    ])  # fmt: skip
    tracker.finish("finished", [])
    values = {"step": 2, "train_loss": 5.0, "val_loss": 4.5, "my_eval_f_score": 0.5}
    values |= {"perf_checkpoint_write_s": 2.0, "goodput": 0.0, "restarts": 0}
    assert seen == {(f"raytrain_gpt_{name}", "lr/book"): v for name, v in values.items()}


def test_the_dashboard_asks_for_metrics_of_rows() -> None:
    names = {key.replace("/", "_") for key in COLUMNS} | {"step", "goodput", "restarts"}
    asked = {re.findall(r"ray_raytrain_gpt_(\w+)", query)[0] for query in QUERIES}
    assert asked <= names
    rows = (ROOT / "docs/how-to.md").read_text().split("| `ray_raytrain_gpt_…`")[1].split("\n\n")[0]
    assert asked == {*re.findall(r"`(\w+)`", rows)}


@contextmanager
def prometheus(targets: Path, directory: Path) -> Iterator[Query]:
    """Start a Prometheus that scrapes what Ray lists, and yield a function that returns a query's series."""
    scraped = {"job_name": "ray", "file_sd_configs": [{"files": [str(targets)]}]}
    file, address = directory / "prometheus.yml", f"127.0.0.1:{free_port()}"
    file.write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": [scraped]}))
    argv = [f"--config.file={file}", f"--web.listen-address={address}"]
    argv += [f"--storage.tsdb.path={directory / 'series'}"]

    def query(expression: str) -> list[dict[str, Any]]:
        parameters = urlencode({"query": expression})
        with urlopen(f"http://{address}/api/v1/query?{parameters}") as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
            return found

    log = directory / "prometheus.log"
    server = Command(["prometheus", *argv], {}, log)
    try:
        server.prints("Server is ready")
        yield query
    finally:
        server.kill()


@pytest.mark.long
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no Prometheus: install prometheus")
def test_prometheus_answers_every_query_of_the_dashboard_while_a_run_trains(
    forks_workers: ForksWorkers,
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a cluster of its own, since the shared one collects no metrics, as a command's own."""
    for name in CLUSTER_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_metrics_report_interval_ms", "1000")
    config = make_config(run_name="watched", num_workers=2)
    place = Gate(str(tmp_path), rank=0, step=27)
    argv = gates.command(config, Faults((place,)), tmp_path / "run.json")
    with forks_workers():
        head = Head(3, tmp_path / "head.log")
    targets = Path(head.directory, "prom_metrics_service_discovery.json")
    with closing(head), prometheus(targets, tmp_path) as query:
        run = Command(argv, head.env, tmp_path / "run.log")
        try:
            run.reaches(place)
            wait_until(lambda: query("ray_raytrain_gpt_val_loss"), "an evaluation in Prometheus")
            answers = {text: query(text.replace("$run", ".*")) for text in QUERIES}
            place.open()
            assert run.ends() == 0, run.output
        finally:
            if run.process.poll() is None:
                run.kill()
        run_dir = Path(config.run.storage_path, "watched")
        values = {
            "step": 25,
            "train_loss": steps(run_dir)[24]["train/loss"],
            "val_loss": evaluations(run_dir)[0]["val/loss"],
            "restarts": 0,
        }
        found = {text: float(series[0]["value"][1]) for text, series in answers.items() if series}
        assert {text for text in QUERIES if text not in found} == {
            text for text in QUERIES if "perf_mfu" in text
        }, "a CPU's peak is unknown"
        for name, value in values.items():
            (text,) = {text for text in QUERIES if f"raytrain_gpt_{name}{{" in text}
            assert answers[text][0]["metric"] == {"run": "watched"}
            assert found[text] == pytest.approx(value)
        wait_until(lambda: not query("ray_raytrain_gpt_step"), "the series of the run to end")
