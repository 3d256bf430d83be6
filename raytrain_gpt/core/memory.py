"""What training needs of a device's memory, without the device.

Weights, gradients and moments follow from the number of parameters. What the forward pass keeps for the
backward pass is counted: the model runs with tensors that have shapes and no memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from raytrain_gpt.core.model import GPT, GPTShape

_FP32_BYTES = 4


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on one device.

    Attributes:
        weights: fp32.
        gradients: fp32.
        moments: AdamW's two, fp32.
        activations: Kept for the backward pass, the logits not included.
        logits: Logits, their softmax and its gradient.
    """

    weights: int
    gradients: int
    moments: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """All of it, without what the allocator and CUDA take for themselves."""
        return self.weights + self.gradients + self.moments + self.activations + self.logits


def training_memory(
    shape: GPTShape, micro_batch_sequences: int, bf16: bool, activation_checkpointing: bool
) -> TrainingMemory:
    """What one rank of a DDP run needs, counted for the eager model; a compiled one keeps less.

    Args:
        shape: Of the model.
        micro_batch_sequences: Sequences of a forward pass.
        bf16: Whether the forward pass runs in bf16 autocast.
        activation_checkpointing: Whether activations are recomputed.
    """
    one, two = (_kept(replace(shape, num_layers=n), bf16) for n in (1, 2))
    sequence, fixed = two.sequence - one.sequence, two.fixed - one.fixed
    layers = shape.num_layers
    activations = micro_batch_sequences * (one.sequence + (layers - 1) * sequence)
    activations += one.fixed + (layers - 1) * fixed
    if activation_checkpointing:
        # Each block's input is kept, and while one is recomputed all of that one.
        block_input = shape.seq_len * shape.embd_size * _FP32_BYTES
        outside = micro_batch_sequences * (one.sequence - sequence) + one.fixed - fixed
        within = micro_batch_sequences * sequence + fixed
        activations = outside + within + layers * micro_batch_sequences * block_input
    tokens = micro_batch_sequences * shape.seq_len
    logits = tokens * shape.padded_vocab_size * ((2 if bf16 else 0) + 2 * _FP32_BYTES)
    state = shape.num_parameters * _FP32_BYTES
    return TrainingMemory(state, state, 2 * state, activations, logits)


@dataclass(frozen=True)
class _Kept:
    """Bytes that a forward pass keeps: for every sequence, and once (casts of weights)."""

    sequence: int
    fixed: int


def _kept(shape: GPTShape, bf16: bool) -> _Kept:
    one, two = (_kept_bytes(shape, num_sequences, bf16) for num_sequences in (1, 2))
    return _Kept(two - one, 2 * one - two)


def _kept_bytes(shape: GPTShape, num_sequences: int, bf16: bool) -> int:
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        logits = tensor.shape[-1:] == (shape.padded_vocab_size,)
        if not isinstance(tensor, nn.Parameter) and not logits:
            storage = tensor.untyped_storage()
            kept[storage._cdata] = storage
        return tensor

    with FakeTensorMode():
        model = GPT(shape)
        model.train()
        weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        ids = torch.zeros(num_sequences, shape.seq_len, dtype=torch.int64)
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            model(ids, ids)
        return sum(s.nbytes() for address, s in kept.items() if address not in weights)
