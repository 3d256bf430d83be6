"""How a configuration is fitted to a cluster: pure functions of what there is."""

from __future__ import annotations

import pytest

from raytrain_gpt.config import Config
from raytrain_gpt.errors import ClusterError, ConfigError
from raytrain_gpt.runtime.cluster import Node, Resources, fit_micro_batch, fit_to_cluster


def config(**values: object) -> Config:
    sizes = {"seq_len": 32, "global_batch_tokens": 12 * 32, "micro_batch_sequences": 2}
    return Config().updated({**sizes, **values})


def given(*nodes: Node) -> Resources:
    return Resources(nodes, ours=False)


def test_auto_takes_all_gpus_else_one_cpu_worker() -> None:
    fitted, workers = fit_to_cluster(config(), given(Node(8, 2), Node(8, 1)))
    assert (workers, fitted.cluster.num_workers, fitted.cluster.use_gpu) == (3, 3, True)
    fitted, workers = fit_to_cluster(config(), given(Node(8, 0)))
    assert (workers, fitted.cluster.use_gpu, fitted.cluster.cpus_per_worker) == (1, False, 1)


def test_a_cpu_stays_free_for_data() -> None:
    assert fit_to_cluster(config(num_workers=3), given(Node(4, 0)))[1] == 3
    with pytest.raises(ClusterError, match="1 CPU must stay free for data"):
        fit_to_cluster(config(num_workers=4), given(Node(4, 0)))


def test_workers_fit_node_by_node() -> None:
    with pytest.raises(ClusterError, match="set num_workers to at most 2"):
        fit_to_cluster(config(num_workers=3, cpus_per_worker=2), given(Node(3, 0), Node(3, 0)))


def test_fewer_workers_start_where_that_is_allowed() -> None:
    small = given(Node(6, 0))
    fitted, workers = fit_to_cluster(config(num_workers=6, min_workers=2), small)
    assert workers == 4  # 5 would fit, but does not divide 12 sequences
    assert fitted.cluster.num_workers == 6
    with pytest.raises(ConfigError, match="no number of workers from 5 to 5"):
        fit_to_cluster(config(num_workers=6, min_workers=5), small)


def test_the_micro_batch_of_fewer_workers_divides_their_share() -> None:
    assert fit_micro_batch(config(micro_batch_sequences=2), 4).train.micro_batch_sequences == 1
    assert fit_micro_batch(config(micro_batch_sequences=8), 2).train.micro_batch_sequences == 6


def test_gpus_that_are_not_there() -> None:
    with pytest.raises(ClusterError, match="the cluster has 0 GPUs"):
        fit_to_cluster(config(use_gpu=True), given(Node(4, 0)))
    with pytest.raises(ClusterError, match="and 2 GPUs on 1 nodes"):
        fit_to_cluster(config(use_gpu=True, num_workers=4), given(Node(64, 2)))
