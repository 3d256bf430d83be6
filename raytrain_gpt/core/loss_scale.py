"""Loss scaling for fp16, whose small gradients would otherwise become zero.

The loss is multiplied by a factor before the backward pass; the update divides gradients by it. An overflow
halves the factor and skips the step; many steps without overflow double it. All of it stays on the device.
Unlike torch's GradScaler, the factor never falls below 1: an overflow at 1 means broken gradients.

Source: Micikevicius et al., "Mixed Precision Training" (2018).
"""

from __future__ import annotations

import torch
from torch import Tensor

INIT_SCALE = 2.0**16
GROWTH_INTERVAL = 2000


class LossScale:
    """The factor and its growth state; equal on all ranks, like the gradients.

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
        """Factor and good steps, for a checkpoint; waits for the device."""
        return self.factor.item(), int(self._good_steps.item())


def loss_scale_for(
    precision: str, device: torch.device, saved: tuple[float, int] | None = None
) -> LossScale | None:
    """Loss scale for a resolved precision, or None except for fp16; `saved` is a checkpoint's `state`."""
    return LossScale(device, *(saved or ())) if precision == "fp16" else None
