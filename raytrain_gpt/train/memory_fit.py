"""Resolves `auto` of `micro_batch_sequences` and `activation_checkpointing` before every attempt.

1. Candidates are the divisors of a rank's share of the batch: a step then has the same sequences, only
   summed in a different order.
2. The largest candidate is taken whose predicted memory (`core/memory`) fits the device, and activations
   are recomputed only if it is too small.
3. If an attempt still runs out of memory, the supervisor starts the next one with half the micro-batch.

A run that resumes with the same number of workers reuses its checkpoint's fit, so that it ends
bitwise like an uninterrupted one.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import ray
import torch

from raytrain_gpt.checkpoint.checkpoint_state import CheckpointState
from raytrain_gpt.cluster.capacity import Resources
from raytrain_gpt.cluster.connection import cluster_resources
from raytrain_gpt.cluster.failures import user_error_in
from raytrain_gpt.config.resolved import (
    USABLE_FRACTION,
    ActivationCheckpointing,
    RunPlan,
    for_workers,
    micro_batch_change,
    micro_batch_for,
    workers_of,
)
from raytrain_gpt.config.schema import Config, parse_config
from raytrain_gpt.config.sections import AUTO_MEMORY_FIELDS
from raytrain_gpt.config.wording import divisors
from raytrain_gpt.core.device import resolve_precision
from raytrain_gpt.core.memory import MemoryModel, checkpoint_bytes
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.registry import count_model
from raytrain_gpt.errors import ClusterError, Interrupted
from raytrain_gpt.format import Log, amount, size

MODES: tuple[ActivationCheckpointing, ...] = ("none", "selective", "full")
"""Modes of activation checkpointing, from fastest to least memory."""
NCCL_BYTES = 2 * 2**30
"""Bytes of NCCL buffers on each of several GPUs; estimated."""
MIN_EFFICIENT_TOKENS = 2048
"""Tokens per GPU micro-batch. Below it, reading weights and accumulating gradients costs so much that
recomputing activations for a larger micro-batch may pay; estimated."""
MAX_CPU_TOKENS = 2048
"""Tokens per CPU micro-batch; more take memory and gain little speed (docs/training.md)."""
MAX_GPU_TOKENS = 2**16
"""Tokens per GPU micro-batch; about half are estimated to saturate it."""
_MAX_LOGITS = 2**31 - 1
"""Logits per GPU micro-batch; above it, torch's compiled kernels use slower 64-bit indices."""
_OTHER_MEMORY_FIELDS = ("compile", "parallel", "use_gpu", "gpus_per_worker")
"""Fields that may change on resume and invalidate a checkpoint's fit."""
_CONTEXT_BYTES = 2**30
"""GPU memory of a process besides its tensors: 0.9 GB measured with small models on an H100."""
PROCESS_BYTES = 2**30
"""Reserve for a CPU worker's process: Python, torch, Ray, batches."""
_POLL_S = 0.5
_GPU_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class MemoryFit:
    """A micro-batch, its activation checkpointing and the bytes it needs, 0 if unknown."""

    sequences: int
    activation_checkpointing: ActivationCheckpointing
    needed_bytes: float = 0


@dataclass(frozen=True)
class MemorySearch:
    """Searches the fit of a run whose `auto` is unresolved; `use_gpu` must be resolved."""

    config: Config
    world_size: int
    memory: MemoryModel

    @classmethod
    def of(cls, config: Config, world_size: int, vocab_size: int, bf16: bool) -> MemorySearch:
        shape = GPTShape.of(config, vocab_size)
        return cls(config, world_size, MemoryModel.of(config, world_size, shape, bf16))

    @property
    def sizes(self) -> list[int]:
        """Allowed sequences per micro-batch, ascending."""
        micro = micro_batch_for(self.config, self.world_size)
        if micro != "auto":
            return [micro]
        most_tokens = MAX_CPU_TOKENS
        if self.config.cluster.use_gpu:
            most_tokens = min(MAX_GPU_TOKENS, _MAX_LOGITS // self.memory.shape.padded_vocab_size)
        most = max(1, most_tokens // self.config.data.seq_len)
        share = self.config.batch_sequences // self.world_size
        return [sequences for sequences in divisors(share) if sequences <= most]

    @property
    def modes(self) -> tuple[ActivationCheckpointing, ...]:
        """Allowed modes of activation checkpointing, fastest first."""
        mode = self.config.train.activation_checkpointing
        return MODES if mode == "auto" else (mode,)

    def predict(self, sequences: int, mode: ActivationCheckpointing) -> float:
        """Predicted bytes of a candidate."""
        return self.memory.predict(sequences, mode).total

    def smallest(self) -> MemoryFit:
        """Candidate with the lowest memory, whether or not it fits."""
        sequences, mode = self.sizes[0], self.modes[-1]
        return MemoryFit(sequences, mode, self.predict(sequences, mode))

    def largest(self, limit_bytes: float) -> MemoryFit | None:
        """First mode that fits enough sequences, else the one that fits most; None if none fits."""
        sizes, best = self.sizes, None
        enough = min(MIN_EFFICIENT_TOKENS / self.config.data.seq_len, sizes[-1])
        for mode in self.modes:
            fitting = bisect_right(sizes, limit_bytes, key=lambda n: self.predict(n, mode))
            if fitting and (best is None or sizes[fitting - 1] > best.sequences):
                sequences = sizes[fitting - 1]
                best = MemoryFit(sequences, mode, self.predict(sequences, mode))
            if best is not None and best.sequences >= enough:
                break
        return best

    @property
    def advice(self) -> str:
        """What needs less memory, cheapest first."""
        train, ways = self.config.train, list[str]()
        if self.sizes[0] > 1:
            ways.append(f"set micro_batch_sequences to {1 if train.exact else 'auto'}")
        if self.modes[-1] != MODES[-1]:
            ways.append("set activation_checkpointing to auto")
        if self.memory.num_shards < self.world_size and not train.exact:
            ways.append("set parallel to fsdp")
        return ", ".join([*ways, "lower num_layers"])


@dataclass(frozen=True)
class GpuFacts:
    """Name, bytes and 16-bit precision of the GPU that workers get."""

    name: str
    total_bytes: float
    bf16: bool

    @classmethod
    def here(cls, precision: str) -> GpuFacts:
        device = torch.device("cuda")
        properties = torch.cuda.get_device_properties(device)
        bf16 = resolve_precision(precision, device) != "fp32"
        return cls(properties.name, properties.total_memory, bf16)


def gpu_limit_bytes(total_bytes: float, world_size: int, share: float = 1.0) -> float:
    """Memory budget of a GPU, or of a worker's share of one, in bytes."""
    return share * USABLE_FRACTION * total_bytes - NCCL_BYTES * (world_size > 1)


def fit_memory(
    config: Config,
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
        stop: Set by a signal; ends the wait for a GPU.
        is_trial: Belongs to a sweep, whose trials share the nodes.

    Raises:
        ClusterError: not even one sequence fits.
        Interrupted: `stop` was set during the wait.
        ray.exceptions.RayError: the task that looks at a GPU died.
    """
    if change := micro_batch_change(config, world_size):
        log(change)
    config = for_workers(config, world_size)
    micro, mode = config.train.micro_batch_sequences, config.train.activation_checkpointing
    if micro != "auto" and mode != "auto":
        return RunPlan.of(config, world_size, micro, mode)
    if resumed is not None and (saved := fit_from_checkpoint(config, world_size, resumed)):
        fit, why = saved, f", from the checkpoint of step {resumed.step}"
    else:
        if config.cluster.use_gpu:
            gpu = gpu_facts(config, stop)
            limit_bytes = gpu_limit_bytes(
                gpu.total_bytes, world_size, config.cluster.gpus_per_worker
            )
            bf16, where = gpu.bf16, f"of {gpu.name}, estimated"
        else:
            limit_bytes = cpu_limit_bytes(config, world_size, vocab_size, resources(), is_trial)
            bf16 = resolve_precision(config.train.precision, torch.device("cpu")) != "fp32"
            where = "per worker, estimated"
        fit, why = _decide(
            MemorySearch.of(config, world_size, vocab_size, bf16), limit_bytes, where
        )
    log(describe(config, world_size, fit) + why)
    return RunPlan.of(config, world_size, fit.sequences, fit.activation_checkpointing)


def _decide(search: MemorySearch, limit_bytes: float, where: str) -> tuple[MemoryFit, str]:
    if (fit := search.largest(limit_bytes)) is not None:
        room = "" if math.isinf(limit_bytes) else f" of {size(limit_bytes)}"
        return fit, f" ({size(fit.needed_bytes)}{room} {where})"
    least, shape = search.smallest(), search.memory.shape
    raise ClusterError(
        f"{least.sequences} × {shape.seq_len} tokens in a micro-batch do not fit: "
        f"{amount(count_model(shape).num_parameters)} parameters with activation_checkpointing="
        f"{least.activation_checkpointing} need about {size(least.needed_bytes)}, but training may use "
        f"only {size(max(limit_bytes, 0))} {where}; {search.advice}, or use devices with more memory"
    )


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
    config: Config, world_size: int, state: CheckpointState
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
    config: Config,
    world_size: int,
    vocab_size: int,
    resources: Resources,
    is_trial: bool = False,
) -> float:
    """Memory budget of one CPU worker in bytes; infinite if Ray reports none.

    A trial's budget assumes that other trials fill the nodes' CPUs.
    """
    cpus = workers_of(config).cpus_per_worker
    processes = math.inf if is_trial else world_size
    shares = [
        node.memory_bytes / min(processes, int(node.cpus // cpus))
        for node in resources.nodes
        if node.cpus >= cpus
    ]
    # Every worker copies its checkpoint in memory before writing it.
    copy_bytes = checkpoint_bytes(GPTShape.of(config, vocab_size), config.optim)
    return min(shares, default=math.inf) * USABLE_FRACTION - PROCESS_BYTES - copy_bytes


def runs_on_gpu(config: Config, vocab_size: int, gpu: GpuFacts) -> int:
    """Return how many runs of one worker, without `auto`, fit the memory of a GPU; at least one."""
    needed = MemorySearch.of(config, 1, vocab_size, gpu.bf16).smallest().needed_bytes
    return max(1, int(gpu.total_bytes * USABLE_FRACTION // (needed + _CONTEXT_BYTES)))


def gpu_facts(config: Config, stop: threading.Event | None = None) -> GpuFacts:
    """Look at the GPU of this process in local mode, else of a worker, for which a task waits."""
    c, precision = workers_of(config), config.train.precision
    if c.is_local:
        return GpuFacts.here(precision)
    needs = {"num_cpus": c.cpus_per_worker, "num_gpus": c.gpus_per_worker}
    task = ray.remote(max_retries=0, max_calls=1, **needs)(GpuFacts.here).remote(precision)
    deadline = time.monotonic() + _GPU_TIMEOUT_S
    while not ray.wait([task], timeout=_POLL_S)[0]:
        if stop is not None and stop.is_set():
            ray.cancel(task, force=True)
            raise Interrupted("interrupted; run the same command to start again")
        if time.monotonic() > deadline:
            ray.cancel(task, force=True)
            raise ray.exceptions.GetTimeoutError(f"no GPU was free within {_GPU_TIMEOUT_S:g} s")
    try:
        found: GpuFacts = ray.get(task)
        return found
    except ray.exceptions.RayError as error:
        raise user_error_in(error) or error from None
