"""Steps, tokens and seconds to a loss: the product's recipes against a plain GPT-2 with AdamW.

The peer is the plain GPT-2 of `plain_gpt2.py`, trained in nanoGPT's style: AdamW, cosine, the best learning
rate of a `--rates` search. It takes batches in the product's order. Every other arm is the product in local
mode, takes half the peer's steps, and adds one change to the arm above:

- `adamw`: GPT-2 with AdamW at the peer's learning rate; the cost of halving the tokens without a recipe;
- `muon`: Muon for the matrices of the blocks;
- `qwen3`: the modern architecture with a tied head and random matrices, as in GPT-2;
- `linear`: the learning rate falls linearly to zero over the run;
- `zeros`: a separate head; it and the output matrices of each block start at zero;
- `momentum`: Muon's momentum is 0.9 instead of 0.95;
- `embedding`: the embedding learns three times as fast;
- `normuon`: NorMuon;
- `heads`: queries, keys and values are orthogonalized head by head: the modern recipe.

`only_embedding`, `only_normuon` and `only_heads` add one change to `zeros`; `no_momentum`, `no_embedding` and
`no_normuon` take one out of the modern recipe. They train only when `--arms` names them.

All evaluate on the same tokens; evaluations do not count as time. Each arm is a separate process.

    python benchmarks/time_to_loss.py tinyshakespeare.txt [--seeds 1 2 3 4 5] [--at_once 2] …
    python benchmarks/time_to_loss.py stdlib --rates 1e-3 2e-3 4e-3 8e-3       # Python's standard library
    python benchmarks/time_to_loss.py tinyshakespeare.txt --arms zeros heads --fractions 0.7 0.85 1
    python benchmarks/time_to_loss.py stdlib --steps 4000 --arms zeros no_momentum heads --precision bf16

The sources are anything that `raytrain-gpt prepare` takes, and become bytes. `--fractions` trains the last
arm for several numbers of steps, with the schedule that belongs to them. From the slope of its final losses
over the logarithm of steps follows in how many steps each arm ends at the final loss of the first arm.
Seconds are valid only with `--at_once 1` and nothing else running; `--threads` applies to every process.
`--picture FILE` draws the curves, and `--rows FILE` writes them as CSV.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from harness import flags, in_new_process, report
from plain_gpt2 import INIT_STD, Batch, PlainGPT, Sizes, train_plainly
from torch import nn

from raytrain_gpt.config.call_options import PrepareOptions
from raytrain_gpt.config.load import load_preset
from raytrain_gpt.config.plan import Plan
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.llama import Qwen3
from raytrain_gpt.core.loss import IGNORE_INDEX
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.optim import learning_rate
from raytrain_gpt.data.locations import read_data
from raytrain_gpt.ingest.feed import EvalFeed, TrainFeed
from raytrain_gpt.ingest.prepare import prepare
from raytrain_gpt.ingest.ray_dataset import IngestSpec, chunks_in_process, rank_chunks
from raytrain_gpt.trackers.run_files import read_rows
from raytrain_gpt.train.launch import train

HEAD_SIZE = 32
SIZES = {
    "num_layers": 4, "seq_len": 64, "global_batch_tokens": 768, "micro_batch_sequences": 12,
    "eval_tokens": 131_072,
}  # fmt: skip
PEER_LR, MUON_LR = 4e-3, 8e-3
MUON = {"optimizer": "muon"}
QWEN3 = {**MUON, "architecture": "qwen3"}
LINEAR = {**QWEN3, "schedule": "wsd", "decay_fraction": 1.0, "min_lr": 0.0, "warmup_steps": 0}
ZEROS = {**LINEAR, "tied_embeddings": False}
MOMENTUM = {**ZEROS, "muon_momentum": 0.9}
EMBEDDING = {**MOMENTUM, "embedding_lr_factor": 3.0}
NORMUON = {**EMBEDDING, "normuon_beta2": 0.95}
HEADS = {**NORMUON, "muon_head_group": 1}
ARMS: dict[str, dict[str, Any]] = {
    "peer": {},
    "adamw": {},
    "muon": MUON,
    "qwen3": QWEN3,
    "linear": LINEAR,
    "zeros": ZEROS,
    "momentum": MOMENTUM,
    "embedding": EMBEDDING,
    "normuon": NORMUON,
    "heads": HEADS,
    "only_embedding": {**ZEROS, "embedding_lr_factor": 3.0},
    "only_normuon": {**ZEROS, "normuon_beta2": 0.95},
    "only_heads": {**ZEROS, "muon_head_group": 1},
    "no_momentum": {**HEADS, "muon_momentum": 0.95},
    "no_embedding": {**HEADS, "embedding_lr_factor": 1.0},
    "no_normuon": {**HEADS, "normuon_beta2": 0.0},
}
"""Arm -> fields that differ from the peer's."""
LABELS = {
    "peer": "GPT-2 with AdamW",
    "adamw": "half the steps",
    "muon": "Muon instead of AdamW",
    "qwen3": "+ Qwen3 architecture",
    "linear": "+ linear decay to zero",
    "zeros": "+ zero initialization",
    "momentum": "+ momentum 0.9",
    "embedding": "+ embedding's rate ×3",
    "normuon": "+ NorMuon",
    "heads": "modern recipe",
}
"""Arm that trains by default -> its name in the picture."""
RANDOM = ("qwen3", "linear")
"""Arms whose matrices all start at random values."""

Key = tuple[str, float, int, float]
"""Arm, peak learning rate, seed and fraction of the arm's steps."""
Curve = list[list[float]]
"""Step, validation loss and training seconds at every evaluation."""


def main() -> None:
    parser = flags(
        __doc__, seeds=[1, 2, 3, 4, 5], threads=1, at_once=1, width=128, steps=2000, evaluations=20,
        fractions=[1.0], precision="fp32", picture="", rows="",
    )  # fmt: skip
    parser.add_argument("sources", nargs="+")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(LABELS))
    parser.add_argument("--rates", nargs="+", type=float)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        options = PrepareOptions(val_fraction=0.1)
        prepare(args.sources, Path(work, "data"), "bytes", options, log=print)
        configs = {
            (arm, rate, seed, fraction): arm_config(args, arm, rate, seed, fraction, work)
            for seed in args.seeds
            for arm in args.arms
            for rate in args.rates or [MUON_LR if "optimizer" in ARMS[arm] else PEER_LR]
            for fraction in (args.fractions if arm == args.arms[-1] else [1.0])
        }
        with ThreadPoolExecutor(args.at_once) as threads:
            curves = list(threads.map(run, configs, configs.values()))
    by_arm: dict[str, list[Curve]] = {}
    for (arm, rate, _, fraction), curve in zip(configs, curves, strict=True):
        name = arm + f" {rate:g}" * bool(args.rates) + f" x{fraction:g}" * (fraction != 1)
        by_arm.setdefault(name, []).append(curve)
    batch_tokens = SIZES["global_batch_tokens"]
    if args.rows:
        write_rows(args.rows, list(configs), curves)
    if args.picture:
        draw(by_arm, batch_tokens, args.picture)
    settings = {
        name: getattr(args, name)
        for name in ("sources", "width", "seeds", "precision", "threads", "at_once")
    }
    report(**settings, **results(by_arm, batch_tokens), equal_steps=equal_steps(by_arm))


def run(key: Key, config: Config) -> Curve:
    """Train an arm in a new process and return its curve."""
    arm, rate, seed, _ = key
    curve = in_new_process(peer_curve if arm == "peer" else product_curve, config, arm)
    step, loss, seconds = curve[-1]
    text = f"{arm} seed {seed} lr {rate:g}: {loss:.4f} after {step} steps, {seconds:.0f} s"
    print(text, flush=True)
    return curve


def arm_config(
    args: argparse.Namespace, arm: str, rate: float, seed: int, fraction: float, work: str
) -> Config:
    """Return the configuration of an arm; the peer takes its sizes, rates and data from it."""
    steps = args.steps if arm == "peer" else round(args.steps / 2 * fraction)
    fields = {
        **SIZES,
        "peak_lr": rate,
        "min_lr": rate / 10,
        "warmup_steps": args.steps // 20,
        "max_steps": steps,
        "eval_every_steps": max(1, steps // args.evaluations),
        "embd_size": args.width,
        "num_heads": args.width // HEAD_SIZE,
        "checkpoint_every_steps": steps,
        "num_samples": 0,
        "seed": seed,
        "precision": args.precision,
        "num_workers": 0,
        "cpus_per_worker": args.threads,
        "data_path": f"{work}/data",
        "storage_path": work,
        "run_name": f"{arm}-{seed}-{rate:g}-{fraction:g}",
        "mlflow_uri": None,
        "tensorboard": False,
    }
    return load_preset("shakespeare").updated({**fields, **ARMS[arm]})


def product_curve(config: Config, arm: str) -> Curve:
    """Train with the product and return the curve."""
    torch.set_num_threads(config.cluster.cpus_per_worker)
    if arm in RANDOM:
        Qwen3.init_weights = init_randomly  # type: ignore[method-assign]
    train(config, lambda line: None)
    seconds, curve = 0.0, []
    for row in read_rows(Path(config.run.storage_path, config.run.run_name)):
        seconds += row.get("perf/step_time_s", 0.0)
        if "val/loss" in row:
            curve.append([row["step"], row["val/loss"], seconds])
    return curve


def init_randomly(model: Qwen3, seed: int) -> None:
    """Initialize as GPT-2: std 0.02, output matrices of each block scaled by 1/sqrt(2·layers)."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            ends_branch = "o_proj" in name or "down_proj" in name
            scale = math.sqrt(2 * model.shape.num_layers) if ends_branch else 1
            nn.init.normal_(parameter, std=INIT_STD / scale, generator=generator)


def peer_curve(config: Config, arm: str) -> Curve:
    """Train the plain GPT-2 with AdamW and return the curve."""
    torch.set_num_threads(config.cluster.cpus_per_worker)
    data, num_steps = read_data(config), config.train.max_steps
    shape = GPTShape.of(config, data.vocab_size)
    torch.manual_seed(config.train.seed)
    sizes = (shape.num_layers, shape.num_heads, shape.embd_size, shape.seq_len)
    model = PlainGPT(Sizes(*sizes, shape.padded_vocab_size))
    device, size = torch.device("cpu"), config.batch_sequences
    bf16 = config.train.precision == "bf16"
    plan = Plan.of(config.updated({"use_gpu": False}), 1, size, "none")
    spec = IngestSpec(plan, data, data.start)
    chunks = rank_chunks(chunks_in_process(spec, num_steps, 0), spec, 0)
    val = next(chunks)
    held_out = EvalFeed(val.tokens[0], val.ids[0], data, size, device)
    losses = train_plainly(
        model,
        TrainFeed(chunks, size, device).micro_batches(),
        device,
        lambda step: learning_rate(step, config.optim, num_steps),
        bf16=bf16,
        fused=True,
    )
    seconds, curve = 0.0, []
    for step in range(1, num_steps + 1):
        started = time.perf_counter()
        next(losses)
        seconds += time.perf_counter() - started
        if step % config.eval.eval_every_steps == 0:
            curve.append([step, mean_loss(model, held_out.micro_batches()[0], bf16), seconds])
    return curve


@torch.no_grad()
def mean_loss(model: PlainGPT, batches: Iterator[Batch], bf16: bool) -> float:
    """Return the mean loss over all counted targets."""
    total, num = 0.0, 0
    for inputs, targets in batches:
        counted = int((targets != IGNORE_INDEX).sum())
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(inputs, targets.contiguous())
        total, num = total + float(loss) * counted, num + counted
    return total / num


def peer_loss(by_arm: dict[str, list[Curve]]) -> float | None:
    """Return the mean final loss of the peer, or None if it did not run."""
    curves = by_arm.get("peer")
    return statistics.fmean(curve[-1][1] for curve in curves) if curves else None


def results(by_arm: dict[str, list[Curve]], batch_tokens: int) -> dict[str, Any]:
    """Return every arm's final losses, and steps, tokens and seconds until it reached the peer's loss."""
    target = peer_loss(by_arm)
    arms = {}
    for arm, curves in by_arm.items():
        arms[arm] = {
            "steps": curves[0][-1][0],
            "val_loss": spread([curve[-1][1] for curve in curves]),
            "ms_per_step": spread([curve[-1][2] / curve[-1][0] * 1e3 for curve in curves]),
        }
        if target is None:
            continue
        reached = [
            next(row for row in curve if row[1] <= target)
            for curve in curves
            if min(row[1] for row in curve) <= target
        ]
        arms[arm]["reached"] = len(reached)
        if reached:
            arms[arm]["steps_to_loss"] = spread([row[0] for row in reached])
            arms[arm]["tokens_to_loss"] = spread([row[0] * batch_tokens for row in reached])
            arms[arm]["seconds_to_loss"] = spread([row[2] for row in reached])
    return {"target": target, "arms": arms}


def equal_steps(by_arm: dict[str, list[Curve]]) -> dict[str, Any]:
    """Return, by arm and seed, the fraction of the first arm's steps in which it ends at that arm's loss.

    The slope of loss over log steps is that of the mean final losses of the arm with several fractions.
    """
    first, *_, last = by_arm
    of_last = {name: c for name, c in by_arm.items() if name.split(" x")[0] == last.split(" x")[0]}
    if len(of_last) == 1:
        return {}
    line = statistics.linear_regression(
        [statistics.fmean(curve[-1][1] for curve in curves) for curves in of_last.values()],
        [math.log(curves[0][-1][0]) for curves in of_last.values()],
    )
    return {
        name: spread([
            curve[-1][0] / reference[-1][0] * math.exp(line.slope * (reference[-1][1] - curve[-1][1]))
            for curve, reference in zip(curves, by_arm[first], strict=True)
        ])
        for name, curves in by_arm.items()
    }  # fmt: skip


def write_rows(path: str, keys: list[Key], curves: list[Curve]) -> None:
    """Write all curves as CSV."""
    with Path(path).open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["arm", "peak_lr", "seed", "fraction", "step", "val_loss", "training_s"])
        for key, curve in zip(keys, curves, strict=True):
            rows.writerows(
                [*key, int(step), round(loss, 4), round(s, 1)] for step, loss, s in curve
            )


def spread(values: list[float]) -> dict[str, Any]:
    """Return the mean, standard deviation and all values."""
    sd = statistics.stdev(values) if len(values) > 1 else 0.0
    return {
        "mean": round(statistics.fmean(values), 4),
        "sd": round(sd, 4),
        "all": [round(value, 4) for value in values],
    }


def draw(by_arm: dict[str, list[Curve]], batch_tokens: int, picture: str) -> None:
    """Draw validation loss over tokens: the mean over seeds, and the range from lowest to highest."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.grid(color="#e3e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    for number, (arm, curves) in enumerate(by_arm.items()):
        tokens = [row[0] * batch_tokens / 1e6 for row in curves[0]]
        losses = [[row[1] for row in rows] for rows in zip(*curves, strict=True)]
        color = "black" if arm == "peer" else colormaps["viridis"](number / len(by_arm))
        name, _, is_short = arm.partition(" x")
        label = LABELS.get(name, name) + f", {curves[0][-1][0]:.0f} steps" * bool(is_short)
        axes.plot(tokens, [statistics.fmean(at) for at in losses], color=color, label=label)
        low, high = [min(at) for at in losses], [max(at) for at in losses]
        axes.fill_between(tokens, low, high, color=color, alpha=0.2, linewidth=0)
    if (target := peer_loss(by_arm)) is not None:
        axes.axhline(target, color="black", linewidth=0.8, linestyle=":")
    first_losses = [[row[1] for row in curve[:3]] for curves in by_arm.values() for curve in curves]
    axes.set_ylim(top=max(min(losses) for losses in first_losses))
    axes.set_xlabel("training tokens, millions")
    axes.set_ylabel("validation loss, nats per token")
    axes.legend(frameon=False)
    figure.savefig(picture, dpi=150)


if __name__ == "__main__":
    main()
