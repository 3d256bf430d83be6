"""`micro_batch_sequences: auto` and `activation_checkpointing: auto`, decided before every attempt.

- On GPUs a task with a worker's own resources takes real steps and sees what fits. Of sharded
  training one process cannot take a step: there it is counted what fits that GPU.
- On CPUs it is counted what fits the memory that Ray knows of, shared among a node's workers.

A run that goes on with as many workers keeps what its checkpoint was trained with, so that it ends as
the unbroken one, bit for bit.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import ray
import torch

from raytrain_gpt.checkpoint.catalog import CheckpointState
from raytrain_gpt.cluster.capacity import Resources, num_async_evaluations
from raytrain_gpt.cluster.connection import cluster_resources
from raytrain_gpt.cluster.failures import user_error_in
from raytrain_gpt.config.batch import micro_batch_for
from raytrain_gpt.config.resolved import ActivationCheckpointing, FittedConfig, RunPlan
from raytrain_gpt.config.schema import Config, parse_config
from raytrain_gpt.core.device import resolve_precision
from raytrain_gpt.core.memory import STATE_BYTES_PER_PARAMETER
from raytrain_gpt.core.memory_fit import USABLE_FRACTION, Fit, counted, fit, least, tried, try_steps
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.errors import ClusterError, Interrupted
from raytrain_gpt.format import amount, size

AUTO_FIELDS = ("micro_batch_sequences", "activation_checkpointing")
OTHER_MEMORY_FIELDS = ("compile", "parallel", "use_gpu", "gpus_per_worker")
"""May change when a run goes on; then another micro-batch may fit."""
PROCESS_BYTES = 2**30
"""Left for a worker's process on a CPU: Python, torch, Ray, batches."""
POLL_S = 0.5
TRY_WITHIN_S = 1800.0
"""Waiting for a worker's resources and a few compilations included."""

Log = Callable[[str], None]


@dataclass(frozen=True)
class Decision:
    """What was decided, and by what.

    Attributes:
        fit: What fits; None: nothing does.
        least: What is counted to need least.
        limit_bytes: That training may use.
        how: The device, and how it is known, for people.
    """

    fit: Fit | None
    least: Fit
    limit_bytes: float
    how: str


def fit_memory(
    config: FittedConfig,
    world_size: int,
    vocab_size: int,
    log: Log,
    *,
    resumed: CheckpointState | None = None,
    stop: threading.Event | None = None,
    is_trial: bool = False,
) -> RunPlan:
    """The plan of a run whose micro-batches fit the memory of its workers.

    Args:
        config: Fitted to the connected cluster.
        world_size: Number of workers.
        vocab_size: Of the data's tokenizer.
        log: Gets a line of what was decided, if anything was.
        resumed: Of the checkpoint that the run goes on from.
        stop: Set by a signal.
        is_trial: Of a sweep, whose trials share the nodes.

    Raises:
        ClusterError: not even one sequence fits.
        Interrupted: `stop` was set while it was tried.
        ray.exceptions.RayError: the task that tries it died, or found no resources.
    """
    config = config.updated({"micro_batch_sequences": micro_batch_for(config, world_size)})
    if (given := given_fit(config)) is not None:
        return _plan(config, world_size, given)
    if resumed is not None and (kept := kept_fit(config, world_size, resumed)):
        log(f"{decided(config, world_size, kept)}, as the checkpoint of step {resumed.step} had it")
        return _plan(config, world_size, kept)
    if config.cluster.use_gpu:
        found = _on_gpu(config, world_size, vocab_size, stop or threading.Event())
    else:
        found = on_cpu(config, world_size, vocab_size, cluster_resources(), is_trial)
    if found.fit is None:
        raise ClusterError(_nothing_fits(config, GPTShape.of(config, vocab_size), found))
    room = "" if math.isinf(found.limit_bytes) else f" of {size(found.limit_bytes)}"
    log(
        f"{decided(config, world_size, found.fit)} ({size(found.fit.needed_bytes)}{room} {found.how})"
    )
    return _plan(config, world_size, found.fit)


def _plan(config: FittedConfig, world_size: int, found: Fit) -> RunPlan:
    return RunPlan.of(config, world_size, found.sequences, found.activation_checkpointing)


def counted_fit(
    config: Config, world_size: int, shape: GPTShape, bf16: bool, limit_bytes: float, on_gpu: bool
) -> Fit:
    """What fits by counting alone; where nothing does, what needs least.

    Args:
        config: Its micro-batch fits the world size, or is auto.
        world_size: Number of workers; divides the batch.
        shape: Of the model.
        bf16: Whether the forward pass runs in 16 bits.
        limit_bytes: Of a device's memory that training may use.
        on_gpu: Whether it is a GPU's.
    """
    if (given := given_fit(config)) is not None:
        return given
    on_device = config.updated({"use_gpu": on_gpu})
    found = count(on_device, world_size, shape, bf16, limit_bytes, "counted")
    return found.fit or found.least


def given_fit(config: Config) -> Fit | None:
    """What the configuration itself says; None where it leaves anything to the memory."""
    micro, mode = config.train.micro_batch_sequences, config.train.activation_checkpointing
    return None if micro == "auto" or mode == "auto" else Fit(micro, mode, 0)


def decided(config: Config, world_size: int, found: Fit) -> str:
    """What became of each `auto`, for people."""
    micro_auto, mode_auto = (
        " auto:" * (config.field_values()[name] == "auto") for name in AUTO_FIELDS
    )
    return (
        f"micro_batch_sequences{micro_auto} {found.sequences} of {config.batch_sequences // world_size}, "
        f"activation_checkpointing{mode_auto} {found.activation_checkpointing}"
    )


def kept_fit(config: FittedConfig, world_size: int, state: CheckpointState) -> Fit | None:
    """What a checkpoint was trained with, None where that is no answer for this run any more.

    Args:
        config: Of the run now.
        world_size: Of the run now.
        state: Of the checkpoint that it goes on from.
    """
    before, now = parse_config(state.config, "the checkpoint").field_values(), config.field_values()
    same = all(before[name] == now[name] for name in OTHER_MEMORY_FIELDS)
    same &= all(now[name] in ("auto", before[name]) for name in AUTO_FIELDS)
    micro, mode = (before[name] for name in AUTO_FIELDS)
    if not same or state.num_workers != world_size or config.batch_sequences // world_size % micro:
        return None
    return Fit(micro, mode, 0)


def on_cpu(
    config: FittedConfig,
    world_size: int,
    vocab_size: int,
    resources: Resources,
    is_trial: bool = False,
) -> Decision:
    """What is counted to fit a worker's share of the nodes' memory.

    Args:
        config: Fitted to the cluster.
        world_size: Number of workers.
        vocab_size: Of the data's tokenizer.
        resources: Of the cluster.
        is_trial: Other trials may be on a node, as many as it has CPUs for.
    """
    cpus = config.cluster.cpus_per_worker
    processes = math.inf if is_trial else world_size + num_async_evaluations(config)
    shares = [
        node.memory_bytes / min(processes, int(node.cpus // cpus))
        for node in resources.nodes
        if node.cpus >= cpus
    ]
    shape = GPTShape.of(config, vocab_size)
    copies = STATE_BYTES_PER_PARAMETER * shape.num_parameters  # of a checkpoint
    limit_bytes = min(shares, default=math.inf) * USABLE_FRACTION - PROCESS_BYTES - copies
    bf16 = resolve_precision(config.train.precision, torch.device("cpu")) != "fp32"
    return count(config, world_size, shape, bf16, limit_bytes, "a worker, counted")


def count(
    config: Config, world_size: int, shape: GPTShape, bf16: bool, limit_bytes: float, how: str
) -> Decision:
    """What is counted to fit a limit.

    Args:
        config: With `use_gpu` decided.
        world_size: Number of workers.
        shape: Of the model.
        bf16: Whether the forward pass runs in 16 bits.
        limit_bytes: That training may use.
        how: The device, for people.
    """
    found = fit(config, world_size, counted(config, world_size, shape, bf16, limit_bytes))
    return Decision(found, least(config, world_size, shape, bf16), limit_bytes, how)


def _on_gpu(
    config: FittedConfig, world_size: int, vocab_size: int, stop: threading.Event
) -> Decision:
    """What a task with a worker's resources found to fit its GPU."""
    c = config.cluster
    task = _try.options(num_cpus=c.cpus_per_worker, num_gpus=c.gpus_per_worker).remote(
        config, world_size, vocab_size
    )
    started = time.monotonic()
    while not ray.wait([task], timeout=POLL_S)[0]:
        late = time.monotonic() - started > TRY_WITHIN_S
        if stop.is_set() or late:
            ray.cancel(task, force=True)
        if stop.is_set():
            raise Interrupted(
                "interrupted while it was tried what fits the GPU; the same command goes on"
            )
        if late:
            raise ray.exceptions.GetTimeoutError(
                f"nobody found out within {TRY_WITHIN_S:g} s what fits a GPU"
            )
    try:
        found: Decision = ray.get(task)
        return found
    except ray.exceptions.RayError as error:
        raise user_error_in(error) or error from None


@ray.remote(max_retries=0, max_calls=1)  # type: ignore[untyped-decorator]
def _try(config: FittedConfig, world_size: int, vocab_size: int) -> Decision:
    """Take steps on a GPU, in a process that gives its memory back by ending."""
    device = torch.device("cuda")
    fraction = USABLE_FRACTION * config.cluster.gpus_per_worker
    torch.cuda.set_per_process_memory_fraction(fraction)
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    limit_bytes = min(fraction * total_bytes, torch.cuda.mem_get_info(device)[0])
    bf16 = resolve_precision(config.train.precision, device) != "fp32"
    shape, name = GPTShape.of(config, vocab_size), torch.cuda.get_device_name(device)
    if config.train.parallel == "fsdp" and world_size > 1:
        return count(config, world_size, shape, bf16, limit_bytes, f"of {name}, counted")

    def steps(sequences: int, mode: ActivationCheckpointing) -> int:
        return try_steps(config, sequences, mode, world_size, vocab_size, device)

    found = fit(
        config,
        world_size,
        tried(steps),
        counted(config, world_size, shape, bf16, limit_bytes),
    )
    return Decision(found, least(config, world_size, shape, bf16), limit_bytes, f"of {name}, tried")


def _nothing_fits(config: Config, shape: GPTShape, found: Decision) -> str:
    ways = ["a smaller num_layers, embd_size or seq_len"]
    if config.train.micro_batch_sequences != "auto":
        ways.insert(0, "micro_batch_sequences to auto")
    if config.train.parallel != "fsdp":
        ways.append("parallel to fsdp with more num_workers")
    return (
        f"{found.least.sequences} × {shape.seq_len} tokens in a micro-batch do not fit: "
        f"{amount(shape.num_parameters)} parameters with activation_checkpointing="
        f"{found.least.activation_checkpointing} are counted to need {size(found.least.needed_bytes)}, "
        f"training may use {size(max(found.limit_bytes, 0))} {found.how}; set {' or '.join(ways)}, "
        "or use a device with more memory"
    )
