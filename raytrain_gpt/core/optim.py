"""The optimizer with weight decay on matrices and embeddings only, its learning rate, and its update."""

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
    """AdamW over a model's parameters, or Muon for the matrices of its blocks.

    Weights with two dimensions decay; biases and norms do not.

    Args:
        matmul_dtype: Type of matrix products under autocast; None: there is no autocast.
        group: Ranks that share Muon's work; None: this process alone.
    """
    # GPT-2 has the maps to queries, keys and values in one matrix; apart they train better.
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

    Warm-up is linear, `peak_lr·(step+1)/warmup_steps`; then cosine
    `min_lr + ½(1+cos(π·(step−warmup)/(max−warmup)))·(peak_lr−min_lr)` and `min_lr` from max_steps on
    (Loshchilov, Hutter, "SGDR", 2017), or warm-up–stable–decay, linear to `min_lr` over the last
    `decay_fraction` of max_steps (Hu et al., "MiniCPM", 2024), which may begin during the warm-up: the lower
    one counts; or constant.
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
    """One optimizer step with clipped gradients, which are dropped or zeroed afterwards.

    If a gradient is not finite, no weight and no moment changes. The device decides that by itself, so it
    costs no synchronisation.

    Args:
        optimizer: A `build_optimizer` over `parameters`.
        grad_clip: Largest global gradient norm.
        loss_scale: The gradients are divided by its factor, and it is adjusted; None: no scaling.
        keeps_gradients: They stay as tensors of zeros.

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
    # A fused AdamW divides gradients by `grad_scale` and does nothing if `found_inf` is set; torch made both
    # for its GradScaler. Clipping this way saves a pass through all gradients.
    divisor = factor * ((norm + 1e-6) / grad_clip).clamp(min=1.0)
    optimizer.grad_scale = divisor  # type: ignore[attr-defined]
    optimizer.found_inf = not_finite.float()  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad(set_to_none=not keeps_gradients)
    if loss_scale is not None:
        loss_scale.adjust(not_finite)
    return norm
