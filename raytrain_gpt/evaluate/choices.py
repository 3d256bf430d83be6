"""Score endings: which of several continuations a model finds most likely."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from raytrain_gpt.core.loop import Autocast
from raytrain_gpt.core.model import GPT


@torch.no_grad()
def ending_losses(
    model: GPT, tokens: Tensor, scored: Tensor, autocast: Autocast
) -> tuple[Tensor, Tensor]:
    """Loss of every row's ending, summed and per token: two float64 (R,) on the CPU, in nats.

    The softmax leaves out the padded ids of the vocabulary, as every exported model does. The model runs
    eagerly, since batches have too many shapes to compile, and logits are made for the endings alone.

    Args:
        model: Not wrapped.
        tokens: int64 (R, T + 1).
        scored: bool (R, T), whether the next token belongs to the ending.
    """
    model.eval()
    with autocast():
        hidden = model.hidden(tokens[:, :-1])[scored]  # (S, D)
        logits = F.linear(hidden, model.wte.weight)[:, : model.shape.vocab_size].float()  # (S, V)
    nats = F.cross_entropy(logits, tokens[:, 1:][scored], reduction="none")  # (S,)
    scored = scored.cpu()
    at_places = torch.zeros(scored.shape, dtype=torch.float64)  # (R, T)
    at_places[scored] = nats.cpu().double()
    summed = at_places.sum(1)
    return summed, summed / scored.sum(1)


@dataclass(frozen=True)
class ChoiceScore:
    """How many examples were answered correctly.

    Attributes:
        correct: Examples whose right ending has the smallest summed loss.
        correct_norm: Examples whose right ending has the smallest loss per token.
    """

    examples: int
    correct: int
    correct_norm: int

    def metrics(self) -> dict[str, float | int]:
        """Accuracies (fractions) with their standard errors, and the number of examples."""
        acc, acc_norm = self.correct / self.examples, self.correct_norm / self.examples
        return {
            "acc": acc,
            "acc_norm": acc_norm,
            "acc_stderr": self._stderr(acc),
            "acc_norm_stderr": self._stderr(acc_norm),
            "examples": self.examples,
        }

    def _stderr(self, accuracy: float) -> float:
        """Standard error of a mean of zeros and ones: sqrt(p(1 − p) / (n − 1))."""
        return math.sqrt(accuracy * (1 - accuracy) / max(1, self.examples - 1))
