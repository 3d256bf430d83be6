"""Qwen3 with a z-loss, which keeps the logits small (Chowdhery et al., "PaLM", 2022).

raytrain-gpt train --code z_loss.py --architecture qwen3_z --z_loss 1e-4
"""

import torch.nn.functional as F

from raytrain_gpt.core.llama import Qwen3
from raytrain_gpt.extend import Field, LlamaSettings, architecture


class ZLossSettings(LlamaSettings):
    z_loss: float = Field(1e-4, ge=0)
    """Weight of the squared logarithm of the softmax's denominator in the training loss."""


@architecture("qwen3_z", ZLossSettings)
class Qwen3Z(Qwen3):
    def forward(self, ids, targets, reduction="mean"):
        if not self.training:  # validation stays cross-entropy
            return super().forward(ids, targets, reduction)
        logits = self.logits(ids).float().flatten(0, 1)  # (B * T, V)
        loss = F.cross_entropy(logits, targets.flatten())
        return loss + self.shape.settings.z_loss * logits.logsumexp(-1).square().mean()
