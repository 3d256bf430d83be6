"""Draw text from a model."""

from __future__ import annotations

import torch
from torch import Tensor

from raytrain_gpt.core.model import GPT


@torch.no_grad()
def sample_tokens(
    model: GPT,
    prompt: Tensor,
    *,
    num_samples: int,
    max_new_tokens: int,
    top_k: int,
    temperature: float,
    seed: int,
) -> Tensor:
    """Continue a prompt several times.

    The generator is its own, so sampling never changes training; padded ids are never drawn. Where
    prompt and continuation outgrow the context, its last seq_len tokens are what the model sees.

    Args:
        model: Not wrapped; it runs eagerly, so that growing shapes compile nothing.
        prompt: int64 (tokens,), at least one.
        num_samples: Continuations.
        max_new_tokens: Tokens of each.
        top_k: Draw from the k most likely ids.
        temperature: Divides the logits; 0 takes the most likely id.
        seed: Of the generator.

    Returns:
        int64 (num_samples, max_new_tokens)
    """
    model.eval()
    generator = torch.Generator(device=prompt.device).manual_seed(seed)
    ids = prompt.repeat(num_samples, 1)  # (N, T)
    for _ in range(max_new_tokens):
        logits = model.logits(ids[:, -model.shape.seq_len :])[:, -1].float()  # (N, V)
        logits = logits[:, : model.shape.vocab_size]
        if temperature == 0:
            drawn = logits.argmax(-1, keepdim=True)  # (N, 1)
        else:
            best, at = logits.topk(min(top_k, logits.shape[-1]))  # (N, k)
            weights = torch.softmax(best / temperature, -1)
            drawn = at.gather(-1, torch.multinomial(weights, 1, generator=generator))  # (N, 1)
        ids = torch.cat([ids, drawn], 1)
    return ids[:, len(prompt) :]
