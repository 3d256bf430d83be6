"""Steps, tokens and seconds to a loss: the product's recipes against a plain GPT-2 with AdamW.

The peer is the plain GPT-2 of `plain_gpt2.py`, trained in nanoGPT's manner (AdamW, cosine, its best
learning rate of those that `--rates` tried) on the batches of the product's order. Every other arm is the
product itself in local mode, takes half the peer's steps, and changes one thing more:

- `adamw`: GPT-2 with AdamW at the peer's learning rate; what half the tokens cost without a recipe;
- `muon`: Muon for the matrices of the blocks;
- `qwen3`: the modern architecture, its head tied and every matrix drawn at random, as in GPT-2;
- `linear`: the learning rate falls linearly to zero over the whole run;
- `zeros`: a head of its own, and the head and what blocks add begin with zeros: the modern recipe.

All evaluate on the same tokens, and evaluations do not count as time. Each is a process of its
own.

    python benchmarks/time_to_loss.py shakespeare tinyshakespeare.txt [--seeds 1 2 3 4 5] [--at_once 2] …
    python benchmarks/time_to_loss.py stdlib stdlib                     # the standard library, tokenizer gpt2
    python benchmarks/time_to_loss.py shakespeare tinyshakespeare.txt --rates 1e-3 2e-3 4e-3 8e-3

Seconds are right only with `--at_once 1` and nothing else running. With `--picture FILE` the curves are
drawn. Prints one JSON object last.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from plain_gpt2 import PlainGPT, Sizes
from torch import nn

from raytrain_gpt.config.load import load_preset
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.loop import MicroBatch
from raytrain_gpt.core.loss import IGNORE_INDEX
from raytrain_gpt.core.model import INIT_STD, GPTShape
from raytrain_gpt.core.optim import learning_rate
from raytrain_gpt.core.qwen3 import Qwen3
from raytrain_gpt.data.locations import data_of
from raytrain_gpt.ingest.feed import EvalFeed, TrainFeed, rank_chunks, rows_in_process
from raytrain_gpt.ingest.prepare import prepare
from raytrain_gpt.ingest.ray_dataset import IngestSpec
from raytrain_gpt.tracking.run_files import read_rows
from raytrain_gpt.train.launch import train


@dataclass(frozen=True)
class Corpus:
    """What is trained on, for how long, and the learning rates, the best of those that were tried.

    Attributes:
        sizes: Fields of the configuration that all arms have.
        steps: Of the peer.
        evaluations: Of every arm.
    """

    tokenizer: str
    sizes: dict[str, Any]
    steps: int
    peer_lr: float
    muon_lr: float
    evaluations: int = 20


CORPORA = {
    "shakespeare": Corpus(
        "bytes",
        {"num_layers": 4, "num_heads": 4, "embd_size": 128, "seq_len": 64}
        | {"global_batch_tokens": 768, "micro_batch_sequences": 12},
        steps=2000,
        peer_lr=4e-3,
        muon_lr=8e-3,
    ),
    "stdlib": Corpus(
        "gpt2",
        {"num_layers": 4, "num_heads": 4, "embd_size": 128, "seq_len": 64}
        | {"global_batch_tokens": 512, "micro_batch_sequences": 8, "eval_tokens": 8192},
        steps=400,
        peer_lr=2e-3,
        muon_lr=8e-3,
        evaluations=10,
    ),
}
MUON = {"optimizer": "muon"}
QWEN3 = {**MUON, "architecture": "qwen3"}
LINEAR = {**QWEN3, "schedule": "wsd", "decay_fraction": 1.0, "min_lr": 0.0, "warmup_steps": 0}
ARMS: dict[str, dict[str, Any]] = {
    "peer": {},
    "adamw": {},
    "muon": MUON,
    "qwen3": QWEN3,
    "linear": LINEAR,
    "zeros": {**LINEAR, "tied_embeddings": False},
}
"""Arm -> fields that are not those of the peer."""
RANDOM = ("qwen3", "linear")
"""Arms whose matrices are all drawn at random."""


def main() -> None:
    args = parsed()
    if args.inside:
        print(json.dumps(evaluations(args)))
        return
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        corpus = CORPORA[args.corpus]
        prepare([args.source], work / "data", corpus.tokenizer, log=print, val_fraction=0.1)
        jobs = [
            (arm, seed, rate)
            for seed in args.seeds
            for arm in args.arms
            for rate in args.rates or [rate_of(corpus, arm)]
        ]
        with ThreadPoolExecutor(args.at_once) as threads:
            curves = list(threads.map(lambda job: run(args, work, *job), jobs))
    found: dict[str, list[list[list[float]]]] = {}
    for (arm, _, rate), curve in zip(jobs, curves, strict=True):
        found.setdefault(f"{arm} {rate:g}" if args.rates else arm, []).append(curve)
    batch = CORPORA[args.corpus].sizes["global_batch_tokens"]
    if args.picture:
        draw(found, batch, args.picture)
    print(
        json.dumps(
            {
                "corpus": args.corpus,
                "seeds": args.seeds,
                "threads": args.threads,
                "at_once": args.at_once,
                **results(found, batch),
            }
        )
    )


def parsed() -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", choices=CORPORA)
    parser.add_argument("source", help="of text, as `raytrain-gpt prepare` takes it")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--rates", nargs="+", type=float, help="learning rates to try instead")
    parser.add_argument("--threads", type=int, default=1, help="of every process")
    parser.add_argument("--at_once", type=int, default=1, help="processes")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--inside", nargs=4, help="arm, seed, rate, directory (used inside)")
    return parser.parse_args()


def rate_of(corpus: Corpus, arm: str) -> float:
    """The learning rate of an arm."""
    return corpus.muon_lr if "optimizer" in ARMS[arm] else corpus.peer_lr


def run(
    args: argparse.Namespace, work: Path, arm: str, seed: int, rate: float
) -> list[list[float]]:
    """The curve of an arm: step, validation loss and seconds of training of every evaluation."""
    command = [sys.executable, __file__, args.corpus, args.source, f"--threads={args.threads}"]
    command += ["--inside", arm, str(seed), str(rate), str(work)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    curve: list[list[float]] = json.loads(done.stdout.splitlines()[-1])
    step, loss, seconds = curve[-1]
    print(
        f"{arm} seed {seed} lr {rate:g}: {loss:.4f} after {step} steps, {seconds:.0f} s", flush=True
    )
    return curve


def evaluations(args: argparse.Namespace) -> list[list[float]]:
    """The curve of the arm that this process is to be."""
    arm, seed, rate, work = args.inside
    torch.set_num_threads(args.threads)
    config = arm_config(args, arm, int(seed), float(rate), Path(work))
    if arm == "peer":
        return list(peer_curve(config))
    if arm in RANDOM:
        Qwen3.init_weights = draw_all  # type: ignore[method-assign]
    train(config, lambda line: None)
    rows = read_rows(Path(config.run.storage_path, config.run.run_name))
    seconds, curve = 0.0, []
    for row in rows:
        seconds += row.get("perf/step_time_s", 0.0)
        if "val/loss" in row:
            curve.append([row["step"], row["val/loss"], seconds])
    return curve


def arm_config(args: argparse.Namespace, arm: str, seed: int, rate: float, work: Path) -> Config:
    """The configuration of an arm; the peer reads its sizes, rates and data from it, too."""
    corpus = CORPORA[args.corpus]
    steps = corpus.steps if arm == "peer" else corpus.steps // 2
    fields = {
        **corpus.sizes,
        "peak_lr": rate,
        "min_lr": rate / 10,
        "warmup_steps": corpus.steps // 20,
        "max_steps": steps,
        "eval_every_steps": steps // corpus.evaluations,
        "checkpoint_every_steps": steps,
        "num_samples": 0,
        "seed": seed,
        "precision": "auto",
        "num_workers": 0,
        "cpus_per_worker": args.threads,
        "data_path": str(work / "data"),
        "storage_path": str(work),
        "run_name": f"{arm}-{seed}-{rate:g}",
        "mlflow_uri": None,
        "tensorboard": False,
    }
    return load_preset("shakespeare").updated({**fields, **ARMS[arm]})


def draw_all(model: Qwen3, seed: int) -> None:
    """GPT-2's initialisation: std 0.02, what blocks add scaled by 1/sqrt(2·layers)."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            is_last = "o_proj" in name or "down_proj" in name
            std = INIT_STD / math.sqrt(2 * model.shape.num_layers) if is_last else INIT_STD
            nn.init.normal_(parameter, std=std, generator=generator)


def peer_curve(config: Config) -> Iterator[list[float]]:
    """Trains the plain GPT-2 with AdamW."""
    data = data_of(config)
    shape, train_section, optim = GPTShape.of(config, data.vocab_size), config.train, config.optim
    torch.manual_seed(train_section.seed)
    sizes = (shape.num_layers, shape.num_heads, shape.embd_size, shape.seq_len)
    model = PlainGPT(Sizes(*sizes, shape.padded_vocab_size))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            is_last = name.endswith(("out.weight", "down.weight"))
            std = INIT_STD / math.sqrt(2 * shape.num_layers) if is_last else INIT_STD
            nn.init.normal_(parameter, std=std)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    spec, device, size = IngestSpec(config, data, 1), torch.device("cpu"), config.batch_sequences
    chunks = rank_chunks(rows_in_process(spec, train_section.max_steps, 0), spec, 0)
    val = next(chunks)
    held_out = EvalFeed(val.tokens[0], val.ids[0], data, size, device)
    batches = TrainFeed(chunks, size, device).micro_batches()
    bf16 = torch.autocast("cpu", torch.bfloat16)
    seconds = 0.0
    for step in range(train_section.max_steps):
        started = time.perf_counter()
        inputs, targets = next(batches)
        with bf16:
            loss = model(inputs, targets.contiguous())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, optim, train_section.max_steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds += time.perf_counter() - started
        if (step + 1) % config.eval.eval_every_steps == 0:
            with bf16:
                yield [step + 1, mean_loss(model, held_out.micro_batches()[0]), seconds]


@torch.no_grad()
def mean_loss(model: PlainGPT, batches: Iterator[MicroBatch]) -> float:
    """Over all targets that count."""
    total, num = 0.0, 0
    for inputs, targets in batches:
        counted = int((targets != IGNORE_INDEX).sum())
        targets = torch.where(
            targets == IGNORE_INDEX, -1, targets
        )  # what the plain model leaves out
        total, num = total + float(model(inputs, targets)) * counted, num + counted
    return total / num


def results(found: dict[str, list[list[list[float]]]], batch_tokens: int) -> dict[str, Any]:
    """Final losses of every arm, and what it took to reach the peer's, means and standard deviations."""
    target = statistics.fmean(curve[-1][1] for curve in found["peer"]) if "peer" in found else None
    arms = {}
    for arm, curves in found.items():
        arms[arm] = {
            "steps": curves[0][-1][0],
            "val_loss": told([curve[-1][1] for curve in curves]),
        }
        if target is None:
            continue
        reached = [next((row for row in curve if row[1] <= target), None) for curve in curves]
        arms[arm]["reached"] = sum(row is not None for row in reached)
        there = [row for row in reached if row is not None]
        if there:
            arms[arm]["steps_to_loss"] = told([row[0] for row in there])
            arms[arm]["tokens_to_loss"] = told([row[0] * batch_tokens for row in there])
            arms[arm]["seconds_to_loss"] = told([row[2] for row in there])
    return {"target": target, "arms": arms}


def told(values: list[float]) -> dict[str, Any]:
    """Mean, standard deviation and all of it."""
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return {
        "mean": round(statistics.fmean(values), 4),
        "sd": round(spread, 4),
        "all": [round(value, 4) for value in values],
    }


def draw(found: dict[str, list[list[list[float]]]], batch_tokens: int, picture: Path) -> None:
    """Validation loss over tokens: the mean of the seeds, and from the lowest to the highest."""
    import matplotlib

    matplotlib.use("svg" if picture.suffix == ".svg" else "agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    highest = max(min(row[1] for row in curve[:3]) for curves in found.values() for curve in curves)
    for number, (arm, curves) in enumerate(found.items()):
        tokens = [row[0] * batch_tokens / 1e6 for row in curves[0]]
        losses = [[curve[i][1] for curve in curves] for i in range(len(tokens))]
        color = "black" if arm == "peer" else plt.get_cmap("viridis")(number / len(found))
        axes.plot(tokens, [statistics.fmean(at) for at in losses], color=color, label=arm)
        low, high = [min(at) for at in losses], [max(at) for at in losses]
        axes.fill_between(tokens, low, high, color=color, alpha=0.2, linewidth=0)
    if "peer" in found:
        target = statistics.fmean(curve[-1][1] for curve in found["peer"])
        axes.axhline(target, color="black", linewidth=0.8, linestyle=":")
    axes.set_ylim(top=highest)
    axes.set_xlabel("training tokens, millions")
    axes.set_ylabel("validation loss, nats per token")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(picture, dpi=150)


if __name__ == "__main__":
    main()
