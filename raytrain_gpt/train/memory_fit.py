"""Resolve `auto` for `micro_batch_sequences` and `activation_checkpointing` before every attempt.

1. Candidates are the divisors of a rank's share of the batch: a step then has the same sequences, only
   summed in another order.
2. On a GPU it takes the largest candidate whose predicted memory (`core/memory`) fits, and recomputes
   activations only if that is too small. On a CPU it is the largest that is fast.
3. If an attempt still runs out of memory, the run starts the next one with half the micro-batch.

A run that resumes with the same number of workers reuses its checkpoint's fit, so that it ends
bitwise like an uninterrupted one.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import ray
import torch

from raytrain_gpt.checkpoint.catalog import Checkpoint
from raytrain_gpt.cluster.failures import user_error_in
from raytrain_gpt.config.plan import (
    ActivationCheckpointing,
    Plan,
    for_workers,
    micro_batch_change,
    micro_batch_for,
)
from raytrain_gpt.config.schema import Config
from raytrain_gpt.config.sections import AUTO_MEMORY_FIELDS
from raytrain_gpt.config.wording import divisors
from raytrain_gpt.core.device import resolve_precision
from raytrain_gpt.core.memory import USABLE_FRACTION, MemoryModel
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.registry import count_model
from raytrain_gpt.errors import ClusterError
from raytrain_gpt.format import Log, amount, size

MODES: tuple[ActivationCheckpointing, ...] = ("none", "selective", "full")
"""Modes of activation checkpointing, from fastest to least memory."""
NCCL_BYTES = 2 * 2**30
"""Bytes of NCCL buffers on each of several GPUs; estimated."""
MIN_EFFICIENT_TOKENS = 2048
"""Tokens per GPU micro-batch. Below it, reading weights and accumulating gradients costs so much that
recomputing activations for a larger micro-batch may pay; estimated."""
MAX_CPU_TOKENS = 2048
"""Tokens per CPU micro-batch; more take memory and gain little speed (docs/memory.md)."""
MAX_GPU_TOKENS = 2**16
"""Tokens per GPU micro-batch; about half are estimated to saturate it."""
_MAX_LOGITS = 2**31 - 1
"""Logits per GPU micro-batch; above it, torch's compiled kernels use slower 64-bit indices."""
_OTHER_MEMORY_FIELDS = ("compile", "parallel", "use_gpu", "gpus_per_worker")
"""Fields that may change on resume and invalidate a checkpoint's fit."""
_GPU_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class MemoryFit:
    """A micro-batch, its activation checkpointing and the bytes it needs, 0 if unknown."""

    sequences: int
    activation_checkpointing: ActivationCheckpointing
    needed_bytes: float = 0


class MemorySearch(MemoryModel):
    """Search for the fit of a run whose `auto` is unresolved; `use_gpu` must be resolved."""

    @classmethod
    def of(cls, config: Config, world_size: int, vocab_size: int, bf16: bool) -> MemorySearch:
        return cls(config, GPTShape.of(config, vocab_size), bf16, world_size)

    @property
    def sizes(self) -> list[int]:
        """Allowed sequences per micro-batch, ascending."""
        micro = micro_batch_for(self.config, self.world_size)
        if micro != "auto":
            return [micro]
        most_tokens = MAX_CPU_TOKENS
        if self.config.cluster.use_gpu:
            most_tokens = min(MAX_GPU_TOKENS, _MAX_LOGITS // self.shape.padded_vocab_size)
        most = max(1, most_tokens // self.config.data.seq_len)
        share = self.config.batch_sequences // self.world_size
        return [sequences for sequences in divisors(share) if sequences <= most]

    @property
    def modes(self) -> tuple[ActivationCheckpointing, ...]:
        """Allowed modes of activation checkpointing, fastest first."""
        mode = self.config.train.activation_checkpointing
        return MODES if mode == "auto" else (mode,)

    def smallest(self) -> MemoryFit:
        """Return the candidate with the lowest memory, whether or not it fits."""
        return self._candidate(self.sizes[0], self.modes[-1])

    def _candidate(self, sequences: int, mode: ActivationCheckpointing) -> MemoryFit:
        return MemoryFit(sequences, mode, self.predict(sequences, mode).total)

    def largest(self, limit_bytes: float) -> MemoryFit | None:
        """Return the first mode that fits enough sequences, else the one that fits most, if any."""
        sizes, best = self.sizes, None
        enough = min(MIN_EFFICIENT_TOKENS / self.config.data.seq_len, sizes[-1])
        for mode in self.modes:
            fitting = bisect_right(sizes, limit_bytes, key=lambda n: self.predict(n, mode).total)
            if fitting and (best is None or sizes[fitting - 1] > best.sequences):
                best = self._candidate(sizes[fitting - 1], mode)
            if best is not None and best.sequences >= enough:
                break
        return best

    def fit(self, limit_bytes: float, room: str) -> MemoryFit:
        """Return the largest candidate that fits, or raise a ClusterError that names the `room`."""
        if (found := self.largest(limit_bytes)) is not None:
            return found
        least, shape = self.smallest(), self.shape
        raise ClusterError(
            f"{least.sequences} × {shape.seq_len} tokens in a micro-batch do not fit: "
            f"{amount(count_model(shape).num_parameters)} parameters with activation_checkpointing="
            f"{least.activation_checkpointing} need about {size(least.needed_bytes)}, but training may "
            f"use only {room}; {self.advice}, or use devices with more memory"
        )

    @property
    def advice(self) -> str:
        """What needs less memory, cheapest first."""
        train, ways = self.config.train, list[str]()
        if self.sizes[0] > 1:
            ways.append(f"set micro_batch_sequences to {1 if train.exact else 'auto'}")
        if self.modes[-1] != MODES[-1]:
            ways.append("set activation_checkpointing to auto")
        if self.num_shards < self.world_size and not train.exact:
            ways.append("set parallel to fsdp")
        return ", ".join([*ways, "lower num_layers"])


@dataclass(frozen=True)
class GpuFacts:
    """Name, bytes and 16-bit precision of the GPU that workers get."""

    name: str
    total_bytes: float
    bf16: bool


def gpu_limit_bytes(total_bytes: float, world_size: int, share: float = 1.0) -> float:
    """Return the memory budget of a GPU, or of a worker's share of one, in bytes."""
    return share * USABLE_FRACTION * total_bytes - NCCL_BYTES * (world_size > 1)


def fit_memory(
    config: Config,
    world_size: int,
    vocab_size: int,
    log: Log,
    resumed: Checkpoint | None = None,
) -> Plan:
    """Plan a run whose micro-batches fit its workers' memory; ClusterError if not even one sequence does.

    A RayError means that the task that asks a GPU for its facts died, or waited too long for one.
    """
    if change := micro_batch_change(config, world_size):
        log(change)
    config = for_workers(config, world_size)
    micro, mode = config.train.micro_batch_sequences, config.train.activation_checkpointing
    if micro != "auto" and mode != "auto":
        return Plan.of(config, world_size, micro, mode)
    if resumed is not None and (saved := fit_from_checkpoint(config, world_size, resumed)):
        fit, why = saved, f", from the checkpoint of step {resumed.state.step}"
    else:
        gpu = gpu_facts(config) if config.cluster.use_gpu else None
        search = MemorySearch.of(config, world_size, vocab_size, gpu is not None and gpu.bf16)
        if gpu is None:
            fit, why = MemoryFit(search.sizes[-1], search.modes[0]), ""
        else:
            share = config.cluster.gpus_per_worker
            limit_bytes = gpu_limit_bytes(gpu.total_bytes, world_size, share)
            room = f"{size(max(limit_bytes, 0))} of {gpu.name}"
            fit = search.fit(limit_bytes, room)
            why = f" (about {size(fit.needed_bytes)} of {room})"
    micro_auto, mode_auto = (" auto:" if one == "auto" else "" for one in (micro, mode))
    log(
        f"micro_batch_sequences{micro_auto} {fit.sequences} of {config.batch_sequences // world_size}, "
        f"activation_checkpointing{mode_auto} {fit.activation_checkpointing}{why}"
    )
    return Plan.of(config, world_size, fit.sequences, fit.activation_checkpointing)


def fit_from_checkpoint(config: Config, world_size: int, resumed: Checkpoint) -> MemoryFit | None:
    """Return the memory fit stored in the checkpoint, or None if the setup has changed."""
    before, now = resumed.config(config.registry).field_values(), config.field_values()
    same = all(before[name] == now[name] for name in _OTHER_MEMORY_FIELDS)
    same &= all(now[name] in ("auto", before[name]) for name in AUTO_MEMORY_FIELDS)
    micro, mode = (before[name] for name in AUTO_MEMORY_FIELDS)
    if (
        not same
        or resumed.state.num_workers != world_size
        or config.batch_sequences // world_size % micro
    ):
        return None
    return MemoryFit(micro, mode)


def gpu_here(precision: str) -> GpuFacts:
    """Return the facts of this process's GPU."""
    device = torch.device("cuda")
    properties = torch.cuda.get_device_properties(device)
    bf16 = resolve_precision(precision, device) != "fp32"
    return GpuFacts(properties.name, properties.total_memory, bf16)


def gpu_facts(config: Config) -> GpuFacts:
    """Ask for the facts of this process's GPU in local mode, else of a worker's, by a task that waits."""
    c, precision = config.cluster, config.train.precision
    if c.is_local:
        return gpu_here(precision)
    needs = {"num_cpus": c.num_cpus, "num_gpus": c.gpus_per_worker}
    task = ray.remote(max_retries=0, max_calls=1, **needs)(gpu_here).remote(precision)
    try:
        found: GpuFacts = ray.get(task, timeout=_GPU_TIMEOUT_S)
        return found
    except ray.exceptions.RayError as error:
        ray.cancel(task, force=True)  # it may still wait for a GPU
        raise user_error_in(error) or error from None
