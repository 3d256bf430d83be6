"""Evaluation `accuracy`: how often the most likely next token is the right one, on a text file.

    raytrain-gpt train --preset quickstart --code examples/accuracy.py \
        --evaluations accuracy --accuracy_file my.txt

Rows then have `accuracy/top1` and `accuracy/top5`.
"""

from pathlib import Path

import torch

from raytrain_gpt.extend import Field, Settings, evaluation


class AccuracySettings(Settings):
    accuracy_file: str = "README.md"
    """Text file that every worker can read."""
    accuracy_tokens: int = Field(4096, ge=2)
    """Tokens of the file to use."""


@evaluation("accuracy", AccuracySettings)
def accuracy(model, tokenizer, rank, world_size, settings):
    text = Path(settings.accuracy_file).read_text("utf-8")
    ids = torch.tensor(tokenizer.encode_prompt(text)[: settings.accuracy_tokens])
    size = model.shape.seq_len
    top1 = top5 = count = 0
    for start in range(rank * size, len(ids) - 1, world_size * size):  # this rank's share
        tokens = ids[start : start + size + 1].to(model.device)
        logits = model.logits(tokens[None, :-1])[0, :, : tokenizer.n_vocab]  # (T - 1, vocabulary)
        right = logits.topk(5).indices == tokens[1:, None]
        top1 += int(right[:, 0].sum())
        top5 += int(right.sum())
        count += len(right)
    return {"top1": (top1, count), "top5": (top5, count)}
