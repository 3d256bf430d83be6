"""The update: AdamW, optimizers of users, loss scale, learning rate; only matrices and embeddings decay."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Container, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain_gpt.config.built_in import AdamWSettings, WsdSettings
from raytrain_gpt.config.sections import OptimSection
from raytrain_gpt.core.model import GPT
from raytrain_gpt.core.parallel import full_tensor, local_tensor
from raytrain_gpt.errors import ConfigError

INIT_SCALE = 2.0**16
GROWTH_INTERVAL = 2000
MatrixCounts = Mapping[tuple[int, int, int], int]
"""(rows, columns, fused projections) -> number of such matrices in a model's blocks."""


def numbers_of_groups(groups: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Return the numbers in each parameter group, without the learning rate, which `update` sets."""
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
        settings = config.settings(AdamWSettings)
        parameters = [p for p in model.parameters() if p.requires_grad and p not in others]
        groups: list[dict[str, Any]] = [
            {
                "params": [p for p in parameters if p.dim() >= 2],
                "weight_decay": settings.weight_decay,
            },
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        super().__init__(groups, config.peak_lr, (settings.beta1, settings.beta2), fused=True)
        for p in parameters:
            moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            self.state[p] = {"step": torch.zeros((), device=p.device), **moments}
        self.group_numbers = numbers_of_groups(self.param_groups)

    @staticmethod
    def state_bytes(num_parameters: int, matrices: MatrixCounts) -> int:
        """Return the bytes of the state in fp32, without scalars."""
        return 2 * num_parameters * torch.float32.itemsize

    @staticmethod
    def update_bytes(matrices: MatrixCounts, num_shards: int) -> int:
        """Return the peak bytes of an update in addition to the state."""
        return 0

    @staticmethod
    def update_flops(matrices: MatrixCounts) -> int:
        """Return the FLOPs of one update over all ranks, counting only those of matrix products."""
        return 0


class UserOptimizer:
    """A user's optimizer, made an `Optimizer`.

    Each step waits until it knows whether the gradients are finite, as torch's optimizers cannot skip a step
    on the device. Learning rates of its parameter groups keep their ratios to peak_lr.

    Args:
        parameters: All that it has to update.

    Raises:
        ConfigError: it is not a torch optimizer, has other parameters, or a group without a learning rate.
    """

    grad_scale: Tensor
    found_inf: Tensor

    def __init__(
        self, name: str, inner: object, parameters: list[nn.Parameter], peak_lr: float
    ) -> None:
        if not isinstance(inner, torch.optim.Optimizer):
            raise ConfigError(
                f"optimizer {name} returned a {type(inner).__name__}; return a torch.optim.Optimizer"
            )
        groups = inner.param_groups
        updated = Counter(p for group in groups for p in group["params"])
        if updated != Counter(parameters):
            num = len(updated.keys() & {*parameters})
            raise ConfigError(
                f"optimizer {name} updates {num} of {len(parameters)} parameters; pass it each parameter once"
            )
        if not all(isinstance(group.get("lr"), int | float | Tensor) for group in groups):
            raise ConfigError(
                f"optimizer {name} has a parameter group without a learning rate, so the schedule could not "
                "set it; give every group an lr, usually peak_lr"
            )
        self.inner = inner
        self.group_numbers = numbers_of_groups(groups)
        self._rates = [(float(group["lr"]) / peak_lr, group["lr"]) for group in groups]

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        return self.inner.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @torch.no_grad()
    def step(self) -> None:
        """Divide the gradients by `grad_scale` and update, unless `found_inf` is set."""
        if bool(self.found_inf):
            return
        parameters = (p for group in self.param_groups for p in group["params"])
        gradients = [local_tensor(p.grad) for p in parameters if p.grad is not None]
        torch._foreach_div_(gradients, self.grad_scale)
        for group, (factor, rate) in zip(self.param_groups, self._rates, strict=True):
            lr = group["lr"] * factor
            group["lr"] = rate.fill_(lr) if isinstance(rate, Tensor) else lr
        self.inner.step()


Optimizer = AdamW | UserOptimizer
"""An optimizer that skips a step on the device, like torch's fused ones.

`update` sets two scalars on the device before every step: `grad_scale`, which divides the gradients, and
`found_inf`, of which 1.0 skips the step. `state` by parameter has tensors, numbers and lists of them.
`group_numbers` are the numbers in each parameter group when it was built; changed ones are state.
"""


class LossScale:
    """Loss scaling for fp16, whose small gradients would otherwise become zero; the same on all ranks.

    The loss is multiplied by a factor before the backward pass; the update divides gradients by it. An
    overflow halves the factor and skips the step; many steps without overflow double it. All of it stays on
    the device. Unlike torch's GradScaler, the factor never falls below 1: an overflow at 1 means broken
    gradients. Source: Micikevicius et al., "Mixed Precision Training" (2018).

    Args:
        factor: First value, or a checkpoint's; the attribute is an fp32 scalar on the device.
        good_steps: Steps without overflow since the factor last changed.
    """

    def __init__(
        self, device: torch.device, factor: float = INIT_SCALE, good_steps: int = 0
    ) -> None:
        self.factor = torch.tensor(factor, device=device)
        self._good_steps = torch.tensor(good_steps, device=device)

    def adjust(self, overflowed: Tensor) -> None:
        """Update the factor; `overflowed` is a bool scalar on the device."""
        good_steps = torch.where(overflowed, 0, self._good_steps + 1)
        doubles = good_steps == GROWTH_INTERVAL
        halved = (self.factor / 2).clamp(min=1)
        self.factor = torch.where(
            overflowed, halved, torch.where(doubles, self.factor * 2, self.factor)
        )
        self._good_steps = torch.where(doubles, 0, good_steps)

    def state(self) -> tuple[float, int]:
        """Return factor and good steps, for a checkpoint; waits for the device."""
        return self.factor.item(), int(self._good_steps.item())


def loss_scale_for(
    precision: str, device: torch.device, saved: tuple[float, int] | None = None
) -> LossScale | None:
    """Return the loss scale, or None unless the precision is fp16; `saved` is a checkpoint's `state`."""
    return LossScale(device, *(saved or ())) if precision == "fp16" else None


def learning_rate(step: int, config: OptimSection, max_steps: int) -> float:
    """Return the learning rate of the update after `step` updates.

    Warm-up is linear, `peak_lr·(step+1)/warmup_steps`, then the schedule decides. A user's schedule returns
    a factor of peak_lr.

    Raises:
        ConfigError: its factor is not a finite number, or below 0.
    """
    kind = config.registry.kind("schedule", config.schedule)
    if kind.is_built_in:
        return float(kind.resolve()(step, max_steps, config))
    if step < config.warmup_steps:
        return constant(step, max_steps, config)
    factor = kind.call(step, max_steps, config.settings(kind.settings))
    if not isinstance(factor, int | float) or not 0 <= factor < math.inf:
        raise ConfigError(
            f"schedule {kind.name} returned {factor!r} at step {step} of {max_steps}; return a finite factor "
            "of 0 or more"
        )
    return config.peak_lr * factor


def constant(step: int, max_steps: int, config: OptimSection) -> float:
    """Return `peak_lr`, after a linear warm-up."""
    return config.peak_lr * min(1.0, (step + 1) / max(1, config.warmup_steps))


def cosine(step: int, max_steps: int, config: OptimSection) -> float:
    """Return `min_lr + ½(1+cos(π·(step−warmup)/(max−warmup)))·(peak_lr−min_lr)`; `min_lr` after the end.

    Source: Loshchilov, Hutter, "SGDR" (2017).
    """
    if step < config.warmup_steps:
        return constant(step, max_steps, config)
    if step >= max_steps:
        return config.min_lr
    progress = (step - config.warmup_steps) / (max_steps - config.warmup_steps)
    drop = config.peak_lr - config.min_lr
    return config.min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * drop


def wsd(step: int, max_steps: int, config: OptimSection) -> float:
    """Decay linearly to `min_lr` over the last `decay_fraction` of max_steps.

    If the warm-up overlaps, the lower rate counts. Source: Hu et al., "MiniCPM" (2024).
    """
    decay_steps = max(1, round(config.settings(WsdSettings).decay_fraction * max_steps))
    drop = config.peak_lr - config.min_lr
    falling = config.min_lr + drop * min(1.0, max(0, max_steps - step) / decay_steps)
    return min(constant(step, max_steps, config), falling)


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
    if keeps_gradients:
        torch._foreach_zero_(gradients)
    else:
        for parameter in parameters:
            parameter.grad = None
    if loss_scale is not None:
        loss_scale.adjust(not_finite)
    return norm
