"""Fitting a configuration to a cluster, by pure functions of the available resources."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from raytrain_gpt.cluster.capacity import (
    DATA_CPUS,
    Node,
    Resources,
    fit_to_cluster,
    fit_to_process,
    idle_gpus,
    largest_world_size,
    usable_cores,
)
from raytrain_gpt.config.load import load_preset, preset_names
from raytrain_gpt.config.plan import micro_batch_for
from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import ClusterError, ConfigError, UserError
from tests.conftest import raises_line


def config(**values: object) -> Config:
    sizes = {"seq_len": 32, "global_batch_tokens": 12 * 32, "micro_batch_sequences": 2}
    return Config().updated({**sizes, **values})


def given(*nodes: Node) -> Resources:
    return Resources(nodes, ours=False)


def largest(wanted: Config, *nodes: Node) -> int | None:
    return largest_world_size(wanted, given(*nodes))


def test_auto_takes_all_gpus_else_one_cpu_worker() -> None:
    fitted, workers = fit_to_cluster(config(), given(Node(8, 2), Node(8, 1)))
    assert (workers, fitted.cluster.num_workers, fitted.cluster.use_gpu) == (3, 3, True)
    fitted, workers = fit_to_cluster(config(), given(Node(8, 0)))
    assert (workers, fitted.cluster.use_gpu, fitted.cluster.cpus_per_worker) == (1, False, 1)


@pytest.mark.fault("too few CPUs or GPUs", "refused at once, requested against present")
@pytest.mark.parametrize(
    ("values", "nodes", "line"),
    [
        ({"num_workers": 4}, [Node(4, 0)], "1 CPU is reserved for data"),
        ({"num_workers": 3, "cpus_per_worker": 2}, [Node(3, 0)] * 2, "num_workers to at most 2"),
        ({"use_gpu": True}, [Node(4, 0)], "the cluster has 0 GPUs"),
        ({"use_gpu": True, "num_workers": 4}, [Node(64, 2)], "and 2 GPUs on 1 node"),
    ],
)
def test_too_few_cpus_and_gpus(values: dict[str, object], nodes: list[Node], line: str) -> None:
    with pytest.raises(ClusterError, match=line):
        fit_to_cluster(config(**values), given(*nodes))
    assert fit_to_cluster(config(num_workers=3), given(Node(4, 0)))[1] == 3


def test_a_share_of_a_gpu_is_for_one_worker() -> None:
    half = config(use_gpu=True, gpus_per_worker=0.5)
    assert fit_to_cluster(half, given(Node(8, 2)))[1] == 1
    with pytest.raises(ConfigError, match=r"gpus_per_worker=0.5 does not apply to num_workers=2"):
        config(num_workers=2, gpus_per_worker=0.5)


def test_fewer_workers_start_where_that_is_allowed() -> None:
    small = given(Node(6, 0))
    fitted, workers = fit_to_cluster(config(num_workers=6, min_workers=2), small)
    assert workers == 4  # 5 workers would fit, but 5 does not divide 12 sequences
    assert fitted.cluster.num_workers == 6
    with pytest.raises(ConfigError, match="no worker count from 5 to 5"):
        fit_to_cluster(config(num_workers=6, min_workers=5), small)


def test_a_minimum_above_all_that_auto_finds_is_one_line() -> None:
    with raises_line(ConfigError, "min_workers=4 is above num_workers=2; set min_workers"):
        fit_to_cluster(config(min_workers=4), given(Node(8, 2)))


CLUSTERS = [
    given(*nodes)
    for count in (1, 2, 3)
    for nodes in itertools.combinations_with_replacement(
        [Node(1, 0), Node(3, 1), Node(4, 2), Node(9, 0)], count
    )
]


def fits(resources: Resources, workers: int, cpus: int, use_gpu: bool) -> bool:
    """Return whether the workers can be placed one by one with a CPU left over for data."""
    left = [[int(node.cpus), int(node.gpus)] for node in resources.nodes]
    for _ in range(workers):
        room = [n for n in left if n[0] >= cpus and n[1] >= use_gpu]
        if not room:
            return False
        room[0][0] -= cpus
        room[0][1] -= use_gpu
    return not workers or sum(n[0] for n in left) >= DATA_CPUS


@pytest.mark.slow
@pytest.mark.parametrize(("cpus", "use_gpu"), [(1, False), (2, True)])
def test_the_largest_world_size_is_the_most_workers_that_fit_and_divide_the_batch(
    cpus: int, use_gpu: bool
) -> None:
    found = set()
    for num, least in [(1, None), (2, 1), (4, None), (6, 3), (12, 5)]:
        wanted = config(num_workers=num, min_workers=least, cpus_per_worker=cpus, use_gpu=use_gpu)
        fitted = wanted
        for resources in CLUSTERS:
            possible = [
                workers
                for workers in range(least or num, num + 1)
                if 12 % workers == 0 and fits(resources, workers, cpus, use_gpu)
            ]
            expected = max(possible, default=None)
            assert largest_world_size(fitted, resources) == expected, (resources, num, least)
            found.add(expected)
    assert {None, 1, 2} < found


def test_what_starts_a_run_is_what_restarts_it() -> None:
    """`fit_to_cluster` fails where a running job would wait; otherwise both give the same size."""
    sizes = {"num_workers": 6, "min_workers": 2, "cpus_per_worker": 1, "use_gpu": False}
    wanted = config(**sizes, micro_batch_sequences=1)
    for resources in CLUSTERS:
        world_size = largest_world_size(wanted, resources)
        if world_size is None:
            with pytest.raises((ClusterError, ConfigError)):
                fit_to_cluster(wanted, resources)
        else:
            assert fit_to_cluster(wanted, resources) == (wanted, world_size)


def test_local_mode_takes_the_cores_and_gpus_of_its_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("raytrain_gpt.cluster.capacity.usable_cores", lambda: 8)
    local = config(num_workers=0)
    found = fit_to_process(local, world_size=1, in_node=1, num_gpus=0).cluster
    assert (found.is_local, found.use_gpu, found.cpus_per_worker) == (True, False, 8)
    found = fit_to_process(local, world_size=6, in_node=2, num_gpus=2).cluster
    assert (found.use_gpu, found.cpus_per_worker) == (True, 4)
    on_cpus = config(num_workers=0, use_gpu=False)
    assert not fit_to_process(on_cpus, world_size=1, in_node=1, num_gpus=8).cluster.use_gpu


@pytest.mark.parametrize(
    ("changes", "processes", "num_gpus", "words"),
    [
        ({}, 1, 8, ["would use 1 of 8 GPUs", "num_workers to 8", "--nproc_per_node=8"]),
        (
            {},
            4,
            2,
            [
                "4 local-mode processes need 4 GPUs",
                "sees 2",
                "all GPUs of its node",
                "set use_gpu to false",
            ],
        ),
        ({"use_gpu": True}, 1, 0, ["1 local-mode process needs 1 GPU", "sees 0"]),
        ({}, 5, 5, ["5 workers", "global_batch_tokens"]),
    ],
)
def test_processes_and_gpus_that_do_not_match_are_one_line(
    changes: dict[str, object], processes: int, num_gpus: int, words: list[str]
) -> None:
    given = config(num_workers=0, **changes)
    with raises_line(UserError, *words):
        fit_to_process(given, processes, processes, num_gpus)


def test_exact_sums_keep_their_micro_batch_so_that_fewer_workers_share_it() -> None:
    exact = config(exact=True, micro_batch_sequences=4, num_workers=6, min_workers=1)
    assert micro_batch_for(exact, 1) == 4
    fitted, workers = fit_to_cluster(exact, given(Node(6, 0)))
    assert workers == 3  # 4 workers divide 12 sequences, but not 3 micro-batches
    assert largest(fitted, Node(3, 0)) == 1


PRESETS = [name for name in preset_names() if load_preset(name).cluster.use_gpu is True]


@pytest.mark.parametrize("num_gpus", [1, 8, 24, 64])
@pytest.mark.parametrize("preset", PRESETS)
def test_the_presets_train_on_any_number_of_gpus(preset: str, num_gpus: int) -> None:
    """All GPUs are used if they divide the batch; the micro-batch shrinks if necessary."""
    given = load_preset(preset)
    resources = Resources((Node(6 * num_gpus, num_gpus),), ours=False)
    fitted, workers = fit_to_cluster(given, resources)
    line = idle_gpus(given, fitted, resources)
    assert workers == {24: 16}.get(num_gpus, num_gpus)
    assert (line is None) == (workers == num_gpus)
    micro, share = micro_batch_for(fitted, workers), given.batch_sequences // workers
    assert isinstance(micro, int)
    assert share % micro == 0
    assert micro == min(share, given.train.micro_batch_sequences)


def test_gpus_that_the_batch_leaves_alone_are_said() -> None:
    given_config = load_preset("gpt2-124m")
    resources = given(Node(128, 24))
    fitted, _ = fit_to_cluster(given_config, resources)
    assert idle_gpus(given_config, fitted, resources) == (
        "num_workers=auto uses 16 of 24 GPUs, the most that divides 512 sequences per step; to use all, "
        "set global_batch_tokens to 491520, 589824"
    )
    for tokens in (491520, 589824):
        larger = given_config.updated({"global_batch_tokens": tokens})
        assert fit_to_cluster(larger, resources)[1] == 24
    asked = given_config.updated({"num_workers": 24})
    with pytest.raises(ConfigError, match="does not divide over 24 workers"):
        fit_to_cluster(asked, given(Node(128, 24)))


def test_cores_are_those_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a Slurm step, under taskset, or in a container with a quota."""
    quota = ["max 100000"]
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)))
    monkeypatch.setattr(Path, "read_text", lambda _: quota[0])
    assert usable_cores() == 6
    for text, cores in (("250000 100000", 2), ("50000 100000", 1), ("900000 100000", 6), ("", 6)):
        quota[0] = text
        assert usable_cores() == cores
