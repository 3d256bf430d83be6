"""Checks of the ranks' facts: devices, links between them, and the order of the data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.device import peak_flops
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.registry import assumed_step_time_s, count_model
from raytrain_gpt.doctor.check import Failed, Skipped, named_check
from raytrain_gpt.doctor.rank_probe import AllReduceFacts, GroupFacts
from raytrain_gpt.format import count
from raytrain_gpt.ingest.ray_dataset import IngestSpec

BETWEEN_NODES = (
    "let all nodes reach each other on all ports, and if a node has several interfaces, set "
    "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
)
SLOWEST_LINK_BYTES_PER_S = {("gloo", 1): 1e8, ("gloo", 2): 1e8, ("nccl", 1): 2e9, ("nccl", 2): 1e9}
"""(backend, 1 node or 2 for more) -> minimum bandwidth of a rank's link:

- gloo: 80% of gigabit Ethernet (125 MB/s); slower is Wi-Fi, a VPN, or a wrong interface.
- nccl in one node: half of four lanes of PCIe 3.0 (3.9 GB/s); any GPU slot has more.
- nccl between nodes: 80% of 10-gigabit Ethernet (1.25 GB/s); below, GPUs mostly wait.
"""


@named_check("devices")
def judge_devices(group: GroupFacts) -> str:
    """Check that each rank has a separate GPU if GPUs are requested."""
    if (devices := group.devices) is None:
        raise Failed(
            f"the workers did not connect to each other: {group.error}; check that no other job holds the "
            f"cluster's resources, and {BETWEEN_NODES}"
        )
    if not group.use_gpu:
        ranks = ", ".join(f"rank {d.rank} on {d.node}" for d in devices)
        return f"CPUs, as configured: {ranks}"
    missing = [
        f"rank {d.rank} on {d.node} ({d.error}, CUDA_VISIBLE_DEVICES="
        f"{'not set' if d.visible is None else d.visible})"
        for d in devices
        if not d.uuid
    ]
    if missing:
        raise Failed(
            f"no GPU for {', '.join(missing)}; check that nvidia-smi works there, that torch is a CUDA "
            "build, and that Ray's --num-gpus does not exceed the node's GPUs"
        )
    ranks_of: dict[str, list[str]] = {}
    for device in devices:
        ranks_of.setdefault(device.uuid, []).append(str(device.rank))
    shared = [
        f"ranks {', '.join(ranks)} are on the same GPU ({uuid})"
        for uuid, ranks in ranks_of.items()
        if len(ranks) > 1
    ]
    if shared:
        raise Failed(
            f"{'; '.join(shared)}; start Ray with --num-gpus of at most the node's GPUs, and let Ray set "
            "CUDA_VISIBLE_DEVICES"
        )
    ranks = ", ".join(f"rank {d.rank} {d.device} on {d.node}" for d in devices)
    return f"a GPU for each rank: {ranks}"


def all_reduce_bytes_per_s(ranks: Sequence[AllReduceFacts]) -> dict[int, float]:
    """Return tensor bytes -> algorithm bandwidth (bytes/s), by the slowest rank's time."""
    sizes = ranks[0].seconds if ranks else ()
    return {size: size / max(rank.seconds[size] for rank in ranks) for size in sizes}


def gradient_bytes_per_s(config: Config, vocab_size: int, group: GroupFacts) -> float | None:
    """Bytes per second on a link with which sending gradients takes as long as a step's computation.

    A rank sends and receives almost twice the gradients' bytes per step.
    """
    peaks = [peak_flops(device.device, "bf16") for device in group.devices or ()]
    known = [peak for peak in peaks if peak is not None]
    if not known or len(known) < len(peaks):
        return None
    shape = GPTShape.of(config, vocab_size)
    step_time_s = assumed_step_time_s(shape, config.train.global_batch_tokens, sum(known))
    width = 2 if config.train.gradient_dtype == "bf16" else 4
    return 2 * width * count_model(shape).num_parameters / step_time_s


@named_check("all_reduce")
def judge_all_reduce(group: GroupFacts, needed_bytes_per_s: float | None = None) -> str:
    """Check that all-reduce sums are correct and the links fast enough.

    Between nodes over nccl, a link must also carry `needed_bytes_per_s`.

    A ring sends 2·(n−1)/n of the tensor's bytes over every rank's link, so bandwidth times that factor is the
    link's load for any number of ranks ("bus bandwidth" of nccl-tests).
    """
    ranks, n = group.all_reduce, group.world_size
    if n == 1:
        raise Skipped("one worker")
    if group.devices is None or not group.has_devices:
        raise Skipped("not all ranks have a device")
    if ranks is None:
        raise Failed(f"did not finish: {group.error}; {BETWEEN_NODES}")
    backend, num_nodes = ranks[0].backend, len({device.node for device in group.devices})
    wrong = sum(rank.wrong for rank in ranks)
    speeds = all_reduce_bytes_per_s(ranks)
    each = ", ".join(f"{size / 1e6:g} MB {speed / 1e9:.2f} GB/s" for size, speed in speeds.items())
    seen = f"{count(n, 'rank')} over {backend}, tensor bytes / time: {each}"
    if wrong:
        raise Failed(
            f"{wrong} sums are wrong ({seen}); a device, its driver or a network card is broken: remove "
            "nodes one by one to find it"
        )
    link = speeds[max(speeds)] * 2 * (n - 1) / n
    least, reason = SLOWEST_LINK_BYTES_PER_S[(backend, min(num_nodes, 2))], ""
    if needed_bytes_per_s and backend == "nccl" and num_nodes > 1 and needed_bytes_per_s > least:
        least = needed_bytes_per_s
        reason = ", with which this model's gradients take as long as a step's computation"
    carried = f"{link / 1e9:.2f} GB/s on each link (× 2·(n−1)/n)"
    if link < least:
        raise Failed(
            f"slow: {carried} at 100 MB, below {least / 1e9:.3g} GB/s{reason}; {seen}; set "
            f"{'NCCL' if backend == 'nccl' else 'GLOO'}_SOCKET_IFNAME to the fast interface, or use nodes "
            "with a faster network"
        )
    return f"sums are correct; {seen}, {carried}, at least {least / 1e9:.3g} GB/s{reason}"


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
    advice = "do not train with this setup: compare the installed versions with constraints.txt"
    for name, plan in plans.items():
        # A mixture's batch may repeat a sequence where a small dataset's epochs meet.
        planned = Counter(plan.tolist())
        read = Counter(np.concatenate(actual[name]).tolist())
        if too_often := sorted(id_ for id_, n in read.items() if n > max(1, planned[id_])):
            readers = [str(r) for r, ids in enumerate(actual[name]) if np.isin(too_often[0], ids)]
            raise Failed(
                f"{count(len(too_often), 'sequence')} of {name} read more than once: {too_often[0]} by ranks "
                f"{', '.join(readers)}; {advice}"
            )
        missing, extra = (planned - read).total(), (read - planned).total()
        if missing or extra:
            raise Failed(
                f"{missing} of {count(len(plan), 'sequence')} of {name} read by no rank, and "
                f"{extra} unplanned; {advice}"
            )
    total = sum(len(plan) for plan in plans.values())
    return (
        f"{count(len(ranks), 'rank')} read {count(total, 'sequence')} of "
        f"{count(len(batches), 'global batch', 'global batches')} and the "
        "validation, each as planned"
    )
