"""Output of `tune --dry_run`: the trials, their resources, tokens and hours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raytrain_gpt.config.resolved import SizedConfig
from raytrain_gpt.sweep import cost
from raytrain_gpt.sweep.cost import Speed, cost_lines, trained_share
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


def test_early_stopping_leaves_the_expected_share() -> None:
    assert trained_share(sweep(), 9) == 1
    # Half of the second trials are worse than the first one, which always passes.
    halves = {"kind": "asha", "grace_tokens": 45 * 512, "reduction_factor": 2}
    report = {"report_every_tokens": 45 * 512}
    assert trained_share(sweep(scheduler=halves, **report), 1) == 1
    assert trained_share(sweep(scheduler=halves, **report), 2) == pytest.approx(0.875, abs=0.02)
    assert 0.25 < trained_share(sweep(scheduler=ASHA), 9) < 0.6


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[SizedConfig]:
    """Make up the speed; return the configurations that it is measured for."""
    configs: list[SizedConfig] = []

    def speed(config: SizedConfig, *_: Any) -> Speed:
        configs.append(config)
        return Speed(sequences=8, first_s=0.5, further_s=0.25, eval_s=2 / config.eval.eval_tokens)

    monkeypatch.setattr(cost, "measured_speed", speed)
    monkeypatch.setattr(cost, "measured_imports_s", lambda: 1.0)
    monkeypatch.setattr(cost, "data_is_there", lambda config: False)
    return configs


@pytest.mark.usefixtures("measured")
def test_the_cost_is_said_before_a_sweep_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "trained_share", lambda sweep, number: 0.5)
    lines = cost_lines(sweep(scheduler=ASHA, max_concurrent_trials=1))
    assert lines[0].split() == ["trial", "peak_lr", "steps"]
    assert lines[9].split() == ["008", "9e-3", "90"]
    each, tokens, time = lines[10:]
    assert each == "each trial: 1 CPU | on this machine: 1 at once"
    assert tokens.startswith("tokens: 9 × 46.1k = 414.7k at most; about 207.4k if")
    # 9 trials of 90 steps of 0.5 s, and of 9 evaluations of 2 s; imports of 1 s.
    assert time.startswith("time: about 4m 50s (at most 9m 34s): 4m 44s of steps and evaluations")
    assert time.endswith("7s of starts")


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
    assert "measured here (cpu)" in time


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


def test_each_shape_is_measured_and_a_larger_batch_only_takes_more_of_its_micro_batches(
    measured: list[SizedConfig],
) -> None:
    space = {"embd_size": {"grid": [64, 128]}, "global_batch_tokens": {"grid": [512, 1536]}}
    fixed = {"seq_len": 64, "micro_batch_sequences": 8, "warmup_steps": 5, "use_gpu": False}
    one = {"num_workers": 1, "cpus_per_worker": 1}
    tokens = {"budget_tokens": 90 * 1536, "report_every_tokens": 90 * 1536}
    sweeps = sweep(space=space, overrides={**fixed, **one}, max_concurrent_trials=1, **tokens)
    *_, time = cost_lines(sweeps)
    assert [config.model.embd_size for config in measured] == [64, 128]
    # Per width: 270 steps of 0.5 s, 90 of 0.5 s and two times 0.25 s, and two evaluations of 2 s.
    assert "7m 38s of steps and evaluations" in time


def test_the_example_of_the_documentation_has_a_cost(
    tmp_path: Path, measured: list[SizedConfig]
) -> None:
    # A step of the 124M model would take seconds, so the speed is made up.
    file = tmp_path / "example.yaml"
    file.write_text(DOCS.read_text("utf-8").split("```yaml")[1].split("```")[0], "utf-8")
    lines = cost_lines(load_sweep(file, {}))
    assert lines[17].startswith("each trial: 4 CPUs, with GPUs 1 for each worker")
    assert {(c.cluster.num_workers, c.cluster.cpus_per_worker) for c in measured} == {(1, 4)}


@pytest.mark.usefixtures("measured")
def test_optunas_trials_are_counted_and_not_listed() -> None:
    space = {"peak_lr": {"loguniform": [1e-3, 1e-2]}}
    assert cost_lines(sweep(space=space, searcher="optuna", num_trials=5))[0].startswith(
        "5 trials, whose values Optuna chooses"
    )
