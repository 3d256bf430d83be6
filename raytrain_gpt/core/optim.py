"""The optimizer, its learning rate and its update; only matrices and embeddings decay."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain_gpt.config.sections import OptimSection
from raytrain_gpt.core.loss_scale import LossScale
from raytrain_gpt.core.model import GPT
from raytrain_gpt.core.muon import Muon
from raytrain_gpt.core.parallel import full_tensor


def build_optimizer(
    model: GPT,
    config: OptimSection,
    matmul_dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.optim.AdamW:
    """Build AdamW, or Muon for the blocks' matrices and AdamW for the rest.

    Args:
        matmul_dtype: Type of matrix products under autocast, or None without autocast.
        group: Ranks that share Muon's work, or None for this process only.
    """
    # GPT-2 fuses the query, key and value projections; Muon trains better on them separately.
    matrices = [
        (p, 3 if name.endswith("c_attn.weight") else 1)
        for name, p in model.h.named_parameters()
        if p.dim() == 2
    ]
    muons = {id(p) for p, _ in matrices} if config.optimizer == "muon" else set()
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in muons]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in others if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=config.peak_lr, betas=betas, fused=True)
    return Muon(
        matrices,
        groups,
        weight_decay=config.weight_decay,
        dtype=torch.bfloat16 if matmul_dtype == torch.bfloat16 else torch.float32,
        group=group,
        lr=config.peak_lr,
        betas=betas,
    )


def learning_rate(step: int, config: OptimSection, max_steps: int) -> float:
    """Learning rate of the update after `step` updates.

    Warm-up is linear, `peak_lr·(step+1)/warmup_steps`. Then `cosine` is
    `min_lr + ½(1+cos(π·(step−warmup)/(max−warmup)))·(peak_lr−min_lr)`, and `min_lr` from max_steps on
    (Loshchilov, Hutter, "SGDR", 2017). `wsd` decays linearly to `min_lr` over the last `decay_fraction` of
    max_steps (Hu et al., "MiniCPM", 2024), and the lower value counts during an overlapping warm-up.
    `constant` stays at `peak_lr`.
    """
    rising = config.peak_lr * min(1.0, (step + 1) / max(1, config.warmup_steps))
    drop = config.peak_lr - config.min_lr
    if config.schedule == "wsd":
        decay_steps = max(1, round(config.decay_fraction * max_steps))
        falling = config.min_lr + drop * min(1.0, max(0, max_steps - step) / decay_steps)
        return min(rising, falling)
    if step < config.warmup_steps or config.schedule == "constant":
        return rising
    if step >= max_steps:
        return config.min_lr
    progress = (step - config.warmup_steps) / (max_steps - config.warmup_steps)
    return config.min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * drop


def update(
    optimizer: torch.optim.AdamW,
    parameters: list[nn.Parameter],
    lr: float,
    grad_clip: float,
    loss_scale: LossScale | None = None,
    keeps_gradients: bool = False,
) -> Tensor:
    """Take one optimizer step with clipped gradients, then drop or zero them.

    If a gradient is not finite, weights and moments stay unchanged. The device decides, without
    synchronization.

    Args:
        optimizer: A `build_optimizer` over `parameters`.
        grad_clip: Largest global gradient norm.
        loss_scale: Divides the gradients and is adjusted, or None without scaling.
        keeps_gradients: Zero the gradients in place instead of dropping them.

    Returns:
        The global gradient norm before clipping, a scalar on the device.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = full_tensor(nn.utils.get_total_norm(gradients, foreach=True))
    factor: Tensor | float = 1.0 if loss_scale is None else loss_scale.factor
    norm = norm / factor
    for group in optimizer.param_groups:
        group["lr"] = lr
    not_finite = ~torch.isfinite(norm)
    # Fused AdamW divides gradients by `grad_scale` and skips the step if `found_inf` is set, both made for
    # torch's GradScaler. Clipping this way saves a pass over all gradients.
    divisor = factor * ((norm + 1e-6) / grad_clip).clamp(min=1.0)
    optimizer.grad_scale = divisor  # type: ignore[attr-defined]
    optimizer.found_inf = not_finite.float()  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad(set_to_none=not keeps_gradients)
    if loss_scale is not None:
        loss_scale.adjust(not_finite)
    return norm
