"""More workers as nodes come, and waiting while there are too few."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from raytrain_gpt.cluster import capacity
from raytrain_gpt.cluster.capacity import (
    WAIT_LINE_EVERY_S,
    Node,
    Resources,
    ScaleUp,
    wait_for_workers,
)
from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import Interrupted


def fitted(**values: object) -> Config:
    sizes = {"seq_len": 32, "global_batch_tokens": 12 * 32, "micro_batch_sequences": 1}
    workers = {"num_workers": 6, "min_workers": 2, "cpus_per_worker": 1, "use_gpu": False}
    return Config().updated({**sizes, **workers, **values})


def cluster(cpus: float) -> Callable[[], Resources]:
    return lambda: Resources((Node(cpus, 0),), ours=False)


def never() -> Resources:
    raise AssertionError("resources must not be queried")


def test_more_workers_are_worth_a_restart_when_they_have_been_possible_for_long_enough() -> None:
    scale_up = ScaleUp(fitted(resize_after_s=60), world_size=2)
    seen = [scale_up.is_due(cluster(cpus), now) for now, cpus in [
        (0, 3), (10, 4), (69, 4), (69.5, 3), (70, 5), (71, 7), (129, 7), (129.9, 4), (130, 4),
    ]]  # fmt: skip
    # At 69.5 s the new node was gone, which restarted the wait; 3, 4 and 6 workers are all more than 2.
    assert seen == [False] * 8 + [True]
    assert not scale_up.is_due(never, 200), "the restart is requested only once"


def test_no_wait_is_possible() -> None:
    assert ScaleUp(fitted(resize_after_s=0), world_size=2).is_due(cluster(4), 5)


def test_a_number_that_does_not_divide_the_batch_is_no_reason_to_restart() -> None:
    scale_up = ScaleUp(fitted(resize_after_s=0), world_size=4)
    assert not scale_up.is_due(cluster(6), 0)  # 5 would fit, but do not divide 12 sequences
    assert scale_up.is_due(cluster(7), 1)


def test_a_run_of_full_size_never_asks_the_cluster() -> None:
    assert not ScaleUp(fitted(), world_size=6).is_due(never, 0)


class Nodes:
    """Cluster whose CPU count changes with every pause."""

    def __init__(self, *cpus: float) -> None:
        self.left = list(cpus)
        self.now, self.lines = 0.0, list[str]()

    def resources(self) -> Resources:
        return Resources((Node(self.left[0], 0),), ours=False)

    def pause(self, seconds: float) -> None:
        self.now += seconds
        self.left.pop(0)
        if not self.left:
            raise Interrupted("a signal")

    def wait(self, current: int) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(capacity.time, "monotonic", lambda: self.now)
            return wait_for_workers(
                fitted(), current, self.resources, self.pause, self.lines.append
            )


def test_the_largest_number_that_fits_is_taken_at_once_and_told_when_it_is_another() -> None:
    for cpus, current, lines in ((7, 6, []), (5, 6, ["4 of 6 workers"]), (5, 4, [])):
        nodes = Nodes(cpus)
        assert nodes.wait(current) == (6 if cpus == 7 else 4)
        assert (nodes.now, nodes.lines) == (0, lines)


def test_too_few_nodes_are_waited_for_with_a_line_a_minute() -> None:
    seconds = round(2 * WAIT_LINE_EVERY_S + 5)
    nodes = Nodes(*[2.0] * seconds, 3.0)
    assert nodes.wait(current=2) == 2
    waiting = "waiting for nodes: the run needs 2 workers, the cluster has 2 CPUs and 0 GPUs"
    assert nodes.lines == [waiting] * 3 + ["2 of 6 workers"]


def test_a_signal_ends_the_wait() -> None:
    with pytest.raises(Interrupted):
        Nodes(1.0, 1.0, 1.0).wait(current=6)
