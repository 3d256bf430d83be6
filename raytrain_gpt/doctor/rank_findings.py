"""Checks of the ranks' facts: devices, sums over them, and the order of the data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from raytrain_gpt.doctor.check import Failed, Skipped, named_check
from raytrain_gpt.doctor.rank_probe import AllReduceFacts, GroupFacts
from raytrain_gpt.format import count
from raytrain_gpt.ingest.ray_dataset import IngestSpec

_BETWEEN_NODES = (
    "let all nodes reach each other on all ports, and if a node has several interfaces, set "
    "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
)


@named_check("devices")
def judge_devices(group: GroupFacts) -> str:
    """Check that each rank has a separate GPU if GPUs are requested."""
    if (devices := group.devices) is None:
        raise Failed(
            f"the workers did not connect to each other: {group.error}; check that no other job holds the "
            f"cluster's resources, and {_BETWEEN_NODES}"
        )
    ranks = ", ".join(f"rank {d.rank} {d.device} on {d.node}" for d in devices)
    if missing := ", ".join(f"rank {d.rank} on {d.node} ({d.error})" for d in devices if d.error):
        raise Failed(
            f"no GPU for {missing}; check that nvidia-smi works there, that torch is a CUDA build, and that "
            "Ray's --num-gpus does not exceed the node's GPUs"
        )
    if not group.has_devices:
        raise Failed(
            f"ranks share a GPU: {ranks}; start Ray with --num-gpus of at most the node's GPUs, and let Ray "
            "set CUDA_VISIBLE_DEVICES"
        )
    return ranks


def all_reduce_bytes_per_s(ranks: Sequence[AllReduceFacts]) -> dict[int, float]:
    """Return tensor bytes -> algorithm bandwidth (bytes/s), by the slowest rank's time."""
    sizes = ranks[0].seconds if ranks else ()
    return {size: size / max(rank.seconds[size] for rank in ranks) for size in sizes}


@named_check("all_reduce")
def judge_all_reduce(group: GroupFacts) -> str:
    """Check that all-reduce sums are correct, and show how fast they are."""
    ranks = group.all_reduce
    if group.world_size == 1:
        raise Skipped("one worker")
    if not group.has_devices:
        raise Skipped("not all ranks have a device")
    if ranks is None:
        raise Failed(f"did not finish: {group.error}; {_BETWEEN_NODES}")
    speeds = all_reduce_bytes_per_s(ranks)
    each = ", ".join(f"{size / 1e6:g} MB {speed / 1e9:.2f} GB/s" for size, speed in speeds.items())
    seen = f"{count(len(ranks), 'rank')} over {ranks[0].backend}, tensor bytes / time: {each}"
    if wrong := sum(rank.wrong for rank in ranks):
        raise Failed(
            f"{wrong} sums are wrong ({seen}); a device, its driver or a network card is broken: remove "
            "nodes one by one to find it"
        )
    return f"sums are correct; {seen}"


@named_check("sequences")
def judge_sequences(group: GroupFacts, ingest: IngestSpec | None, batches: Sequence[int]) -> str:
    """Check that the ranks together read each planned sequence once, in its step."""
    ranks = group.sequences
    if ingest is None:
        raise Skipped("no data that all nodes can read")
    if ranks is None and not (group.has_devices and (group.all_reduce or group.world_size == 1)):
        raise Skipped("an earlier check of the ranks failed")
    if ranks is None:
        raise Failed(f"reading did not finish: {group.error}")
    order, val, none = ingest.order(), ingest.eval_ids()[0], np.zeros(0, np.int64)
    plans = {"the validation": val[val >= 0]}
    actual = {"the validation": [rank.val[rank.val >= 0] for rank in ranks]}
    for batch in batches:
        plans[f"global batch {batch}"] = order.batch_ids(batch)
        actual[f"global batch {batch}"] = [rank.train.get(batch, none) for rank in ranks]
    for name, plan in plans.items():
        # A mixture's batch may repeat a sequence where a small dataset's epochs meet.
        planned = Counter(plan.tolist())
        read = Counter(np.concatenate(actual[name]).tolist())
        if planned != read:
            extra = sorted((read - planned).elements())
            first = f" (first {extra[0]})" if extra else ""
            raise Failed(
                f"{(planned - read).total()} of {count(len(plan), 'sequence')} of {name} read by no rank, "
                f"and {len(extra)} read twice or unplanned{first}; do not train with this setup: compare the "
                "installed versions with constraints.txt"
            )
    total = sum(len(plan) for plan in plans.values())
    return (
        f"{count(len(ranks), 'rank')} read {count(total, 'sequence')} of "
        f"{count(len(batches), 'global batch', 'global batches')} and the "
        "validation, each as planned"
    )
