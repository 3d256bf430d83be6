"""Study files: designs that cannot determine a law are one line each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raytrain_gpt.errors import ConfigError
from raytrain_gpt.scaling.study_file import Study
from tests.conftest import RunCli, raises_line

from .conftest import make_study

FILE = (
    "base: {preset: quickstart}\ntarget: {compute: 4.0e+13}\npeak_lrs: [1.0e-3, 1.0e-2, 1.0e-1]\n"
)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sizes": [1e4, 2e4, 4e4, 8e4]}, ["sizes is 10000, ", "5 or more rising"]),
        ({"sizes": [1e4, 2e4, 3e4, 4e4, 5e4]}, ["sizes is", "a factor of 8"]),
        ({"sizes": [1e4, 2e4, 4e4, 3e4, 9e4]}, ["sizes is", "rising"]),
        ({"tokens_per_parameter": [5, 12, 20, 40]}, ["has 12;", "multiples of the first, 5"]),
        ({"peak_lrs": [1e-3, 2e-3]}, ["peak_lrs is 0.001, 0.002", "3 or more"]),
        ({"overrides": {"max_steps": 10}}, ["max_steps is set by the study: set tokens_per_param"]),
        ({"overrides": {"min_lr": 0.1}}, ["min_lr is set by the study: runs decay", "remove it"]),
    ],
)
def test_a_design_that_means_nothing_is_one_line(changes: dict[str, Any], words: list[str]) -> None:
    with raises_line(ConfigError, *words):
        make_study(**changes)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("target: {}", "compute is missing"),
        ("peak_lr: 1", "unknown key peak_lr; it belongs below overrides"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, run_cli: RunCli, more: str, words: str) -> None:
    file = tmp_path / "wrong.yaml"
    kept = [line for line in FILE.splitlines() if line.split(":")[0] != more.split(":")[0]]
    file.write_text("\n".join([*kept, more]))
    code, out, err = run_cli("scale", file, "--dry_run")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


def test_the_name_is_the_files_and_flags_become_overrides(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(FILE)
    study = Study.load(file, {"max_concurrent_runs": "2", "seq_len": "64"})
    assert (study.study_name, study.overrides) == ("mine", {"seq_len": 64})
    assert study.max_concurrent_runs == 2
