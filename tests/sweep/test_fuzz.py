"""Any file either loads as a sweep or fails with a one-line error. Long run: `CONTRIBUTING.md`."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings

from raytrain_gpt.config.schema import FIELDS
from raytrain_gpt.sweep.cost import one_worker_for_auto, trained_share
from raytrain_gpt.sweep.results import plan_table
from raytrain_gpt.sweep.spec import Asha, Base, Sweep, load_sweep
from raytrain_gpt.sweep.trial_plan import base_config, check_sweep, num_trials, planned_trials
from tests.damage import damaged, edited, refusing_with_one_line

from .test_spec import FILE

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TEXTS = [path.read_text("utf-8") for path in sorted(ROOT.glob("tune_configs/*.yaml"))]
TEXTS.append((ROOT / "docs" / "sweeps.md").read_text("utf-8").split("```")[1].removeprefix("yaml"))
KEYS = dict.fromkeys(Sweep.model_fields, ()) | {
    "base": Base.model_fields,
    "scheduler": Asha.model_fields,
    "overrides": FIELDS,
    "space": FIELDS,
}

fuzz = settings(max_examples=4 * settings.default.max_examples, deadline=5000)
"""An example that takes more than 5 s fails."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "sweep.yaml"


def check(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with refusing_with_one_line():
        sweep = load_sweep(file, {})
        configs = check_sweep(sweep, one_worker_for_auto(base_config(sweep)).cluster.num_workers)
        planned, num = planned_trials(sweep), num_trials(sweep)
        assert len(planned) == len(configs)
        assert 0 < trained_share(sweep, num) <= 1
        if planned:
            steps = [config.train.max_steps for config in configs]
            assert len(plan_table(planned, steps)) == num + 1


@fuzz
@given(damaged(TEXTS))
def test_a_damaged_file_is_a_sweep_or_one_line(file: Path, content: bytes) -> None:
    check(file, content)


@fuzz
@given(edited(FILE | {"budget_tokens": 2**22}, KEYS))
def test_any_value_is_a_sweep_or_one_line(file: Path, content: bytes) -> None:
    check(file, content)
