"""Built-in architectures and optimizers by name, and the sizes that they count themselves.

Counts come from the model on the meta device. Blocks of a built-in architecture are alike, so counting one is
enough and takes milliseconds at any size; a user's blocks may differ, so all are built.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from raytrain_gpt.config.schema import Config
from raytrain_gpt.config.sections import OptimSection
from raytrain_gpt.core.model import GPT, GPTShape
from raytrain_gpt.core.optim import AdamW, Optimizer, UserOptimizer
from raytrain_gpt.errors import ConfigError


def optimizer_class(config: OptimSection) -> type[AdamW] | None:
    """Return the class of a built-in optimizer, which counts its costs, or None."""
    kind = config.registry.kind("optimizer", config.optimizer)
    return cast(type[AdamW], kind.resolve()) if kind.is_built_in else None


def step_flops(shape: GPTShape, config: OptimSection, tokens: int) -> float:
    """Return the FLOPs of a step on `tokens`, with those of a built-in optimizer's update."""
    counts, kind = count_model(shape), optimizer_class(config)
    return counts.flops_per_token * tokens + (kind.update_flops(counts.matrices) if kind else 0)


def new_model(
    shape: GPTShape, activation_checkpointing: str = "none", document_end: int | None = None
) -> GPT:
    """Create a model without initial weights (see `GPT`); raises ConfigError if a user's cannot be made."""
    model = shape.kind.call(shape, activation_checkpointing, document_end)
    if not isinstance(model, GPT):
        raise ConfigError(f"architecture {shape.architecture} is not a GPT; make it a subclass")
    return model


def init_weights(model: GPT, seed: int) -> None:
    """Initialize a model's weights, and try a user's model on a few tokens; may raise ConfigError."""
    with model.shape.kind.errors_as_line(), torch.no_grad():
        model.init_weights(seed)
        if not model.shape.kind.is_built_in:
            model.eval().logits(torch.zeros(2, min(8, model.shape.seq_len), dtype=torch.int64))
            model.train()


def configured_model(
    config: Config, vocab_size: int, eot_token: int, activation_checkpointing: str = "none"
) -> GPT:
    """Create a configuration's model without initializing its weights."""
    document_end = eot_token if config.data.document_mask else None
    model = new_model(GPTShape.of(config, vocab_size), activation_checkpointing, document_end)
    model.narrow_residual = config.train.residual_dtype == "bf16"
    return model


def build_optimizer(
    model: GPT,
    config: OptimSection,
    matmul_dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
) -> Optimizer:
    """Build a configuration's optimizer (see `AdamW`); raises ConfigError if a user's cannot be used."""
    if (built_in := optimizer_class(config)) is not None:
        return built_in(model, config, matmul_dtype, group)
    kind = config.registry.kind("optimizer", config.optimizer)
    parameters = [p for p in model.parameters() if p.requires_grad]
    inner = kind.call(parameters, config.settings(kind.settings), config.peak_lr)
    return UserOptimizer(kind.name, inner, parameters, config.peak_lr)


@dataclass(frozen=True)
class ModelCounts:
    """Sizes of a model.

    Attributes:
        num_parameters: Parameters, including padding; a tied embedding counts once.
        embedding_parameters: Parameters of embeddings and head.
        flops_per_token: FLOPs of forward and backward for one token, `6·N + 12·layers·A·seq_len`, where N
            excludes embeddings that are only looked up, and A is the channels of all query heads. Causal
            attention counts in full; recomputed activations do not count. Source: Chowdhery et al., "PaLM"
            (2022), appendix B.
        block_elements: Elements of the matrices in the largest block.
        matrices: (rows, columns, fused projections) -> number of such matrices in all blocks.
    """

    num_parameters: int
    embedding_parameters: int
    flops_per_token: int
    block_elements: int
    matrices: Counter[tuple[int, int, int]]


@functools.cache
def count_model(shape: GPTShape) -> ModelCounts:
    """Count a model; raises a RuntimeError for sizes beyond 64 bits."""
    model, times = _on_meta(shape)
    matrices = Counter[tuple[int, int, int]]()
    for name, p in model.h.named_parameters():
        if p.dim() == 2:
            fused = model.fused_projections.get(name.partition(".")[2], 1)
            matrices[p.shape[0], p.shape[1], fused] += times
    inside = [*model.h.parameters()]
    outside = {*model.parameters()} - {*inside}
    num_parameters = sum(p.numel() for p in outside) + times * sum(p.numel() for p in inside)
    embedding_parameters = sum(p.numel() for p in outside if p.dim() == 2)
    matmul_parameters = num_parameters - embedding_parameters + model.head_weight.numel()
    attention_flops = 12 * shape.num_layers * shape.attention_size * shape.seq_len
    return ModelCounts(
        num_parameters=num_parameters,
        embedding_parameters=embedding_parameters,
        flops_per_token=6 * matmul_parameters + attention_flops,
        block_elements=max(
            sum(p.numel() for p in block.parameters() if p.dim() == 2) for block in model.h
        ),
        matrices=matrices,
    )


def resolved_shape(shape: GPTShape) -> GPTShape:
    """Return the shape that a model has, with its architecture's defaults."""
    return replace(_on_meta(shape)[0].shape, num_layers=shape.num_layers)


def _on_meta(shape: GPTShape) -> tuple[GPT, int]:
    """Return a model without memory, and how many times the complete one has its blocks."""
    times = shape.num_layers if shape.kind.is_built_in else 1
    with torch.device("meta"), _WithoutInit():
        return new_model(replace(shape, num_layers=shape.num_layers // times)), times


class _WithoutInit(TorchFunctionMode):
    """Mode that skips `torch.nn.init`, which for meta tensors imports torch's compiler (a second)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_init = getattr(func, "__module__", None) == "torch.nn.init"
        return kwargs["tensor"] if is_init else func(*args, **(kwargs or {}))
