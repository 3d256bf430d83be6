"""Number of trials that fit a cluster, with fractional GPUs: pure functions of its resources."""

from __future__ import annotations

from typing import Any

import pytest

from raytrain_gpt.cluster.capacity import Node, Resources, fit_to_cluster
from raytrain_gpt.config.resolved import workers_of
from raytrain_gpt.errors import ClusterError
from raytrain_gpt.sweep import cost
from raytrain_gpt.sweep.cost import (
    cpus_to_start,
    data_cpus,
    largest_trial,
    one_worker_for_auto,
    trials_at_once,
)
from raytrain_gpt.sweep.spec import Sweep
from raytrain_gpt.sweep.trial_plan import base_config, num_trials

from .conftest import sweep_of


def sweep(overrides: dict[str, Any] | None = None, **more: Any) -> Sweep:
    """Make a sweep over eight learning rates."""
    rates = {"peak_lr": {"grid": [n * 1e-3 for n in range(1, 9)]}}
    overrides = {"num_workers": 1, "cpus_per_worker": 1, **(overrides or {})}
    return sweep_of(**{"space": rates, "overrides": overrides, **more})


def at_once(one: Sweep, *nodes: Node) -> int:
    sized = one_worker_for_auto(base_config(one))
    given = Resources(nodes, ours=False, data_cpus=data_cpus(sized))
    config, _ = fit_to_cluster(sized, given)
    return trials_at_once(config, given, num_trials(one), one.max_concurrent_trials)


@pytest.mark.parametrize(
    ("overrides", "nodes", "fit"),
    [
        ({}, [Node(4, 0)], 4),
        ({}, [Node(1, 0)], 1),
        ({"cpus_per_worker": 2}, [Node(2, 0)], 1),
        ({}, [Node(64, 0)], 8),  # all of the trials
        ({"num_workers": 2}, [Node(6, 0)], 2),  # two workers and one CPU for data per trial
        ({"num_workers": 2}, [Node(5, 0)], 1),
        ({"cpus_per_worker": 4}, [Node(7, 0), Node(8, 0)], 3),  # no node has room for a fourth
        ({"use_gpu": True}, [Node(64, 4)], 4),
        ({"use_gpu": True, "num_workers": 2}, [Node(64, 4)], 2),
        ({"use_gpu": True, "gpus_per_worker": 0.5}, [Node(64, 2)], 4),
        ({"use_gpu": True, "gpus_per_worker": 0.3}, [Node(64, 2)], 6),  # 3 per GPU
        ({"use_gpu": True, "gpus_per_worker": 0.5}, [Node(3, 2)], 3),  # limited by CPUs
        ({"use_gpu": True, "num_workers": "auto"}, [Node(64, 4)], 4),
    ],
)
def test_trials_that_fit(overrides: dict[str, Any], nodes: list[Node], fit: int) -> None:
    assert at_once(sweep(overrides), *nodes) == fit


@pytest.mark.parametrize("number", [1, 2, 3, 7, 60])
def test_trials_share_gpus(number: int) -> None:
    rates = {"peak_lr": {"loguniform": [1e-4, 1e-2]}}
    shared = sweep({"use_gpu": True}, space=rates, trials_per_gpu=number, num_trials=800)
    assert at_once(shared, Node(1000, 2)) == 2 * number
    config, _ = fit_to_cluster(
        one_worker_for_auto(base_config(shared)), Resources((Node(8, 1),), ours=False)
    )
    # Ray counts GPUs in steps of 0.0001, and more than one GPU of trials would wait.
    share = workers_of(config).num_gpus
    assert round(share * 10_000) * number <= 10_000
    assert workers_of(config).memory_fraction * number <= 1
    in_process = config.updated({"num_workers": 0, "min_workers": None})
    assert workers_of(in_process).num_gpus == share


@pytest.mark.slow
def test_memory_of_shared_gpus_is_measured_for_the_largest_trial() -> None:
    widths = {"embd_size": {"grid": [16, 64, 32]}, "peak_lr": {"grid": [1e-3, 2e-3]}}
    fixed = {
        "micro_batch_sequences": 1,
        "activation_checkpointing": "none",
        "num_heads": 2,
        "num_workers": 1,
    }
    auto = sweep_of(space=widths, overrides=fixed, trials_per_gpu="auto")
    largest = largest_trial(auto, one_worker_for_auto(base_config(auto)))
    assert largest.model.embd_size == 64


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
    config = one_worker_for_auto(base_config(sweep()))
    assert cpus_to_start(config, 8, 99) == 8
    assert cpus_to_start(config, 8, 1) == 1
    monkeypatch.setattr(cost.os, "cpu_count", lambda: 6)
    two_workers = one_worker_for_auto(base_config(sweep({"num_workers": 2})))
    assert cpus_to_start(two_workers, 8, None) == 3 * (2 + 1)
