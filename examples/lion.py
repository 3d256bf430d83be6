"""Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023).

raytrain-gpt train --code lion.py --optimizer lion --peak_lr 1e-4
"""

import torch

from raytrain_gpt.extend import Field, Settings, optimizer


class LionSettings(Settings):
    lion_beta1: float = Field(0.9, ge=0, lt=1)
    """Weight of the momentum in the direction of Lion's step."""
    lion_beta2: float = Field(0.99, ge=0, lt=1)
    """Decay rate of Lion's momentum."""
    lion_weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay of matrices in Lion."""


class Lion(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            lr = group["lr"]
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                direction = momentum.lerp(p.grad, 1 - group["beta1"]).sign_()
                p.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)
                momentum.lerp_(p.grad, 1 - group["beta2"])


@optimizer("lion", LionSettings, elementwise=True)
def lion(parameters, settings, peak_lr):
    matrices = [p for p in parameters if p.dim() >= 2]
    others = [p for p in parameters if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.lion_weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    betas = {"beta1": settings.lion_beta1, "beta2": settings.lion_beta2}
    return Lion(groups, {"lr": peak_lr, **betas})
