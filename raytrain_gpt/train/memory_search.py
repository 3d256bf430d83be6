"""The micro-batch and activation checkpointing that fit a device's memory.

1. Candidates are the divisors of a rank's share of the batch: a step then has the same sequences, only
   summed in a different order.
2. `MemoryModel` predicts the memory of a candidate; on a GPU `measure` takes real steps with it.
3. `largest` picks the largest candidate that fits, and recomputes activations only if it is too small.
4. If nothing fits, `remedy` names the settings that need less memory.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import torch

from raytrain_gpt.config.arithmetic import divisors
from raytrain_gpt.config.batch import micro_batch_for
from raytrain_gpt.config.resolved import USABLE_FRACTION, ActivationCheckpointing
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.memory import MemoryModel
from raytrain_gpt.train.probe import probe_steps

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

MeasureBytes = Callable[[int, ActivationCheckpointing], float]
"""Bytes needed by a number of sequences and a mode; infinite if out of memory."""


def gpu_limit_bytes(total_bytes: float, world_size: int, share: float = 1.0) -> float:
    """Memory budget of a GPU, or of a worker's share of one, in bytes."""
    return share * USABLE_FRACTION * total_bytes - NCCL_BYTES * (world_size > 1)


@dataclass(frozen=True)
class MemoryFit:
    """A micro-batch, its activation checkpointing and the bytes it needs, 0 if unmeasured."""

    sequences: int
    activation_checkpointing: ActivationCheckpointing
    needed_bytes: float = 0


@dataclass(frozen=True)
class MemorySearch:
    """Searches the fit of a run whose `auto` is unresolved; `use_gpu` must be resolved."""

    config: Config
    world_size: int
    memory: MemoryModel

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

    def least(self) -> MemoryFit:
        """Candidate with the lowest memory, whether or not it fits."""
        sequences, mode = self.sizes[0], self.modes[-1]
        return MemoryFit(sequences, mode, self.predict(sequences, mode))

    def largest(self, limit_bytes: float, measured: MeasureBytes | None = None) -> MemoryFit | None:
        """First mode that fits enough sequences, else the one that fits most; None if none fits.

        Args:
            measured: Measures a candidate, called as rarely as possible; None to use the prediction.
        """
        enough = min(MIN_EFFICIENT_TOKENS / self.config.data.seq_len, self.sizes[-1])
        best: MemoryFit | None = None
        for mode in self.modes:
            fit = self._largest(mode, limit_bytes, measured or self.predict)
            if fit is not None and (best is None or fit.sequences > best.sequences):
                best = fit
            if best is not None and best.sequences >= enough:
                break
        return best

    def _largest(
        self, mode: ActivationCheckpointing, limit_bytes: float, measured: MeasureBytes
    ) -> MemoryFit | None:
        # Start at the predicted size, go down until one fits, then up: a good prediction needs only two
        # measurements, which may compile. Bisection would start in the middle.
        sizes = self.sizes
        needed = functools.cache(lambda at: measured(sizes[at], mode))
        predicted = bisect_right(sizes, limit_bytes, key=lambda size: self.predict(size, mode)) - 1
        at = max(0, predicted)
        while at >= 0 and needed(at) > limit_bytes:
            at -= 1
        if at < 0:
            return None
        while at + 1 < len(sizes) and needed(at + 1) <= limit_bytes:
            at += 1
        return MemoryFit(sizes[at], mode, needed(at))

    @property
    def remedy(self) -> str:
        """Advice if nothing fits: the settings that need less memory, cheapest first."""
        train, ways = self.config.train, list[str]()
        if self.sizes[0] > 1:
            ways.append(f"set micro_batch_sequences to {1 if train.exact else 'auto'}")
        if self.modes[-1] != MODES[-1]:
            ways.append("set activation_checkpointing to auto")
        if self.memory.num_shards < self.world_size and not train.exact:
            ways.append("set parallel to fsdp")
        return ", ".join([*ways, "lower num_layers"])

    def measure(self, sequences: int, mode: ActivationCheckpointing, device: torch.device) -> float:
        """Peak bytes of a GPU's allocator during real steps; 0 on a CPU, infinite if out of memory.

        The second micro-batch starts with gradients, and a lazy optimizer's second step with its state, so
        two of each reach the peak of all later steps.
        """
        num_bytes = math.inf
        # With several ranks, DDP keeps gradients between steps.
        passes = self.config.batch_sequences // sequences if self.world_size == 1 else 2
        with contextlib.suppress(torch.OutOfMemoryError):
            torch.compiler.reset()
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            vocab_size = self.memory.shape.vocab_size
            for _ in probe_steps(
                self.config, vocab_size, sequences, mode, device, min(2, passes), num_steps=2
            ):
                pass
            num_bytes = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
        gc.collect()
        torch.cuda.empty_cache()
        return num_bytes
