"""AdamW with weight decay on matrices and embeddings only."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from raytrain_gpt.config import OptimSection


def build_optimizer(model: nn.Module, config: OptimSection) -> torch.optim.AdamW:
    """AdamW over a model's parameters in two groups: decayed (2-d) and not (biases, LayerNorm)."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=config.peak_lr,
        betas=(config.beta1, config.beta2),
        fused=True,
    )


def update(
    optimizer: torch.optim.AdamW, parameters: list[nn.Parameter], lr: float, grad_clip: float
) -> Tensor:
    """One optimizer step with clipped gradients, which are dropped afterwards.

    A gradient that is not finite changes no weight and no moment; the device decides that alone,
    so it costs no synchronisation.

    Returns:
        The global gradient norm before clipping, a scalar on the device.
    """
    norm = nn.utils.clip_grad_norm_(parameters, grad_clip, foreach=True)
    for group in optimizer.param_groups:
        group["lr"] = lr
    # The flag with which torch.amp.GradScaler, too, makes a fused AdamW leave everything as it is.
    optimizer.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
