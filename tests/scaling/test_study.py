"""A complete study on a real cluster: rates, a failure, cooldowns that equal straight runs, a validation."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.config.load import load_config_file
from raytrain_gpt.errors import ConfigError, TrainingFailed
from raytrain_gpt.events import Events
from raytrain_gpt.scaling.law_file import LawFile, read_result
from raytrain_gpt.scaling.study import run_study
from raytrain_gpt.scaling.study_file import Study
from raytrain_gpt.storage.location import Location
from raytrain_gpt.sweep.history import History
from raytrain_gpt.train.rank import train_rank
from raytrain_gpt.train.worker_group import RankJob
from tests.conftest import RunCli, raises_line

from .conftest import write_tiny_study

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.usefixtures("cluster")]


def fails_once(spec: RankJob) -> Events:
    """Train, but fail at the first start of one trunk; runs in a worker."""
    marker = spec.run_dir.path / "failed"
    if spec.run_dir.name == "size-3-40" and not marker.exists():
        marker.touch()
        raise RuntimeError("this trunk breaks")
    yield from train_rank(spec)


def weights(run: Location) -> str:
    """Return the hash of a run's last weights."""
    with Catalog(run).complete()[-1].files() as files:
        return hashlib.sha256((files / "model.safetensors").read_bytes()).hexdigest()


def test_a_study_survives_a_failure_and_forecasts_a_larger_run(
    dataset: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    file = write_tiny_study(dataset, tmp_path / "runs", tmp_path / "tiny.yaml")
    study = Study.load(file, {"max_failures": "0"})
    lines: list[str] = []
    with pytest.raises(
        TrainingFailed, match=r"size-3-40 of study tiny failed: .*this trunk breaks"
    ):
        run_study(study, resume=False, validate=False, log=lines.append, train_loop=fails_once)
    with raises_line(ConfigError, "study tiny already exists", "--resume", "--study_name"):
        run_study(study, resume=False, validate=False, log=lines.append)
    files = run_study(study, resume=True, validate=True, log=lines.append)

    directory = tmp_path / "runs" / "tiny"
    assert [file.name for file in files] == ["law.json", "scale.html", "best.yaml"]
    assert sorted(path.name for path in directory.iterdir() if path.suffix == ".json") == [
        "facts.json", "forecast.json", "law.json", "validation.json",
    ]  # fmt: skip
    law = read_result(LawFile, files[0])
    assert len(law.fitted) == 20
    assert all(a.loss is not None for a in law.runs)
    largest, smallest = law.runs[9].loss, law.runs[13].loss
    assert (law.runs[9].name, law.runs[13].name) == ("size-5-40", "size-1-40")
    assert largest is not None
    assert smallest is not None
    assert largest < smallest
    assert load_config_file(directory / "best.yaml").model.num_layers >= 1

    # Nothing that had ended was trained again, and the cooldowns waited for their trunks.
    events = History(files[0].parent, file="runs.jsonl").events
    reports = [event["trial"] for event in events if event["event"] == "report"]
    assert len(reports) == len(set(reports)) == 30
    for size in range(1, 6):
        assert reports.index(f"size-{size}-40") < reports.index(f"size-{size}-5")

    # A cooldown equals the straight run of its length.
    cooldown = directory / "runs" / "size-2-10"
    straight = load_config_file(cooldown / "config.yaml")
    straight = straight.updated({"run_name": "straight", "branch_from": None})
    again = tmp_path / "straight.yaml"
    again.write_text(straight.to_yaml())
    assert run_cli("train", "--config", again)[0] == 0
    assert weights(Location.of(cooldown.parent / "straight")) == weights(Location.of(cooldown))

    forecast = json.loads((directory / "forecast.json").read_text())
    verdict = json.loads((directory / "validation.json").read_text())
    assert verdict["inside"] == (
        abs(verdict["seen"] - verdict["predicted"]) <= verdict["half_width"]
    )
    assert verdict["times"] == forecast["times"] > 2
    page = (directory / "scale.html").read_text()
    assert "Validation" in page
    assert f"{verdict['seen']:.3f}" in page

    # A second look trains nothing and changes nothing; another peak rate is another study.
    before = files[0].read_bytes()
    run_study(study, resume=True, validate=True, log=lines.append)
    assert files[0].read_bytes() == before
    other = Study.model_validate({**study.model_dump(), "peak_lrs": [1e-3, 2e-2, 0.1, 0.4]})
    with raises_line(ConfigError, "started with other values", "restore peak_lrs"):
        run_study(other, resume=True, validate=False, log=lines.append)
    changed = Study.model_validate({**study.model_dump(), "tokens_per_parameter": [5, 10, 20, 80]})
    with raises_line(ConfigError, "cannot continue with changed tokens_per_parameter"):
        run_study(changed, resume=True, validate=False, log=lines.append)
