"""Small sweeps, some with the dataset that all tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from raytrain_gpt.config.code import Code
from raytrain_gpt.config.kinds import Registry
from raytrain_gpt.sweep.spec import Sweep
from tests.made_runs import SMALL

BATCH_TOKENS = int(str(SMALL["global_batch_tokens"]))

WriteSweep = Callable[..., Path]


def sweep_of(space: dict[str, Any], code: Code | None = None, **changes: Any) -> Sweep:
    """Make a small sweep over a search space."""
    fields = {
        "sweep_name": "small",
        "base": {"preset": "quickstart"},
        "overrides": {"num_workers": 1, "min_workers": None},
        "space": space,
        "budget_tokens": 81_920,
        "report_every_tokens": 4096,
    }
    return Sweep.model_validate({**fields, **changes}, context=Registry(code))


@pytest.fixture
def write_sweep(dataset: Path, tmp_path: Path) -> WriteSweep:
    """Return a function that writes a sweep file of short runs; budgets are in steps of `BATCH_TOKENS`."""

    def write(name: str, space: dict[str, Any], *, steps: int, report: int, **more: Any) -> Path:
        overrides = {k: v for k, v in SMALL.items() if k not in (*Sweep.set_by_file, *space)}
        overrides |= {"data_path": str(dataset), "storage_path": str(tmp_path / "runs")}
        overrides |= {"warmup_steps": 0, "num_samples": 0, "mlflow_uri": None, "max_failures": 0}
        overrides["num_workers"] = 1
        content = {
            "base": {"preset": "quickstart"},
            "overrides": {**overrides, **more.pop("overrides", {})},
            "space": space,
            "budget_tokens": steps * BATCH_TOKENS,
            "report_every_tokens": report * BATCH_TOKENS,
            **more,
        }
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(content))
        return file

    return write


@pytest.fixture
def make_sweep(write_sweep: WriteSweep) -> Callable[..., Sweep]:
    """Return a function that writes such a file and loads its sweep."""

    def make(name: str, space: dict[str, Any], **more: Any) -> Sweep:
        return Sweep.load(write_sweep(name, space, **more), {})

    return make
