"""The memory of training, counted without a device, against what the eager model really keeps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from raytrain_gpt.core.memory import training_memory
from raytrain_gpt.core.model import GPT, GPTShape

SHAPE = GPTShape(3, 2, 64, 32, 257)


def kept_bytes(shape: GPTShape, num_sequences: int, bf16: bool) -> tuple[int, int]:
    """Bytes kept for the backward pass by a real forward pass: of the logits, and of all else."""
    model = GPT(shape)
    model.init_weights(0)
    model.train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.randint(0, shape.vocab_size, (num_sequences, shape.seq_len))
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        model(ids, ids)
    sizes = {at: t.untyped_storage().nbytes() for at, t in kept.items() if at not in weights}
    of_logits = sum(sizes[at] for at in sizes if kept[at].shape[-1:] == (shape.padded_vocab_size,))
    return of_logits, sum(sizes.values()) - of_logits


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("num_sequences", [1, 5])
def test_activations_are_those_that_a_real_forward_pass_keeps(
    num_sequences: int, bf16: bool
) -> None:
    logits, others = kept_bytes(SHAPE, num_sequences, bf16)
    counted = training_memory(SHAPE, num_sequences, bf16, activation_checkpointing=False)
    assert counted.activations == pytest.approx(others, rel=0.01)
    assert counted.logits >= logits


def test_the_state_is_16_bytes_a_parameter() -> None:
    memory = training_memory(SHAPE, 1, bf16=True, activation_checkpointing=False)
    assert memory.weights + memory.gradients + memory.moments == 16 * SHAPE.num_parameters


def test_recomputing_keeps_one_block_and_the_inputs_of_all() -> None:
    shape = GPTShape(12, 12, 768, 1024, 50_257)
    kept = training_memory(shape, 8, bf16=True, activation_checkpointing=False)
    recomputed = training_memory(shape, 8, bf16=True, activation_checkpointing=True)
    inputs = 12 * 8 * 1024 * 768 * 4
    assert inputs < recomputed.activations < inputs + kept.activations / 6
    assert recomputed.logits == kept.logits
