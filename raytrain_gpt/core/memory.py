"""What training needs of a device's memory, without the device.

Weights, gradients and moments follow from the number of parameters, the head's from the number of tokens
whose logits are made at once. What the blocks keep for the backward pass is counted: the model runs with
tensors that have shapes and no memory, and those that are alive afterwards are added up.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from raytrain_gpt.core.loss import chunk_tokens
from raytrain_gpt.core.model import GPT, GPTShape

_FP32_BYTES = 4
_BF16_BYTES = 2


STATE_BYTES_PER_PARAMETER = 12
"""fp32 weight and AdamW's two moments: of a checkpoint."""


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on one device.

    Attributes:
        weights: fp32.
        gradients: fp32.
        moments: AdamW's two, fp32.
        activations: Kept for the backward pass, the logits not included.
        logits: What the head takes at once: logits, their softmax, and its gradients.
        evaluation: What an evaluation needs beyond all this; 0 where it needs less.
    """

    weights: int
    gradients: int
    moments: int
    activations: int
    logits: int
    evaluation: int = 0

    @property
    def total(self) -> int:
        """All of it, without what the allocator and CUDA take for themselves."""
        step = self.weights + self.gradients + self.moments + self.activations + self.logits
        return step + self.evaluation


def training_memory(
    shape: GPTShape,
    micro_batch_sequences: int,
    bf16: bool,
    activation_checkpointing: str,
    compiled: bool = False,
) -> TrainingMemory:
    """What one rank of a DDP run needs on a GPU, counted for the eager model.

    Args:
        shape: Of the model.
        micro_batch_sequences: Sequences of a forward pass.
        bf16: Whether the forward pass runs in autocast of 16 bits.
        activation_checkpointing: `none`, `selective` or `full`.
        compiled: A compiled model has the logits of all tokens at once, and keeps less of the blocks'
            activations, which is not counted.
    """
    layers = shape.num_layers
    one, two = (_kept(replace(shape, num_layers=n), bf16, "none") for n in (1, 2))
    block, outside = two - one, one - (two - one)
    if activation_checkpointing != "none":
        one, two = (
            _kept(replace(shape, num_layers=n), bf16, activation_checkpointing) for n in (1, 2)
        )
        # While one block is recomputed, all of that one.
        outside, block = outside + block - (two - one), two - one
    kept = outside + block * layers
    activations = micro_batch_sequences * kept.sequence + kept.fixed
    tokens = micro_batch_sequences * shape.seq_len
    state = shape.num_parameters * _FP32_BYTES
    head = _head_bytes(shape, tokens, bf16, compiled)
    return TrainingMemory(state, state, 2 * state, activations, head)


def sharded(
    memory: TrainingMemory, shape: GPTShape, bf16: bool, world_size: int, evaluates: bool
) -> TrainingMemory:
    """What one of several ranks needs that share weights, gradients and moments, counted.

    The embeddings are whole on every rank from the forward pass to the backward one, with their gradient;
    of the blocks one at a time is, and the next one is on its way.

    Args:
        memory: Of a rank that has all of them.
        shape: Of the model.
        bf16: Whether the forward pass runs in autocast of 16 bits.
        world_size: Number of ranks.
        evaluates: Whether it evaluates in between, with a copy of the whole weights.
    """
    embeddings = (shape.padded_vocab_size + shape.seq_len) * shape.embd_size * _FP32_BYTES
    block = 12 * shape.embd_size**2 * (_BF16_BYTES if bf16 else _FP32_BYTES)
    of_step = replace(
        memory,
        weights=memory.weights // world_size + embeddings + 2 * block,
        gradients=memory.gradients // world_size + embeddings + 2 * block,
        moments=memory.moments // world_size,
    )
    if not evaluates:
        return of_step
    shards = memory.weights // world_size + of_step.moments
    evaluation = shards + memory.weights + memory.logits - of_step.total
    return replace(of_step, evaluation=max(0, evaluation))


def _head_bytes(shape: GPTShape, tokens: int, bf16: bool, compiled: bool) -> int:
    vocab, channels = shape.padded_vocab_size, shape.embd_size
    narrow = _BF16_BYTES if bf16 else 0
    at_once = chunk_tokens(vocab, "cuda")
    rows = tokens * channels * narrow
    weight = vocab * channels * narrow
    if compiled:
        return tokens * vocab * 2 * (narrow or _FP32_BYTES) + rows + weight
    if tokens <= at_once:
        return tokens * vocab * (narrow + 2 * _FP32_BYTES) + rows + weight
    of_chunk = at_once * vocab * (narrow + 2 * _FP32_BYTES)
    gradients = (tokens + vocab) * channels * _FP32_BYTES
    return of_chunk + gradients + 2 * weight


@dataclass(frozen=True)
class _Kept:
    """Bytes that a forward pass keeps: for every sequence, and once (casts of weights)."""

    sequence: int
    fixed: int

    def __add__(self, other: _Kept) -> _Kept:
        return _Kept(self.sequence + other.sequence, self.fixed + other.fixed)

    def __sub__(self, other: _Kept) -> _Kept:
        return _Kept(self.sequence - other.sequence, self.fixed - other.fixed)

    def __mul__(self, times: int) -> _Kept:
        return _Kept(times * self.sequence, times * self.fixed)


@functools.cache
def _kept(shape: GPTShape, bf16: bool, recompute: str) -> _Kept:
    one, two = (_kept_bytes(shape, num_sequences, bf16, recompute) for num_sequences in (1, 2))
    return _Kept(two - one, 2 * one - two)


def _kept_bytes(shape: GPTShape, num_sequences: int, bf16: bool, recompute: str) -> int:
    made = _Made()
    with FakeTensorMode():
        model = GPT(shape, recompute)
        model.train()
        with made, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            ids = torch.zeros(num_sequences, shape.seq_len, dtype=torch.int64)
            hidden = model.hidden(ids)
        num_bytes = made.alive_bytes(without=model.parameters())
        del hidden
        return num_bytes


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers all tensors that are made, and keeps none of them alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                weak: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._storages[storage._cdata] = (weak, storage.nbytes())
        return results

    def alive_bytes(self, without: Iterable[Tensor]) -> int:
        """Bytes of what is still alive, but for some tensors and their views."""
        left_out = {tensor.untyped_storage()._cdata for tensor in without}
        return sum(
            num_bytes
            for address, (storage, num_bytes) in self._storages.items()
            if address not in left_out and not storage.expired()
        )
