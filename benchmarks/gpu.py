"""What one GPU gives: speed, part of its peak, memory and loss of a few GPT-2s; gpu.sh runs it.

For each model, eager and compiled, in processes of their own:

- `core`: the product's model and training loop with tokens from memory, without Ray;
- `plain`: a plain PyTorch loop (plain_gpt2.py) from the same weights on the same batches;
- `run`: `raytrain-gpt train` whole, with Ray and a dataset, where Ray is installed.

    benchmarks/gpu.sh [FILE] [--models 124m 350m] [--ways core plain run] [--modes eager compiled]
                      [--sequences 32] [--rounds 1] [--tiny]

The file, and the last line, is one JSON object: of each case the tokens/s of its spans of steps, MFU
where the device's peak is known, memory and losses, and for each model the ratio of `core` to `plain`
and how far their losses are apart. A case that fails stands there with its error.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from plain_gpt2 import PlainGPT, Sizes, train_plainly

from raytrain_gpt.config.sections import OptimSection
from raytrain_gpt.core.device import (
    autocast_of,
    best_device,
    peak_flops,
    peak_memory_bytes,
    synchronize,
)
from raytrain_gpt.core.gpt2 import GPT2
from raytrain_gpt.core.loop import train_steps
from raytrain_gpt.core.model import GPT, GPTShape
from raytrain_gpt.core.optim import build_optimizer

VOCAB_SIZE = 50257
MODELS = {
    "124m": (GPTShape(12, 12, 768, 1024, VOCAB_SIZE), 32),
    "350m": (GPTShape(24, 16, 1024, 1024, VOCAB_SIZE), 16),
    "tiny": (GPTShape(2, 2, 64, 64, 257), 4),
}
"""Name -> sizes, and sequences of a micro-batch."""
WAYS = ("core", "plain", "run")
MODES = ("eager", "compiled")
LEARNING_RATE = 3e-4
CASE_WITHIN_S = 600


def main() -> None:
    args = parsed()
    if args.case:
        model, mode, way = args.case
        measure = {"core": core_case, "plain": plain_case, "run": run_case}[way]
        print(json.dumps(measure(args, model, mode == "compiled")))
        return
    if args.tiny or not torch.cuda.is_available():
        args.models = ["tiny"]
    ways = [way for way in args.ways if way != "run" or importlib.util.find_spec("ray")]
    found: dict[str, Any] = {**about(args), "cases": [], "comparisons": []}
    for number, model, mode in itertools.product(range(args.rounds), args.models, args.modes):
        cases: dict[str, Any] = {}
        for way in ways:
            cases[way] = case = run_in_process(model, mode, way)
            found["cases"].append(
                {"model": model, "mode": mode, "way": way, "round": number} | case
            )
            told = f"{case['tokens_per_s']:,} tokens/s" if "tokens_per_s" in case else case["error"]
            print(f"{model} {mode} {way}: {told}", flush=True)
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(found, indent=1) + "\n")
        if all("losses" in cases.get(way, {}) for way in ("core", "plain")):
            comparison = compared(cases["core"], cases["plain"])
            found["comparisons"].append(
                {"model": model, "mode": mode, "round": number} | comparison
            )
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))
    if any("error" in case for case in found["cases"]):
        sys.exit(1)


def parsed() -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["124m", "350m"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--tiny", action="store_true", help="only the tiny model")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--sequences", type=int, help="of a micro-batch; default: the model's")
    parser.add_argument("--micro_batches", type=int, default=4, help="of a step")
    parser.add_argument(
        "--spans", type=int, default=4, help="timed apart; the first does not count"
    )
    parser.add_argument("--span_steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--case", nargs=3, help="measure this one (used inside)")
    args = parser.parse_args()
    if args.spans < 2:
        parser.error(f"spans={args.spans} is below 2, and the first does not count")
    return args


def about(args: argparse.Namespace) -> dict[str, Any]:
    """The machine and the settings."""
    return {
        "device": device_name(best_device()),
        "torch": torch.__version__,
        "precision": args.precision,
        "micro_batches_per_step": args.micro_batches,
        "steps": args.spans * args.span_steps,
    }


def device_name(device: torch.device) -> str:
    """As torch tells it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def run_in_process(model: str, mode: str, way: str) -> dict[str, Any]:
    """What one case measured, or its `error`."""
    command = [sys.executable, __file__, *sys.argv[1:], "--case", model, mode, way]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, start_new_session=True, **pipes)
    try:
        printed, errors = process.communicate(timeout=CASE_WITHIN_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the run that it may have started
        process.communicate()
        return {"error": f"not done within {CASE_WITHIN_S} s"}
    if process.returncode:
        print(errors, file=sys.stderr, flush=True)
        return {"error": (errors.strip().splitlines() or [f"exit {process.returncode}"])[-1]}
    case: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return case


def compared(core: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """The product's loop against the plain one, step by step."""
    pairs = list(zip(core["losses"], plain["losses"], strict=True))
    return {
        "speed_ratio": round(core["tokens_per_s"] / plain["tokens_per_s"], 4),
        "memory_ratio": round(core["peak_memory_mb"] / plain["peak_memory_mb"], 4),
        "first_loss_difference": round(abs(pairs[0][0] - pairs[0][1]), 6),
        "largest_loss_difference": round(max(abs(a - b) for a, b in pairs), 6),
    }


def sizes(args: argparse.Namespace, model: str) -> tuple[GPTShape, int]:
    """Of the model and its micro-batch."""
    shape, sequences = MODELS[model]
    return shape, args.sequences or sequences


def made_blocks(args: argparse.Namespace, model: str) -> Iterator[np.ndarray[Any, Any]]:
    """uint16 (sequences, seq_len + 1) for all micro-batches: the same for the same arguments.

    Frequencies fall as in a natural vocabulary (Zipf), so that there is something to learn.
    """
    shape, sequences = sizes(args, model)
    generator = np.random.Generator(np.random.PCG64(0))
    tokens = (generator.zipf(1.2, 2**21) % (shape.vocab_size - 1)).astype(np.uint16)
    size = sequences * (shape.seq_len + 1)
    for number in range(args.spans * args.span_steps * args.micro_batches):
        start = number * size % (len(tokens) - size)
        yield tokens[start : start + size].reshape(sequences, -1)


def core_case(args: argparse.Namespace, model: str, compiled: bool) -> dict[str, Any]:
    """The product's loop."""
    device = best_device()
    gpt = initial(args, model).to(device)
    if compiled:
        gpt.compile()
    steps = train_steps(
        gpt,
        build_optimizer(gpt, OptimSection()),
        on_device(made_blocks(args, model), device),
        first_step=0,
        max_steps=args.spans * args.span_steps,
        micro_batches_per_step=args.micro_batches,
        learning_rate=lambda step: LEARNING_RATE,
        grad_clip=1.0,
        autocast=autocast_of(args.precision, device),
        seed=0,
        rank=0,
    )
    return measured(args, model, device, (result.loss for result in steps))


def initial(args: argparse.Namespace, model: str) -> GPT:
    """The weights that all begin with."""
    gpt = GPT2(sizes(args, model)[0])
    gpt.init_weights(0)
    return gpt


def on_device(
    blocks: Iterator[np.ndarray[Any, Any]], device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets as a run's feed gives them: narrow integers travel, one batch ahead."""
    ahead = None
    for block in blocks:
        tokens = torch.from_numpy(block.copy())
        if device.type == "cuda":
            tokens = tokens.pin_memory()
        wide = tokens.to(device, non_blocking=True).to(torch.int64)
        ready, ahead = ahead, (wide[:, :-1], wide[:, 1:])
        if ready is not None:
            yield ready
    if ahead is not None:
        yield ahead


def plain_case(args: argparse.Namespace, model: str, compiled: bool) -> dict[str, Any]:
    """The plain loop, from the same weights on the same batches."""
    device = best_device()
    shape = sizes(args, model)[0]
    numbers = (shape.num_layers, shape.num_heads, shape.embd_size, shape.seq_len)
    plain = PlainGPT(Sizes(*numbers, shape.padded_vocab_size))
    copy_weights(initial(args, model), plain)
    losses = train_plainly(
        plain.to(device),
        (torch.from_numpy(block.astype(np.int64)) for block in made_blocks(args, model)),
        device,
        bf16=args.precision == "bf16",
        compiled=compiled,
        micro_steps=args.micro_batches,
        learning_rate=LEARNING_RATE,
    )
    return measured(args, model, device, losses)


def copy_weights(source: GPT, plain: PlainGPT) -> None:
    """Give the plain model the product's weights."""
    parts = [(source.wte, plain.tokens), (source.wpe, plain.places), (source.ln_f, plain.norm)]
    for theirs, own in zip(source.h, plain.blocks, strict=True):
        parts += [(theirs.ln_1, own.norm_1), (theirs.ln_2, own.norm_2)]
        parts += [(theirs.attn.c_attn, own.qkv), (theirs.attn.c_proj, own.out)]
        parts += [(theirs.mlp.c_fc, own.up), (theirs.mlp.c_proj, own.down)]
    for one, other in parts:
        other.load_state_dict(one.state_dict())


def measured(
    args: argparse.Namespace, model: str, device: torch.device, losses: Iterator[torch.Tensor]
) -> dict[str, Any]:
    """Train to the end, and what it gave."""
    shape, sequences = sizes(args, model)
    all_losses, seconds = [], []
    for _ in range(args.spans):
        synchronize(device)
        started = time.perf_counter()
        all_losses += list(itertools.islice(losses, args.span_steps))
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    tokens = args.span_steps * args.micro_batches * sequences * shape.seq_len
    speeds = [tokens / span_s for span_s in seconds[1:]]
    return {
        **speed(args, shape, device, speeds),
        "first_span_s": round(seconds[0], 2),
        "micro_batch_sequences": sequences,
        "peak_memory_mb": round(peak_memory_bytes(device) / 1e6),
        "losses": [round(float(loss), 5) for loss in all_losses],
    }


def speed(
    args: argparse.Namespace, shape: GPTShape, device: torch.device, speeds: list[float]
) -> dict[str, Any]:
    """Tokens/s and the part of the device's peak."""
    median = statistics.median(speeds)
    peak = peak_flops(device_name(device), args.precision)
    return {
        "num_parameters": shape.num_parameters,
        "tokens_per_s": round(median),
        "all_tokens_per_s": [round(one) for one in speeds],
        "mfu": None if peak is None else round(median * shape.flops_per_token / peak, 4),
    }


def run_case(args: argparse.Namespace, model: str, compiled: bool) -> dict[str, Any]:
    """`raytrain-gpt train` on a made dataset of the same vocabulary size."""
    from made_data import made_dataset
    from training import data_wait_fraction, quiet_config, run_rows

    device = best_device()
    shape, sequences = sizes(args, model)
    batch_tokens = args.micro_batches * sequences * shape.seq_len
    steps = args.spans * args.span_steps
    with tempfile.TemporaryDirectory() as work:
        made_dataset(Path(work, "data"), steps * batch_tokens + 2**20, shape.vocab_size)
        config = quiet_config(
            steps,
            shape,
            args.micro_batches * sequences,
            Path(work),
            "run",
            micro_batch_sequences=sequences,
            log_every_steps=args.span_steps,
            precision=args.precision,
            compile=compiled,
            use_gpu=device.type == "cuda",
            mlflow_uri=None,
            tensorboard=False,
        )
        rows = run_rows(config)
    counted = rows[args.span_steps :: args.span_steps]
    return {
        **speed(args, shape, device, [row["perf/tokens_per_s"] for row in counted]),
        "run_mfu": counted[-1]["perf/mfu"],
        "micro_batch_sequences": sequences,
        "data_wait_fraction": round(data_wait_fraction(rows, args.span_steps), 5),
        "peak_memory_mb": round(rows[-1]["perf/peak_memory_bytes"] / 1e6),
    }


if __name__ == "__main__":
    main()
