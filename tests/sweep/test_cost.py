"""Trials that fit a cluster, and the output of `tune --dry_run`: trials, resources, tokens and time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raytrain_gpt.cluster.capacity import Node, Resources, fit_to_cluster
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.registry import step_flops
from raytrain_gpt.errors import ClusterError
from raytrain_gpt.format import duration
from raytrain_gpt.sweep import cost
from raytrain_gpt.sweep.cost import (
    cost_lines,
    data_cpus,
    fit_here,
    one_worker_for_auto,
    trials_at_once,
)
from raytrain_gpt.sweep.spec import Sweep
from raytrain_gpt.sweep.trial_plan import base_config, num_trials
from raytrain_gpt.train.preflight import expected_vocab_size

from .conftest import sweep_of

DOCS = Path(__file__).parents[2] / "docs" / "sweeps.md"
FLOP_S = 1e-9
"""Seconds of a FLOP in tests that do not measure."""


def sweep(overrides: dict[str, Any] | None = None, **more: Any) -> Sweep:
    """Make a sweep over nine learning rates, with 90 steps of 512 tokens each."""
    fixed = {"global_batch_tokens": 512, "seq_len": 64, "micro_batch_sequences": 4}
    fixed |= {"num_workers": 1, "cpus_per_worker": 1, "warmup_steps": 5}
    space = {"peak_lr": {"grid": [n * 1e-3 for n in range(1, 10)]}}
    tokens = {"budget_tokens": 90 * 512, "report_every_tokens": 10 * 512}
    return sweep_of(**{"space": space, "overrides": fixed | (overrides or {}), **tokens, **more})


def at_once(one: Sweep, *nodes: Node) -> int:
    sized = one_worker_for_auto(base_config(one))
    given = Resources(nodes, ours=False, data_cpus=data_cpus(sized))
    config, _ = fit_to_cluster(sized, given)
    return trials_at_once(config, given, num_trials(one), one.max_concurrent_trials)


@pytest.mark.parametrize(
    ("overrides", "nodes", "fit"),
    [
        ({}, [Node(4, 0)], 4),
        ({"cpus_per_worker": 2}, [Node(2, 0)], 1),
        ({}, [Node(64, 0)], 9),  # all of the trials
        ({"num_workers": 2}, [Node(6, 0)], 2),  # two workers and one CPU for data per trial
        ({"num_workers": 2}, [Node(5, 0)], 1),
        ({"cpus_per_worker": 4}, [Node(7, 0), Node(8, 0)], 3),  # no node has room for a fourth
        ({"use_gpu": True, "num_workers": 2}, [Node(64, 4)], 2),
        ({"use_gpu": True, "gpus_per_worker": 0.3}, [Node(64, 2)], 6),  # 3 per GPU
        ({"use_gpu": True, "gpus_per_worker": 0.5}, [Node(3, 2)], 3),  # limited by CPUs
        ({"use_gpu": True, "num_workers": "auto"}, [Node(64, 4)], 4),
    ],
)
def test_trials_that_fit(overrides: dict[str, Any], nodes: list[Node], fit: int) -> None:
    assert at_once(sweep(overrides), *nodes) == fit


def test_a_limit_of_the_file_holds() -> None:
    assert at_once(sweep(max_concurrent_trials=3), Node(64, 0)) == 3
    assert at_once(sweep(max_concurrent_trials=30), Node(4, 0)) == 4


@pytest.mark.fault(
    "sweep larger than the cluster", "fewer concurrent trials; impossible ones refused"
)
def test_a_trial_that_never_fits_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"1 worker × 4 CPUs do not fit"):
        at_once(sweep({"cpus_per_worker": 4}), Node(3, 0))
    with pytest.raises(ClusterError, match=r"2 workers × 1 CPU and 1 GPU do not fit"):
        at_once(sweep({"use_gpu": True, "num_workers": 2, "min_workers": None}), Node(64, 1))


def test_a_cluster_of_its_own_has_a_trial_for_each_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "usable_cores", lambda: 6)
    config = one_worker_for_auto(base_config(sweep({"use_gpu": False})))
    assert [fit_here(config, 8, most) for most in (None, 99, 1)] == [6, 8, 1]
    assert fit_here(config.updated({"num_workers": 2}), 8, None) == 3


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "_seconds_per_flop", lambda configs, vocab_size: FLOP_S)


@pytest.mark.usefixtures("measured")
def test_the_cost_is_said_before_a_sweep_starts() -> None:
    one = sweep({"use_gpu": False}, max_concurrent_trials=1)
    lines = cost_lines(one)
    assert lines[0].split() == ["trial", "peak_lr", "steps"]
    assert lines[9].split() == ["008", "9e-3", "90"]
    each, tokens, time = lines[10:]
    assert each == "each trial: 1 CPU"
    assert tokens == "tokens: 9 × 46.1k = 414.7k without early stopping"
    config = base_config(one)
    shape = GPTShape.of(config, expected_vocab_size(config))
    all_s = FLOP_S * 9 * 90 * step_flops(shape, config.optim, 512)
    assert time.startswith(f"time: about {duration(all_s)} without starts")


def test_the_speed_is_measured_without_resources_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "_PROBE_S", 0.01)
    file = tmp_path / "base.yaml"
    file.write_text("optim: {min_lr: 0, warmup_steps: 5}\ncluster: {use_gpu: false}")
    changes = {"global_batch_tokens": 512, "seq_len": 64, "micro_batch_sequences": "auto"}
    space = {"peak_lr": {"loguniform": [1e-3, 1e-2]}}
    optuna = {"searcher": "optuna", "num_trials": 2}
    tokens = {"budget_tokens": 90 * 512, "report_every_tokens": 10 * 512}
    one = sweep_of(space, base={"config": str(file)}, overrides=changes, **optuna, **tokens)
    assert "measured here" in cost_lines(one)[-1]


def test_what_does_not_fit_here_has_no_time() -> None:
    huge = {"num_layers": 10_000, "embd_size": 2**20, "num_heads": 1, "use_gpu": False}
    lines = cost_lines(sweep({**huge, "micro_batch_sequences": "auto"}))
    assert lines[-1] == "time: unknown; the largest trial is too large for this machine"


@pytest.mark.usefixtures("measured")
def test_the_example_of_the_documentation_has_a_cost(tmp_path: Path) -> None:
    # A step of the 124M model would take seconds, so the speed is made up.
    file = tmp_path / "example.yaml"
    file.write_text(DOCS.read_text("utf-8").split("```yaml")[1].split("```")[0], "utf-8")
    assert cost_lines(Sweep.load(file, {}))[17].startswith("each trial: 4 CPUs, and 1 GPU")
