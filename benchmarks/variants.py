"""Validation loss of small models with residuals in bf16 or heads of 128, over several seeds.

    python benchmarks/variants.py [--seeds 1 2 3 4 5] [--steps 500] [--at_once 1]

The models have the depth of the 124M presets and fewer channels. They train on the bytes of Python's standard
library with the product's loop, optimizers and schedule, in bf16 and compiled on a GPU. A seed sets both the
initial weights and the order, so `against` compares pairs: each variant with the same architecture, optimizer
and seed in fp32 with heads of 64. It needs only torch, numpy, pydantic and pyyaml.
"""

from __future__ import annotations

import itertools
import statistics
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import flags, in_new_process, report

from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.accumulation import FloatAccumulator
from raytrain_gpt.core.device import best_device, make_autocast
from raytrain_gpt.core.loop import MicroBatch, train_steps
from raytrain_gpt.core.model import GPT, GPTShape
from raytrain_gpt.core.optim import learning_rate
from raytrain_gpt.core.registry import build_optimizer, new_model

VOCAB_SIZE = 257
VAL_SEQUENCES = 512
RATES = {"adamw": 1e-3, "muon": 4e-3}
BASES = [("gpt2", "adamw"), ("gpt2", "muon"), ("qwen3", "adamw"), ("qwen3", "muon")]
VARIANTS: dict[str, tuple[int, bool]] = {
    "heads of 64": (64, False),
    "bf16 residuals": (64, True),
    "heads of 128": (128, False),
}
"""Variant -> channels of a head, and whether residuals are bf16; the first is the base."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def main() -> None:
    sizes = {"layers": 12, "channels": 384, "seq_len": 512, "batch": 32}
    parser = flags(__doc__, seeds=[1, 2, 3, 4, 5], steps=500, at_once=1, threads=2, **sizes)
    args = parser.parse_args()
    cases = [(*base, variant) for base in BASES for variant in VARIANTS]
    with ThreadPoolExecutor(args.at_once) as threads:
        found = list(threads.map(lambda case: measured(args, *case), cases))
    table: dict[str, Any] = {}
    by_case = dict(zip(cases, found, strict=True))
    for (architecture, optimizer, variant), all_losses in by_case.items():
        base = by_case[architecture, optimizer, next(iter(VARIANTS))]
        against = [round(ours - theirs, 4) for ours, theirs in zip(all_losses, base, strict=True)]
        name = f"{architecture}, {optimizer}, {variant}"
        mean = round(statistics.fmean(all_losses), 4)
        table[name] = {"mean": mean, "all": [round(loss, 4) for loss in all_losses]}
        table[name] |= {"against": against, "mean_against": round(statistics.fmean(against), 4)}
    report(**vars(args), val_loss=table)


def measured(args: Any, *case: str) -> list[float]:
    """Return the losses of a case, printed, so that an interrupted study keeps its results."""
    found = in_new_process(losses, args, *case)
    print(*case, [round(loss, 4) for loss in found], flush=True)
    return found


def losses(args: Any, architecture: str, optimizer: str, variant: str) -> list[float]:
    """Train with every seed, and return the final validation losses."""
    device = best_device()
    torch.set_num_threads(args.threads)
    head_size, narrow = VARIANTS[variant]
    values = {
        "architecture": architecture,
        "num_layers": args.layers,
        "embd_size": args.channels,
        "num_heads": args.channels // head_size,
        "seq_len": args.seq_len,
        "optimizer": optimizer,
        "schedule": "wsd",
        "decay_fraction": 0.5,
        "peak_lr": RATES[optimizer],
        "min_lr": 0.0,
        "warmup_steps": args.steps // 20,
        "max_steps": args.steps,
        "global_batch_tokens": args.batch * args.seq_len,
    }
    config = Config().updated(values)
    model = new_model(GPTShape.of(config, VOCAB_SIZE))
    model.narrow_residual = narrow
    if device.type == "cuda":
        model.compile()
    text, found = source_bytes(), []
    for seed in args.seeds:
        model.cpu().init_weights(seed)
        model.to(device)
        steps = train_steps(
            model,
            build_optimizer(model, config.optim, torch.bfloat16),
            batches(text[: -VAL_SEQUENCES * (args.seq_len + 1)], args, seed, device),
            FloatAccumulator(model, 1),
            first_step=0,
            max_steps=args.steps,
            learning_rate=lambda step: learning_rate(step, config.optim, args.steps),
            grad_clip=1.0,
            autocast=make_autocast("bf16", device),
            seed=seed,
        )
        for _ in steps:
            pass
        found.append(validation_loss(model, text, args, device))
    return found


def source_bytes() -> Bytes:
    """Return Python's standard library, file after file."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*/*.py"))
    files = [file for file in files if "site-packages" not in file.parts]
    order = np.random.default_rng(0).permutation(len(files))
    text = b"".join(files[i].read_bytes() for i in order)
    return np.frombuffer(text, np.uint8)


def batches(text: Bytes, args: Any, seed: int, device: torch.device) -> Iterator[MicroBatch]:
    """Yield inputs and targets from random positions."""
    generator, tokens = np.random.default_rng(seed), torch.from_numpy(text.copy()).to(device)
    window = torch.arange(args.seq_len + 1, device=device)
    for _ in itertools.count():
        starts = generator.integers(0, len(text) - args.seq_len - 1, args.batch)
        block = tokens[torch.from_numpy(starts).to(device)[:, None] + window].long()
        yield block[:, :-1], block[:, 1:]


@torch.no_grad()
def validation_loss(model: GPT, text: Bytes, args: Any, device: torch.device) -> float:
    """Return the mean loss over the last sequences of the text."""
    held_out = text[-VAL_SEQUENCES * (args.seq_len + 1) :].reshape(-1, args.batch, args.seq_len + 1)
    model.eval()
    found = []
    for rows in held_out:
        block = torch.from_numpy(rows.astype(np.int64)).to(device)
        with make_autocast("bf16", device)():
            found.append(float(model(block[:, :-1], block[:, 1:])))
    model.train()
    return statistics.fmean(found)


if __name__ == "__main__":
    main()
