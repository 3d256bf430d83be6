"""Metrics on Ray's endpoint, scraped by a real Prometheus that answers the queries of the dashboard."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from unittest.mock import Mock, call
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from raytrain_gpt.cluster import private_cluster
from raytrain_gpt.config.kinds import Settings
from raytrain_gpt.config.schema import Config
from raytrain_gpt.runs import ray_metrics
from raytrain_gpt.runs.ray_metrics import RayMetrics
from raytrain_gpt.trackers import configured
from raytrain_gpt.trackers.configured import TrackerQueue, open_trackers
from raytrain_gpt.trackers.tracked_run import TrackedRun
from tests.conftest import CLUSTER_ENVIRONMENT, ForksWorkers
from tests.faults.conftest import ROOT, Command, MakeGate, Start
from tests.faults.gates import Faults, wait_until
from tests.faults.test_leaving import Head
from tests.made_runs import MakeConfig, evaluations, steps
from tests.ports import free_port

PANELS = json.loads((ROOT / "clusters/grafana/raytrain-gpt.json").read_text())["panels"]
TEXTS = [target["expr"] for panel in PANELS for target in panel["targets"]]
QUERIES = {re.findall(r"ray_raytrain_gpt_(\w+)", text)[0]: text for text in TEXTS}
LINES: list[str] = []


def tracked(directory: Path, **fields: object) -> TrackedRun:
    values = {"tensorboard": False, "mlflow_uri": None, "run_name": "book", **fields}
    return TrackedRun(directory, Config().updated(values), 0, {"sweep": "lr"}, log=LINES.append)


def test_they_are_on_where_ray_exports_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(**fields: object) -> list[TrackerQueue]:
        return open_trackers(tracked(tmp_path, **fields))

    monkeypatch.delenv(configured._SWITCH, raising=False)
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    assert [queue.name for queue in opened()] == ["ray_metrics"]
    assert opened(ray_metrics=False) == []
    monkeypatch.setenv(configured._SWITCH, private_cluster._ENVIRONMENT[configured._SWITCH])
    assert opened() == []
    opened(trackers="ray_metrics")[0].close("finished")
    assert LINES[0].startswith("ray_metrics is off: only a Ray cluster that the command joins")


def test_the_newest_values_are_gauges_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gauges: dict[str, Mock] = {}
    gauge = Mock(side_effect=lambda name, *_, **__: gauges.setdefault(name, Mock()))
    monkeypatch.setattr(ray_metrics, "Gauge", gauge)
    tracker = RayMetrics(tracked(tmp_path), Settings())
    tracker.rows([
        {"step": 1, "train/loss": 5.5, "perf/mfu": None, "data/order_hash": "ab"},
        {"step": 2, "train/loss": 5.0},
        {"step": 2, "val/loss": 4.5, "val/loss/books": 4.0, "my eval/f-score": 0.5},
        {"step": 1, "event": "checkpoint", "time": 1.0, "perf/checkpoint_write_s": 2.0},
    ])  # fmt: skip
    tracker.finish("finished", [])
    tracker.rows([{"step": 3, "train/loss": None, "perf/mfu": None}])
    tracker._set()
    assert math.isnan(gauges["raytrain_gpt_train_loss"].set.call_args.args[0])
    tracker.rows([{"step": 2, "train/loss": 5.0}])  # after a rollback
    tracker._set()
    values = {"step": 2, "train_loss": 5.0, "val_loss": 4.5, "my_eval_f_score": 0.5}
    values |= {"perf_checkpoint_write_s": 2.0, "goodput": 0.0, "restarts": 0}
    assert {name: gauge.set.call_args for name, gauge in gauges.items()} == {
        f"raytrain_gpt_{name}": call(value, {"run": "lr/book"}) for name, value in values.items()
    }


def test_the_dashboard_asks_for_the_metrics_of_the_page() -> None:
    page = (ROOT / "docs" / "how-to.md").read_text()
    table = page.split("`ray_raytrain_gpt_…`")[1].split("\n\n")[0]
    assert {*re.findall(r"`(\w+)`", table)} == QUERIES.keys()


@contextmanager
def prometheus(targets: Path, directory: Path) -> Iterator[Callable[[str], dict[str, float]]]:
    """Start a Prometheus that scrapes what Ray lists; yield a function from a query to run -> value."""
    scraped = {"job_name": "ray", "file_sd_configs": [{"files": [str(targets)]}]}
    file, address = directory / "prometheus.yml", f"127.0.0.1:{free_port()}"
    file.write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": [scraped]}))
    argv = ["prometheus", f"--config.file={file}", f"--web.listen-address={address}"]
    argv += [f"--storage.tsdb.path={directory / 'series'}"]
    server = Command(argv, {}, directory / "prometheus.log")

    def query(text: str) -> dict[str, float]:
        with urlopen(f"http://{address}/api/v1/query?{urlencode({'query': text})}") as answer:
            found = json.load(answer)["data"]["result"]
        return {series["metric"]["run"]: float(series["value"][1]) for series in found}

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
    gate: MakeGate,
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a cluster of its own, since the shared one collects no metrics, as a command's own."""
    for name in CLUSTER_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_metrics_report_interval_ms", "1000")
    with forks_workers():
        head = Head(3, tmp_path / "head.log")
    targets = Path(head.directory, "prom_metrics_service_discovery.json")
    with closing(head), prometheus(targets, tmp_path) as query:
        place, config = gate(0, 27), make_config(run_name="watched", num_workers=2)
        run = start(config, Faults((place,)), head.env)
        run.reaches(place)
        wait_until(lambda: query("ray_raytrain_gpt_val_loss"), "an evaluation in Prometheus")
        wait_until(lambda: query("ray_raytrain_gpt_goodput"), "goodput, which is computed apart")
        answers = {name: query(text.replace("$run", ".*")) for name, text in QUERIES.items()}
        place.open()
        assert run.ends() == 0, run.output
        wait_until(lambda: not query("ray_raytrain_gpt_step"), "the series of the run to end")
    assert answers.pop("perf_mfu") == {}, "a CPU's peak is unknown"
    assert {tuple(series) for series in answers.values()} == {("watched",)}
    run_dir = Path(config.run.storage_path, "watched")
    values = {"step": 25, "restarts": 0, "train_loss": steps(run_dir)[24]["train/loss"]}
    values["val_loss"] = evaluations(run_dir)[0]["val/loss"]
    assert {name: answers[name]["watched"] for name in values} == pytest.approx(values)
