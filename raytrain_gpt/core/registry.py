"""Built-in architectures and optimizers by name, and the sizes that they count themselves.

Counts come from the model with one and with two blocks on the meta device, in milliseconds at any size. All
blocks are alike, so every amount is linear in their number.
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
from raytrain_gpt.config.sections import ARCHITECTURES, OPTIMIZERS, OptimSection, implementation
from raytrain_gpt.core.model import GPT, GPTShape
from raytrain_gpt.core.optim import AdamW


def optimizer_class(name: str) -> type[AdamW]:
    """Class of an optimizer."""
    return cast(type[AdamW], implementation(OPTIMIZERS[name]))


def new_model(
    shape: GPTShape, activation_checkpointing: str = "none", document_end: int | None = None
) -> GPT:
    """Create a model without initializing its weights; for the arguments see `GPT`."""
    kind = cast(type[GPT], implementation(ARCHITECTURES[shape.architecture]))
    return kind(shape, activation_checkpointing, document_end)


def configured_model(
    config: Config, vocab_size: int, eot_token: int, activation_checkpointing: str = "none"
) -> GPT:
    """Create a configuration's model without initializing its weights."""
    document_end = eot_token if config.data.document_mask else None
    return new_model(GPTShape.of(config, vocab_size), activation_checkpointing, document_end)


def build_optimizer(
    model: GPT,
    config: OptimSection,
    matmul_dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
) -> AdamW:
    """Build a configuration's optimizer; for the arguments see `AdamW`."""
    return optimizer_class(config.optimizer)(model, config, matmul_dtype, group)


@dataclass(frozen=True)
class ModelCounts:
    """Sizes of a model.

    Attributes:
        num_parameters: Parameters, including padding; a tied embedding counts once.
        embedding_parameters: Parameters of embeddings and head.
        flops_per_token: FLOPs of forward and backward for one token, `6·N + 12·layers·embd_size·seq_len`,
            where N excludes embeddings that are only looked up. Causal attention counts in full;
            recomputed activations do not count. Source: Chowdhery et al., "PaLM" (2022), appendix B.
        block_matrices: (rows, columns) of each matrix in a block.
    """

    num_parameters: int
    embedding_parameters: int
    flops_per_token: int
    block_matrices: tuple[tuple[int, int], ...]
    num_layers: int

    @property
    def block_matrix_parameters(self) -> int:
        return sum(rows * columns for rows, columns in self.block_matrices)

    @property
    def matrices(self) -> Counter[tuple[int, int]]:
        """(rows, columns) -> number of such matrices in all blocks."""
        return Counter({s: n * self.num_layers for s, n in Counter(self.block_matrices).items()})


@functools.cache
def count_model(shape: GPTShape) -> ModelCounts:
    """Count a model; raises a RuntimeError for sizes beyond 64 bits."""
    one, two = _shallow_models(replace(shape, num_layers=1))
    first, both = (sum(p.numel() for p in model.parameters()) for model in (one, two))
    num_parameters = first + (shape.num_layers - 1) * (both - first)
    block = [*one.h.parameters()]
    outside = {*one.parameters()} - {*block}
    embedding_parameters = sum(p.numel() for p in outside if p.dim() == 2)
    matmul_parameters = num_parameters - embedding_parameters + one.head_weight.numel()
    attention_flops = 12 * shape.num_layers * shape.embd_size * shape.seq_len
    return ModelCounts(
        num_parameters=num_parameters,
        embedding_parameters=embedding_parameters,
        flops_per_token=6 * matmul_parameters + attention_flops,
        block_matrices=tuple((p.shape[0], p.shape[1]) for p in block if p.dim() == 2),
        num_layers=shape.num_layers,
    )


def resolved_shape(shape: GPTShape) -> GPTShape:
    """Shape that a model has, with its architecture's defaults."""
    one, _ = _shallow_models(replace(shape, num_layers=1))
    return replace(one.shape, num_layers=shape.num_layers)


@functools.cache
def _shallow_models(shape: GPTShape) -> tuple[GPT, GPT]:
    """The model with one and with two blocks, on the meta device."""
    with torch.device("meta"), _WithoutInit():
        return new_model(shape), new_model(replace(shape, num_layers=2))


class _WithoutInit(TorchFunctionMode):
    """Skips `torch.nn.init`, which for meta tensors imports torch's compiler, for a second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_init = getattr(func, "__module__", None) == "torch.nn.init"
        return kwargs["tensor"] if is_init else func(*args, **(kwargs or {}))
