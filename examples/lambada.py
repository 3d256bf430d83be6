"""Evaluation `lambada`: how often a model completes a passage with its last word, as LAMBADA asks.

    raytrain-gpt eval runs/book --code examples/lambada.py --evaluations lambada --lambada_file passages.txt

The file has a passage on each line. A word is right if each of its tokens is the most likely one. Rows then
have `lambada/acc`.
"""

from pathlib import Path

import torch

from raytrain_gpt.extend import Settings, evaluation


class LambadaSettings(Settings):
    lambada_file: str = "README.md"
    """Text file that every worker can read, with a passage on each line."""


@evaluation("lambada", LambadaSettings)
def lambada(model, tokenizer, rank, world_size, settings):
    lines = Path(settings.lambada_file).read_text("utf-8").splitlines()
    passages = [line.strip() for line in lines if " " in line.strip()][rank::world_size]
    right = 0
    for passage in passages:  # this rank's share
        context, _, word = passage.rpartition(" ")
        answer = tokenizer.encode_after(context, f" {word}").tolist()
        ids = [*tokenizer.encode_prompt(context), *answer][-model.shape.seq_len - 1 :]
        tokens = torch.tensor([ids], device=model.device)
        logits = model.logits(tokens[:, :-1])[0, :, : tokenizer.n_vocab]
        size = min(len(answer), len(logits))  # of a short context the end of the word
        right += torch.equal(logits[-size:].argmax(-1), tokens[0, -size:])
    return {"acc": (right, len(passages))}
