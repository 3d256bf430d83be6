"""The update: its optimizer protocol, AdamW, and the learning rate; only matrices and embeddings decay."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain_gpt.config.sections import OptimSection
from raytrain_gpt.core.loss_scale import LossScale
from raytrain_gpt.core.model import GPT
from raytrain_gpt.core.parallel import full_tensor

MatrixCounts = Mapping[tuple[int, int], int]
"""(rows, columns) -> number of such matrices in a model's blocks."""


class Optimizer(Protocol):
    """An optimizer that skips a step on the device, like torch's fused ones.

    Attributes:
        grad_scale: Set before every step, which divides the gradients by it; a scalar on the device.
        found_inf: Set before every step; 1.0 skips it, and 0.0 does not.
        state: State by parameter, of tensors, numbers and lists of them.
        group_numbers: Numbers in each parameter group when it was built; changed ones are state.
    """

    grad_scale: Tensor
    found_inf: Tensor
    state: defaultdict[Tensor, Any]
    param_groups: list[dict[str, Any]]
    group_numbers: list[dict[str, float]]

    def step(self) -> object: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...


def numbers_of_groups(groups: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Numbers in each parameter group, without the learning rate, which `update` sets."""
    return [
        {
            key: value
            for key, value in group.items()
            if key != "lr" and isinstance(value, int | float)
        }
        for group in groups
    ]


class AdamW(torch.optim.AdamW):
    """Fused AdamW, with its state from the start.

    Args:
        others: Parameters that a subclass updates.
        matmul_dtype: Type of matrix products under autocast, or None without autocast.
        group: Ranks with the same gradients, which may share the work, or None for a single process.
    """

    grad_scale: Tensor
    found_inf: Tensor

    def __init__(
        self,
        model: GPT,
        config: OptimSection,
        matmul_dtype: torch.dtype | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        others: Container[nn.Parameter] = (),
    ) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad and p not in others]
        groups: list[dict[str, Any]] = [
            {
                "params": [p for p in parameters if p.dim() >= 2],
                "weight_decay": config.weight_decay,
            },
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        super().__init__(groups, config.peak_lr, (config.beta1, config.beta2), fused=True)
        for p in parameters:
            moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            self.state[p] = {"step": torch.zeros((), device=p.device), **moments}
        self.group_numbers = numbers_of_groups(self.param_groups)

    @staticmethod
    def state_bytes(num_parameters: int, matrices: MatrixCounts) -> int:
        """Bytes of the state in fp32, without scalars."""
        return 2 * num_parameters * torch.float32.itemsize

    @staticmethod
    def update_bytes(matrices: MatrixCounts, num_shards: int) -> int:
        """Peak bytes of an update besides the state."""
        return 0

    @staticmethod
    def update_flops(matrices: MatrixCounts) -> int:
        """FLOPs of one update over all ranks that are worth counting: those of matrix products."""
        return 0


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
    optimizer: Optimizer,
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
        optimizer: Updates all `parameters`.
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
    optimizer.grad_scale = factor * ((norm + 1e-6) / grad_clip).clamp(min=1.0)
    optimizer.found_inf = not_finite.float()
    optimizer.step()
    optimizer.zero_grad(set_to_none=not keeps_gradients)
    if loss_scale is not None:
        loss_scale.adjust(not_finite)
    return norm
