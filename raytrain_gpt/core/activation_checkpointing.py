"""Activation checkpointing: parts of a block are recomputed in the backward pass, to keep less until then."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from raytrain_gpt.core.attention import Attend

_ATTENTION = frozenset(
    {
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)


def run_block(
    block: nn.Module, x: Tensor, attend: Attend | None, recompute: str, is_random: bool
) -> Tensor:
    """The output of a block; what is recomputed does not change the gradients.

    Args:
        block: (B, T, D) and an attention -> (B, T, D).
        attend: See `Attention.forward`.
        recompute: `none`; `selective`: LayerNorms, GELU, dropout and casts, but neither attention nor
            the linear layers whose outputs the backward pass needs; `full`: all but the block's input.
        is_random: The block has dropout, which must be the same the second time.
    """
    if recompute == "none":
        out: Tensor = block(x, attend)
        return out
    contexts: dict[str, Any] = {} if recompute == "full" else {"context_fn": _SELECTIVE}
    again: Tensor = checkpoint(
        block, x, attend, use_reentrant=False, preserve_rng_state=is_random, **contexts
    )
    return again


def _policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operation is torch.ops.aten.addmm.default:
        _bias, rows, weight = args
        # The output of a block's last linear layer, the only one that narrows, is only added.
        is_needed = weight.shape[1] >= rows.shape[1]
    else:
        is_needed = operation in _ATTENTION
    return CheckpointPolicy.MUST_SAVE if is_needed else CheckpointPolicy.PREFER_RECOMPUTE


_SELECTIVE = partial(create_selective_checkpoint_contexts, _policy)
