"""Output of `tune --dry_run`: the trials, their resources, tokens and hours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.registry import count_model
from raytrain_gpt.format import duration
from raytrain_gpt.sweep import cost
from raytrain_gpt.sweep.cost import cost_lines, one_worker_for_auto
from raytrain_gpt.sweep.spec import Sweep, load_sweep
from raytrain_gpt.sweep.trial_plan import base_config
from raytrain_gpt.train.preflight import expected_vocab_size

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


FLOP_S = 1e-9
"""Seconds of a FLOP in tests that do not measure."""


@pytest.fixture(autouse=True)
def without_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "data_is_there", lambda config: False)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "seconds_per_flop", lambda configs, vocab_size: FLOP_S)


@pytest.mark.usefixtures("measured")
def test_the_cost_is_said_before_a_sweep_starts() -> None:
    one = sweep(scheduler=ASHA, max_concurrent_trials=1)
    lines = cost_lines(one)
    assert lines[0].split() == ["trial", "peak_lr", "steps"]
    assert lines[9].split() == ["008", "9e-3", "90"]
    each, tokens, time = lines[10:]
    assert each == "each trial: 1 CPU | on this machine: 1 at once"
    assert tokens == "tokens: 9 × 46.1k = 414.7k at most"
    config = base_config(one)
    shape = GPTShape.of(config, expected_vocab_size(config))
    # 9 trials of 90 steps of 512 tokens, and of 9 evaluations, which have a third of the FLOPs.
    all_tokens = 9 * (90 * 512 + 9 * config.eval.eval_tokens / 3)
    most_s = FLOP_S * all_tokens * count_model(shape).flops_per_token
    assert time.startswith(f"time: at most {duration(most_s)} of steps")


@pytest.mark.parametrize("searcher", ["random", "optuna"])
@pytest.mark.parametrize("missing", ["num_workers", "cpus_per_worker"])
def test_the_speed_is_measured_without_resources_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, searcher: str
) -> None:
    monkeypatch.setattr(cost, "_PROBE_S", 0.01)
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
    assert "measured here" in time


def test_what_does_not_fit_here_has_no_time() -> None:
    huge = {"num_layers": 10_000, "embd_size": 2**20, "num_heads": 1}
    fixed = {"seq_len": 64, "global_batch_tokens": 512, "warmup_steps": 5, "use_gpu": False}
    one = {"num_workers": 1, "cpus_per_worker": 1, "micro_batch_sequences": "auto"}
    lines = cost_lines(sweep(overrides={**huge, **fixed, **one}))
    assert lines[-1] == "time: unknown; a trial does not fit in this machine's memory"


@pytest.mark.parametrize(
    ("smaller", "larger"),
    [
        ({"embd_size": 64}, {"embd_size": 128}),
        ({"num_layers": 1}, {"num_layers": 2}),
        ({"global_batch_tokens": 512}, {"global_batch_tokens": 1024}),
    ],
)
def test_the_step_with_the_most_flops_is_measured(
    smaller: dict[str, int], larger: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[dict[str, Any]] = []

    def configured(config: Config, *_: Any, **__: Any) -> Any:
        taken.append(config.field_values())
        raise KeyboardInterrupt

    monkeypatch.setattr(cost, "probe_steps", configured)
    base = one_worker_for_auto(base_config(sweep()))
    with pytest.raises(KeyboardInterrupt):
        cost.seconds_per_flop([base.updated(smaller), base.updated(larger)], 257)
    assert larger.items() <= taken[0].items()


@pytest.mark.usefixtures("measured")
def test_the_example_of_the_documentation_has_a_cost(tmp_path: Path) -> None:
    # A step of the 124M model would take seconds, so the speed is made up.
    file = tmp_path / "example.yaml"
    file.write_text(DOCS.read_text("utf-8").split("```yaml")[1].split("```")[0], "utf-8")
    lines = cost_lines(load_sweep(file, {}))
    assert lines[17].startswith("each trial: 4 CPUs, with GPUs 1 for each worker")
