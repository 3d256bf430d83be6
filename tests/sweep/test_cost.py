"""Output of `tune --dry_run`: the trials, their resources, tokens and hours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from raytrain_gpt.config.resolved import SizedConfig
from raytrain_gpt.sweep import cost
from raytrain_gpt.sweep.cost import cost_lines, halved_tokens
from raytrain_gpt.sweep.spec import Sweep, load_sweep

DOCS = Path(__file__).parents[2] / "docs" / "sweeps.md"


def sweep(**changes: Any) -> Sweep:
    """Make a sweep of nine trials with 90 steps of 512 tokens each."""
    fields: dict[str, Any] = {
        "sweep_name": "rates",
        "base": {"preset": "quickstart"},
        "overrides": {
            **{"global_batch_tokens": 512, "seq_len": 64, "micro_batch_sequences": 8},
            **{"num_workers": 1, "cpus_per_worker": 1, "use_gpu": False, "warmup_steps": 5},
        },
        "space": {"peak_lr": {"grid": [n * 1e-3 for n in range(1, 10)]}},
        "budget_tokens": 90 * 512,
        "report_every_tokens": 10 * 512,
    }
    return Sweep.model_validate({**fields, **changes})


ASHA = {"kind": "asha", "grace_tokens": 10 * 512, "reduction_factor": 3}


def test_halving_saves_what_stopped_trials_do_not_train() -> None:
    assert halved_tokens(sweep(), 9) == 9 * 90 * 512
    # Nine trials reach the first rung, three the second, and one the end.
    assert halved_tokens(sweep(scheduler=ASHA), 9) == (9 * 10 + 3 * 20 + 1 * 60) * 512


def test_the_cost_is_said_before_a_sweep_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "measured_tokens_per_s", lambda config, device: 1024.0)
    lines = cost_lines(sweep(scheduler=ASHA, max_concurrent_trials=1))
    assert lines[0].split() == ["trial", "peak_lr", "steps"]
    assert lines[9].split() == ["008", "9e-3", "90"]
    each, tokens, time = lines[10:]
    assert each == "each trial: 1 CPU | on this machine: 1 at once"
    assert tokens.startswith("tokens: 9 × 46.1k = 414.7k at most; 107.5k if all trials are stopped")
    assert time.startswith("time: at most 7m 0s: 6m 45s of steps at 1,024 tok/s per trial")
    assert "15s of 9 starts" in time


@pytest.mark.parametrize("searcher", ["random", "optuna"])
@pytest.mark.parametrize("missing", ["num_workers", "cpus_per_worker"])
def test_the_speed_is_measured_without_resources_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, searcher: str
) -> None:
    monkeypatch.setattr(cost, "PROBE_S", 0.0)
    file = tmp_path / "base.yaml"
    file.write_text("optim: {min_lr: 0, warmup_steps: 5}\ncluster: {use_gpu: false}")
    overrides = {"num_workers": 1, "cpus_per_worker": 1, "global_batch_tokens": 512, "seq_len": 64}
    overrides |= {"micro_batch_sequences": "auto"}
    del overrides[missing]
    *_, time = cost_lines(
        sweep(
            base={"config": str(file)},
            overrides=overrides,
            space={"peak_lr": {"loguniform": [1e-3, 1e-2]}},
            num_trials=2,
            searcher=searcher,
        )
    )
    assert "(measured here, cpu)" in time


def test_what_does_not_fit_here_has_no_time() -> None:
    huge = {
        "num_layers": 10_000,
        "embd_size": 2**20,
        "num_heads": 1,
        "seq_len": 64,
        "global_batch_tokens": 512,
    }
    resources = {"num_workers": 1, "cpus_per_worker": 1, "use_gpu": False}
    lines = cost_lines(
        sweep(overrides={**huge, **resources, "micro_batch_sequences": "auto", "warmup_steps": 5})
    )
    assert lines[-1] == "time: unknown; a trial does not fit in this machine's memory"


def test_the_example_of_the_documentation_has_a_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A forward pass of the 124M model would take seconds, so only the speed is made up.
    measured = []

    def speed(config: SizedConfig, device: torch.device) -> float:
        measured.append(config.cluster)
        return 1024.0

    monkeypatch.setattr(cost, "measured_tokens_per_s", speed)
    file = tmp_path / "example.yaml"
    file.write_text(DOCS.read_text("utf-8").split("```yaml")[1].split("```")[0], "utf-8")
    lines = cost_lines(load_sweep(file, {}))
    assert lines[17].startswith("each trial: 4 CPUs, with GPUs 1 for each worker")
    assert [(c.num_workers, c.cpus_per_worker) for c in measured] == [(1, 4)]


def test_optunas_trials_are_counted_and_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "measured_tokens_per_s", lambda config, device: 1024.0)
    space = {"peak_lr": {"loguniform": [1e-3, 1e-2]}}
    assert cost_lines(sweep(space=space, searcher="optuna", num_trials=5))[0].startswith(
        "5 trials, whose values Optuna chooses"
    )
