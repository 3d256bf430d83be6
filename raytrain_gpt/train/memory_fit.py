"""Resolves `auto` of `micro_batch_sequences` and `activation_checkpointing` before every attempt.

- GPU: a task with a worker's resources, or the process itself in local mode, takes real steps. Sharded
  training needs several processes, so its memory is predicted for the task's GPU instead.
- CPU: predicted for the memory that Ray reports, divided among a node's workers.

A run that resumes with the same number of workers reuses its checkpoint's fit, so that it ends
bitwise like an uninterrupted one.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import ray
import torch

from raytrain_gpt.checkpoint.checkpoint_state import CheckpointState
from raytrain_gpt.cluster.capacity import Resources
from raytrain_gpt.cluster.compilers import check_compiler
from raytrain_gpt.cluster.connection import cluster_resources
from raytrain_gpt.cluster.failures import user_error_in
from raytrain_gpt.config.batch import for_workers, micro_batch_change
from raytrain_gpt.config.resolved import (
    USABLE_FRACTION,
    FittedConfig,
    RunPlan,
    SizedConfig,
)
from raytrain_gpt.config.schema import Config, parse_config
from raytrain_gpt.config.sections import AUTO_MEMORY_FIELDS
from raytrain_gpt.core.device import resolve_precision, set_cuda_defaults
from raytrain_gpt.core.memory import MemoryModel, checkpoint_bytes
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.registry import count_model
from raytrain_gpt.errors import ClusterError, Interrupted
from raytrain_gpt.format import Log, amount, size
from raytrain_gpt.train.memory_search import (
    MeasureBytes,
    MemoryFit,
    MemorySearch,
    gpu_limit_bytes,
)

_OTHER_MEMORY_FIELDS = ("compile", "parallel", "use_gpu", "gpus_per_worker")
"""Fields that may change on resume and invalidate a checkpoint's fit."""
_CONTEXT_BYTES = 2**30
"""GPU memory of a process besides its tensors: 0.9 GB measured with small models on an H100."""
PROCESS_BYTES = 2**30
"""Reserve for a CPU worker's process: Python, torch, Ray, batches."""
POLL_S = 0.5
_PROBE_TIMEOUT_S = 1800.0
"""Includes the wait for a worker's resources and a few compilations."""

Decision = tuple[MemoryFit, str]
"""The fit and its reason, as printed."""


def fit_memory(
    config: FittedConfig,
    world_size: int,
    vocab_size: int,
    log: Log,
    resources: Callable[[], Resources] = cluster_resources,
    *,
    resumed: CheckpointState | None = None,
    stop: threading.Event | None = None,
    is_trial: bool = False,
) -> RunPlan:
    """Plan a run whose micro-batches fit the memory of its workers.

    Args:
        stop: Set by a signal; ends a probe.
        is_trial: Belongs to a sweep, whose trials share the nodes.

    Raises:
        ClusterError: not even one sequence fits.
        Interrupted: `stop` was set during the probe.
        ray.exceptions.RayError: the probe died, or got no resources.
    """
    if change := micro_batch_change(config, world_size):
        log(change)
    config = for_workers(config, world_size)
    micro, mode = config.train.micro_batch_sequences, config.train.activation_checkpointing
    if micro != "auto" and mode != "auto":
        return RunPlan.of(config, world_size, micro, mode)
    if resumed is not None and (saved := fit_from_checkpoint(config, world_size, resumed)):
        fit, why = saved, f", from the checkpoint of step {resumed.step}"
    elif config.cluster.is_local and config.cluster.use_gpu:
        fit, why = _fit_gpu(config, world_size, vocab_size)
        torch.cuda.empty_cache()
    elif config.cluster.use_gpu:
        found: Decision = _on_gpu(
            stop or threading.Event(), _fit_gpu, config, world_size, vocab_size
        )
        fit, why = found
    else:
        search = _search(config, world_size, vocab_size, torch.device("cpu"))
        limit_bytes = cpu_limit_bytes(config, world_size, vocab_size, resources(), is_trial)
        fit, why = _decide(search, limit_bytes, "per worker, estimated")
    log(describe(config, world_size, fit) + why)
    return RunPlan.of(config, world_size, fit.sequences, fit.activation_checkpointing)


def describe(config: Config, world_size: int, fit: MemoryFit) -> str:
    """Describe how each `auto` was resolved."""
    micro_auto, mode_auto = (
        " auto:" * (config.field_values()[name] == "auto") for name in AUTO_MEMORY_FIELDS
    )
    return (
        f"micro_batch_sequences{micro_auto} {fit.sequences} of {config.batch_sequences // world_size}, "
        f"activation_checkpointing{mode_auto} {fit.activation_checkpointing}"
    )


def fit_from_checkpoint(
    config: FittedConfig, world_size: int, state: CheckpointState
) -> MemoryFit | None:
    """Memory fit stored in the checkpoint, or None if the setup has changed."""
    before, now = parse_config(state.config, "the checkpoint").field_values(), config.field_values()
    same = all(before[name] == now[name] for name in _OTHER_MEMORY_FIELDS)
    same &= all(now[name] in ("auto", before[name]) for name in AUTO_MEMORY_FIELDS)
    micro, mode = (before[name] for name in AUTO_MEMORY_FIELDS)
    if not same or state.num_workers != world_size or config.batch_sequences // world_size % micro:
        return None
    return MemoryFit(micro, mode)


def cpu_limit_bytes(
    config: FittedConfig,
    world_size: int,
    vocab_size: int,
    resources: Resources,
    is_trial: bool = False,
) -> float:
    """Memory budget of one CPU worker in bytes; infinite if Ray reports none.

    A trial's budget assumes that other trials fill the nodes' CPUs.
    """
    cpus = config.cluster.cpus_per_worker
    processes = math.inf if is_trial else world_size
    shares = [
        node.memory_bytes / min(processes, int(node.cpus // cpus))
        for node in resources.nodes
        if node.cpus >= cpus
    ]
    # Every worker copies its checkpoint in memory before writing it.
    copy_bytes = checkpoint_bytes(GPTShape.of(config, vocab_size), config.optim)
    return min(shares, default=math.inf) * USABLE_FRACTION - PROCESS_BYTES - copy_bytes


def probe_sharing(config: SizedConfig, vocab_size: int, stop: threading.Event) -> int:
    """Return how many runs of one worker fit the memory of a GPU; for errors see `fit_memory`."""
    number: int = _on_gpu(stop, fit_sharing, config, vocab_size)
    return number


def fit_sharing(config: SizedConfig, vocab_size: int) -> int:
    """Measure how many runs like this one share this machine's GPU; at least one."""
    set_cuda_defaults()
    device = torch.device("cuda")
    train, usable = config.train, torch.cuda.get_device_properties(device).total_memory
    search = _search(config, 1, vocab_size, device)
    assert train.micro_batch_sequences != "auto"
    assert train.activation_checkpointing != "auto"
    needed = search.measure(train.micro_batch_sequences, train.activation_checkpointing, device)
    return max(1, int(usable * USABLE_FRACTION // (needed + _CONTEXT_BYTES)))


def _on_gpu(
    stop: threading.Event, measure: Callable[..., Any], config: SizedConfig, *args: Any
) -> Any:
    """Run a measurement with a worker's resources."""
    c = config.cluster
    # `max_calls=1` ends the process after the task, which frees its GPU memory.
    needs = {"num_cpus": c.cpus_per_worker, "num_gpus": c.gpus_per_worker}
    task = ray.remote(max_retries=0, max_calls=1, **needs)(measure).remote(config, *args)
    deadline = time.monotonic() + _PROBE_TIMEOUT_S
    while not ray.wait([task], timeout=POLL_S)[0]:
        if stop.is_set():
            ray.cancel(task, force=True)
            raise Interrupted(
                "interrupted during the GPU memory probe; run the same command to start again"
            )
        if time.monotonic() > deadline:
            ray.cancel(task, force=True)
            raise ray.exceptions.GetTimeoutError(
                f"the GPU memory probe timed out after {_PROBE_TIMEOUT_S:g} s"
            )
    try:
        return ray.get(task)
    except ray.exceptions.RayError as error:
        raise user_error_in(error) or error from None


def _fit_gpu(config: FittedConfig, world_size: int, vocab_size: int) -> Decision:
    set_cuda_defaults()
    check_compiler(config, on_gpu=True, where=f"node {socket.gethostname()}")
    device = torch.device("cuda")
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    limit_bytes = gpu_limit_bytes(total_bytes, world_size, config.cluster.gpus_per_worker)
    torch.cuda.set_per_process_memory_fraction(limit_bytes / total_bytes)
    limit_bytes = min(limit_bytes, torch.cuda.mem_get_info(device)[0])
    search = _search(config, world_size, vocab_size, device)
    where = f"of {torch.cuda.get_device_name(device)}"
    if search.memory.num_shards > 1:
        return _decide(search, limit_bytes, f"{where}, estimated")
    return _decide(
        search, limit_bytes, f"{where}, measured", partial(search.measure, device=device)
    )


def _search(
    config: SizedConfig, world_size: int, vocab_size: int, device: torch.device
) -> MemorySearch:
    bf16 = resolve_precision(config.train.precision, device) != "fp32"
    shape = GPTShape.of(config, vocab_size)
    return MemorySearch(config, world_size, MemoryModel.of(config, world_size, shape, bf16))


def _decide(
    search: MemorySearch, limit_bytes: float, where: str, measured: MeasureBytes | None = None
) -> Decision:
    fit = search.largest(limit_bytes, measured)
    if fit is not None:
        room = "" if math.isinf(limit_bytes) else f" of {size(limit_bytes)}"
        return fit, f" ({size(fit.needed_bytes)}{room} {where})"
    least, shape = search.least(), search.memory.shape
    raise ClusterError(
        f"{least.sequences} × {shape.seq_len} tokens in a micro-batch do not fit: "
        f"{amount(count_model(shape).num_parameters)} parameters with activation_checkpointing="
        f"{least.activation_checkpointing} need about {size(least.needed_bytes)}, but training may use "
        f"only {size(max(limit_bytes, 0))} {where}; {search.remedy}, or use devices with more memory"
    )
