"""Made studies, whose losses follow a known law, and a study file of very short runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import yaml

from raytrain_gpt.scaling.law import Law
from raytrain_gpt.scaling.plan import RunResult, StudyPlan, study_base
from raytrain_gpt.scaling.rates import RateRule
from raytrain_gpt.scaling.study_file import Study

TRUTH = Law(E=0.9, A=60.0, B=300.0, alpha=0.4, beta=0.42, objective=0.0)
RULE = RateRule(0.5, -0.4)
NOISE = 0.004
VOCAB_SIZE = 257


def make_study(**changes: Any) -> Study:
    """Make the study of the quickstart, with changes."""
    fields: dict[str, Any] = {
        "study_name": "small-study",
        "base": {"preset": "quickstart"},
        "overrides": {"num_heads": 16, "global_batch_tokens": 1024, "num_workers": 1},
        "target": {"compute": 4e13},
        "sizes": [28e3, 50e3, 84e3, 140e3, 255e3],
        "peak_lrs": [2e-3, 1e-2, 5e-2],
    }
    fields["overrides"] |= {"min_workers": None, "cpus_per_worker": 1}
    fields["overrides"] |= changes.pop("overrides", {})
    return Study.model_validate({**fields, **changes})


def plan_of(study: Study) -> StudyPlan:
    return StudyPlan(study, study_base(study), VOCAB_SIZE)


def made_results(plan: StudyPlan, seed: int = 0) -> list[RunResult]:
    """Return results of all runs of a plan, by TRUTH with noise."""
    draws = np.random.default_rng(seed)
    rates = [RULE.rate(size.parameters) for size in plan.sizes]
    runs = [run for index in range(3) for run in plan.rate_runs(index, [2e-3, 1e-2, 5e-2])]
    return [
        run.result(float(TRUTH.predict(run.size.parameters, run.tokens)) + draws.normal(0, NOISE))
        for run in (*runs, *plan.ladder(rates))
    ]


def write_tiny_study(dataset: Path, storage: Path, file: Path) -> Path:
    """Write a study of 29 runs of 30 to 2,440 steps, in CPU seconds about a minute."""
    overrides = {
        "architecture": "gpt2",
        "optimizer": "adamw",
        "num_heads": 32,
        "seq_len": 16,
        "global_batch_tokens": 256,
        "micro_batch_sequences": 16,
        "data_path": str(dataset),
        "storage_path": str(storage),
        "eval_tokens": 4096,
        "num_samples": 0,
        "num_workers": 1,
        "min_workers": None,
        "cpus_per_worker": 1,
        "mlflow_uri": None,
        "tensorboard": False,
    }
    content = {
        "study_name": "tiny",
        "base": {"preset": "quickstart"},
        "overrides": overrides,
        "target": {"compute": 8e11},
        "sizes": [1.7e3, 3.7e3, 6.1e3, 8.9e3, 15.7e3],
        "peak_lrs": [1e-3, 2e-2, 0.4],
    }
    file.write_text(yaml.safe_dump(content))
    return file
