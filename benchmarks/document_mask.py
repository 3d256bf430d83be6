"""What attention within documents costs: steps of a model with it and without it.

    python benchmarks/document_mask.py [--seq_lens 256 1024] [--document_tokens 300] [--pairs 5] [--compile]

Made tokens in documents of random lengths, on the best device. Both ways take turns, and a ratio is of two
measurements next to each other, so that what else the machine does hits both. One JSON object last.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time

import torch
from training import VOCAB_SIZE, ratios

from raytrain_gpt.config.sections import OptimSection
from raytrain_gpt.core.device import best_device, make_autocast, synchronize
from raytrain_gpt.core.gpt2 import GPT2
from raytrain_gpt.core.loop import MicroBatch, train_steps
from raytrain_gpt.core.model import GPT, GPTShape
from raytrain_gpt.core.optim import build_optimizer

DOCUMENT_END = VOCAB_SIZE - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq_lens", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--batch_tokens", type=int, default=4096, help="of a step")
    parser.add_argument("--document_tokens", type=int, default=300, help="mean of a document")
    parser.add_argument("--num_layers", type=int, default=6)
    parser.add_argument("--num_heads", type=int, default=6)
    parser.add_argument("--embd_size", type=int, default=384)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=2, help="of a measurement")
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    device = best_device()
    found = [compared(args, seq_len, device) for seq_len in args.seq_lens]
    name = torch.cuda.get_device_name() if device.type == "cuda" else device.type
    settings = {k: v for k, v in vars(args).items() if k not in ("seq_lens", "steps", "pairs")}
    print(
        json.dumps({"device": name, "threads": torch.get_num_threads(), **settings, "found": found})
    )


def compared(args: argparse.Namespace, seq_len: int, device: torch.device) -> dict[str, object]:
    """Speeds of both ways at one length of the context."""
    batch = made_batch(args, seq_len, device)
    models = [made_model(args, seq_len, end).to(device) for end in (None, DOCUMENT_END)]
    for model in models:
        tokens_per_s(args, model, batch)  # compiles, and fills caches
    pairs = [[tokens_per_s(args, model, batch) for model in models] for _ in range(args.pairs)]
    without, masked = (list(speeds) for speeds in zip(*pairs, strict=True))
    return {
        "seq_len": seq_len,
        "documents": int((batch[0] == DOCUMENT_END).sum()) + len(batch[0]),
        "tokens_per_s": [round(speed) for speed in without],
        "tokens_per_s_masked": [round(speed) for speed in masked],
        "masked / not": ratios(masked, without),
    }


def made_batch(args: argparse.Namespace, seq_len: int, device: torch.device) -> MicroBatch:
    """Random ids, closed by the end of a document about every `document_tokens`."""
    generator = torch.Generator().manual_seed(0)
    size = (args.batch_tokens // seq_len, seq_len + 1)
    ids = torch.randint(0, DOCUMENT_END, size, generator=generator)
    ends = torch.rand(size, generator=generator) < 1 / args.document_tokens
    tokens = ids.masked_fill(ends, DOCUMENT_END).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def made_model(args: argparse.Namespace, seq_len: int, document_end: int | None) -> GPT:
    """The model, with attention within documents or without."""
    shape = GPTShape(args.num_layers, args.num_heads, args.embd_size, seq_len, VOCAB_SIZE)
    model = GPT2(shape, document_end=document_end)
    model.init_weights(0)
    if args.compile:
        model.compile()
    return model


def tokens_per_s(args: argparse.Namespace, model: GPT, batch: MicroBatch) -> float:
    """Of some steps, updates included."""
    device = batch[0].device
    synchronize(device)
    started = time.perf_counter()
    for _ in train_steps(
        model,
        build_optimizer(model, OptimSection()),
        itertools.repeat(batch),
        first_step=0,
        max_steps=args.steps,
        micro_batches_per_step=1,
        learning_rate=lambda step: 1e-4,
        grad_clip=1.0,
        autocast=make_autocast(args.precision, device),
        seed=0,
        rank=0,
    ):
        pass
    synchronize(device)
    return args.steps * batch[0].numel() / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
