"""Speed, MFU, memory, time breakdown and losses on one GPU; gpu.sh runs it.

    benchmarks/gpu.sh 124m|350m|modern [--modes compiled eager] [--ways core plain] [--sequences N]
                                       [--document_mask] [--narrow_residual] [--parallel fsdp]
                                       [--activation_checkpointing full] [--num_heads N]
    benchmarks/gpu.sh run

Each in a separate process:

- `core`: the product's model and training loop with tokens from memory, without Ray;
- `plain`: a plain PyTorch loop (plain_gpt2.py) from the same weights on the same batches, not of `modern`,
  which is the preset modern-124m with Muon;
- `run`: `raytrain-gpt train` with Ray and a dataset, of the 124M model.

Without a GPU, or with `--tiny`, the model is tiny. `--sequences` is the size of a micro-batch,
`--micro_batches` their number per step. The flags of the last lines change `core`, which then
runs without `plain`; `--narrow_residual` makes the residual stream bf16. The first of `--spans`, each of
`--span_steps` steps, is not counted, since it compiles. Further steps are profiled, and the GPU's clocks are
read during them. Cases that do not fit into `--within_s` are skipped. `core` and `plain` need only torch,
numpy, pydantic and pyyaml.

The last line is one JSON object, also written to `--out`, by default $OUT/gpu-WHAT.json with the changes in
its name. `cases` has an entry per mode and way, with an error if it failed; `comparisons` has `core` against
`plain`. Of a case: `tokens_per_s` is a median over the spans, `first_span_s` includes compiling,
`peak_memory_mb` is allocated and `counted_memory_mb` predicted, `sdpa` names the attention kernels (`math` is
slow, none means matrix products), `gpu` has clocks and power, and `losses` has one per timed step.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from gpu_watch import PROFILED_STEPS, STEPS_AFTER, hardest_state, profiled, sdpa
from harness import VOCAB_SIZE, data_wait_fraction, flags, quiet_config, run_rows, step_rows
from plain_gpt2 import PlainGPT, Sizes, train_plainly

from raytrain_gpt.config.load import load_preset
from raytrain_gpt.config.schema import Config
from raytrain_gpt.config.sections import TrainSection
from raytrain_gpt.core.accumulation import FloatAccumulator
from raytrain_gpt.core.device import (
    best_device,
    device_name,
    make_autocast,
    matmul_dtype,
    peak_flops,
    peak_memory_bytes,
    synchronize,
)
from raytrain_gpt.core.loop import train_steps
from raytrain_gpt.core.memory import MemoryModel
from raytrain_gpt.core.model import GPT, GPT2_VOCAB_SIZE, GPTShape
from raytrain_gpt.core.parallel import shard
from raytrain_gpt.core.registry import build_optimizer, count_model, new_model

MODES = ["compiled", "eager"]
LEARNING_RATE = 3e-4
STDERR_CHARS = 4000
"""Number of last characters of a failed case's stderr in the JSON."""
DOCUMENT_TOKENS = 600
"""Mean length of a document, for `--document_mask`."""
EVAL_MICRO_BATCHES = 32
"""Micro-batches per evaluation of a run, which evaluates in the middle and at the end."""
PRESETS = {"350m": "gpt2-350m", "modern": "modern-124m"}
"""Model -> its preset; gpt2-124m for the others."""
SETTINGS = ("precision", "document_mask", "narrow_residual", "parallel", "activation_checkpointing")

Losses = Iterator[torch.Tensor]
"""Iterator that trains one step per loss."""


def main() -> None:
    ends_at = time.monotonic() + (args := parsed()).within_s
    if args.case:
        mode, way = args.case
        measure = {"core": core_case, "plain": plain_case, "run": run_case}[way]
        print(json.dumps(measure(args, mode == "compiled")))
        return
    found: dict[str, Any] = {**about(args), "cases": [], "comparisons": []}
    for mode in args.modes:
        cases: dict[str, Any] = {}
        for way in args.ways:
            cases[way] = case = run_in_process(mode, way, ends_at - time.monotonic())
            found["cases"].append({"mode": mode, "way": way} | case)
            text = f"{case['tokens_per_s']:,} tokens/s" if "tokens_per_s" in case else case["error"]
            print(f"{found['model']} {mode} {way}: {text}", flush=True)
            if all("losses" in cases.get(way, {}) for way in ("core", "plain")):
                comparison = compared(cases["core"], cases["plain"])
                found["comparisons"].append({"mode": mode} | comparison)
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))
    if any("error" in case for case in found["cases"]):
        sys.exit(1)


def parsed() -> argparse.Namespace:
    """Return the arguments, with `shape`, `sequences` of a micro-batch and `step_tokens` resolved."""
    parser = flags(__doc__, tiny=False, micro_batches=4, spans=8, span_steps=8, within_s=450.0)
    parser.add_argument("what", choices=["124m", "350m", "modern", "run"])
    parser.add_argument("--modes", nargs="+", choices=MODES, help="default: both; run: compiled")
    parser.add_argument("--ways", nargs="+", choices=["core", "plain"], help="default: both")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--sequences", type=int, help="default: the preset's")
    parser.add_argument("--document_mask", action="store_true")
    parser.add_argument("--narrow_residual", action="store_true")
    parser.add_argument("--num_heads", type=int, help="default: the preset's")
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], default="ddp")
    checkpointing = ["none", "selective", "full"]
    parser.add_argument("--activation_checkpointing", choices=checkpointing, default="none")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", nargs=2, help="mode and way to measure (internal)")
    args = parser.parse_args()
    if args.spans < 2:
        parser.error(f"spans={args.spans} is below 2, and the first does not count")
    changes = [name for name in ("document_mask", "narrow_residual") if getattr(args, name)]
    changes += ["fsdp"] * (args.parallel == "fsdp")
    changes += [mode for mode in [args.activation_checkpointing] if mode != "none"]
    is_run = args.what == "run"
    if is_run and (changes or args.ways):
        parser.error("run takes neither --ways nor changes of core; use 124m or 350m")
    if is_run and importlib.util.find_spec("ray") is None:
        parser.error("run needs Ray and the product's other dependencies; 124m and 350m do not")
    args.modes = args.modes or (["compiled"] if is_run else MODES)
    changes += [f"{args.num_heads}_heads"] if args.num_heads else []
    if args.what == "modern":
        changes += ["muon"]
    args.ways = ["run"] if is_run else args.ways or (["core"] if changes else ["core", "plain"])
    if changes and "plain" in args.ways:
        parser.error(f"the plain loop has no {', '.join(changes)}; set --ways to core")
    changes += [f"{args.sequences}_sequences"] if args.sequences else []
    name = "-".join(["gpu", args.what, *changes])
    args.out = args.out or Path(os.environ.get("OUT", "."), f"{name}.json")
    args.tiny = args.tiny or not torch.cuda.is_available()
    if args.tiny:
        sizes = {"num_layers": 2, "num_heads": 2, "embd_size": 64, "seq_len": 64}
        vocab_size, sizes = VOCAB_SIZE, sizes | {"global_batch_tokens": 1024}
    else:
        vocab_size, sizes = GPT2_VOCAB_SIZE, {}
    config = load_preset(PRESETS.get(args.what, "gpt2-124m")).updated(sizes)
    if args.num_heads:
        config = config.updated({"num_heads": args.num_heads})
    args.shape, args.optim = GPTShape.of(config, vocab_size), config.optim
    default = 4 if args.tiny else config.train.micro_batch_sequences
    args.sequences = args.sequences or default
    args.step_tokens = args.micro_batches * args.sequences * args.shape.seq_len
    return args


def about(args: argparse.Namespace) -> dict[str, Any]:
    """Return the machine and the settings."""
    return {
        "model": "tiny" if args.tiny else "124m" if args.what == "run" else args.what,
        "num_parameters": count_model(args.shape).num_parameters,
        "device": device_name(best_device()),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        **{name: getattr(args, name) for name in SETTINGS},
        "micro_batch_sequences": args.sequences,
        "micro_batches_per_step": args.micro_batches,
        "tokens_per_step": args.step_tokens,
        "timed_steps": (args.spans - 1) * args.span_steps,
    }


def run_in_process(mode: str, way: str, within_s: float) -> dict[str, Any]:
    """Return the results of one case, or its `error`."""
    if within_s <= 0:
        return {"error": "left out: the time was over"}
    command = [sys.executable, __file__, *sys.argv[1:], "--case", mode, way]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, start_new_session=True, **pipes)
    try:
        printed, errors = process.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # also the run that it may have started
        process.communicate()
        return {"error": f"not finished within the remaining {within_s:.0f} s"}
    if process.returncode:
        print(errors, file=sys.stderr, flush=True)
        named = re.findall(r"^[\w.]+(?:Error|Exception|Failed)\b.*", errors, re.MULTILINE)
        last_line = (errors.strip().splitlines() or [f"exit {process.returncode}"])[-1]
        return {"error": named[-1] if named else last_line, "stderr": errors[-STDERR_CHARS:]}
    case: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return case


def compared(core: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """Compare the product's loop with the plain one, step by step."""
    pairs = list(zip(core["losses"], plain["losses"], strict=True))
    return {
        "speed_ratio": round(core["tokens_per_s"] / plain["tokens_per_s"], 4),
        "memory_ratio": round(core["peak_memory_mb"] / plain["peak_memory_mb"], 4),
        "first_loss_difference": round(abs(pairs[0][0] - pairs[0][1]), 6),
        "largest_loss_difference": round(max(abs(a - b) for a, b in pairs), 6),
    }


def made_blocks(args: argparse.Namespace) -> Iterator[np.ndarray[Any, Any]]:
    """Yield uint16 (sequences, seq_len + 1) for all micro-batches, the same for the same arguments.

    Frequencies fall as in a natural vocabulary (Zipf), so that there is something to learn.
    """
    generator = np.random.Generator(np.random.PCG64(0))
    end = args.shape.vocab_size - 1
    tokens = (generator.zipf(1.2, 2**21) % end).astype(np.uint16)
    if args.document_mask:
        tokens[generator.random(len(tokens)) < 1 / DOCUMENT_TOKENS] = end
    size = args.sequences * (args.shape.seq_len + 1)
    for number in range((args.spans * args.span_steps + STEPS_AFTER) * args.micro_batches):
        start = number * size % (len(tokens) - size)
        yield tokens[start : start + size].reshape(args.sequences, -1)


def core_case(args: argparse.Namespace, compiled: bool) -> dict[str, Any]:
    """Measure the product's loop."""
    device = best_device()
    gpt = initial(args).to(device)
    if compiled:
        gpt.compile()
    if args.parallel == "fsdp":
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        shard(gpt, device, matmul_dtype(args.precision))
    steps = train_steps(
        gpt,
        build_optimizer(gpt, args.optim, matmul_dtype(args.precision)),
        on_device(made_blocks(args), device),
        FloatAccumulator(gpt, args.micro_batches),
        first_step=0,
        max_steps=args.spans * args.span_steps + STEPS_AFTER,
        learning_rate=lambda step: LEARNING_RATE,
        grad_clip=1.0,
        autocast=make_autocast(args.precision, device),
        seed=0,
    )
    case = measured(args, device, (result.loss for result in steps))
    if args.parallel == "fsdp":
        dist.destroy_process_group()
    return case | {"counted_memory_mb": counted_memory_mb(args, compiled)}


def initial(args: argparse.Namespace) -> GPT:
    """Return the model with the initial weights of all ways."""
    document_end = args.shape.vocab_size - 1 if args.document_mask else None
    gpt = new_model(args.shape, args.activation_checkpointing, document_end)
    gpt.init_weights(0)
    gpt.narrow_residual = args.narrow_residual
    return gpt


def counted_memory_mb(args: argparse.Namespace, compiled: bool) -> int:
    """Return the predicted device memory in MB, to compare with the peak."""
    residual = "bf16" if args.narrow_residual else "fp32"
    train = TrainSection(compile=compiled, residual_dtype=residual)
    model = MemoryModel(Config(optim=args.optim, train=train), args.shape, args.precision == "bf16")
    return round(model.predict(args.sequences, args.activation_checkpointing).total / 1e6)


def on_device(
    blocks: Iterator[np.ndarray[Any, Any]], device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield inputs and targets as a run's feed does: narrow integers are copied, one batch ahead."""
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


def plain_case(args: argparse.Namespace, compiled: bool) -> dict[str, Any]:
    """Measure the plain loop, from the same weights on the same batches."""
    device, shape = best_device(), args.shape
    sizes = (shape.num_layers, shape.num_heads, shape.embd_size, shape.seq_len)
    plain = PlainGPT(Sizes(*sizes, shape.padded_vocab_size))
    copy_weights(initial(args), plain)
    blocks = (torch.from_numpy(block.astype(np.int64)) for block in made_blocks(args))
    losses = train_plainly(
        plain.to(device),
        ((block[:, :-1], block[:, 1:]) for block in blocks),
        device,
        lambda step: LEARNING_RATE,
        bf16=args.precision == "bf16",
        fused=device.type == "cuda",
        compiled=compiled,
        micro_steps=args.micro_batches,
    )
    return measured(args, device, losses)


def copy_weights(source: GPT, plain: PlainGPT) -> None:
    """Copy the product's weights to the plain model."""
    pairs = [(source.wte, plain.tokens), (source.wpe, plain.positions), (source.ln_f, plain.norm)]
    for theirs, own in zip(source.h, plain.blocks, strict=True):
        pairs += [(theirs.ln_1, own.norm_1), (theirs.ln_2, own.norm_2)]
        pairs += [(theirs.attn.c_attn, own.qkv), (theirs.attn.c_proj, own.out)]
        pairs += [(theirs.mlp.c_fc, own.up), (theirs.mlp.c_proj, own.down)]
    for one, other in pairs:
        other.load_state_dict(one.state_dict())


def measured(args: argparse.Namespace, device: torch.device, losses: Losses) -> dict[str, Any]:
    """Train to the end and measure."""
    timed, seconds = [], []
    for _ in range(args.spans):
        synchronize(device)
        started = time.perf_counter()
        timed += list(itertools.islice(losses, args.span_steps))
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    peak_memory_mb = round(peak_memory_bytes(device) / 1e6)
    return {
        **speed(args, device, [args.step_tokens * args.span_steps / s for s in seconds[1:]]),
        "first_span_s": round(seconds[0], 2),
        "peak_memory_mb": peak_memory_mb,
        **profiled(losses, args.spans * args.span_steps, device),
        "losses": [round(float(loss), 5) for loss in timed],
    }


def speed(args: argparse.Namespace, device: torch.device, speeds: list[float]) -> dict[str, Any]:
    """Return tokens/s and MFU."""
    median = statistics.median(speeds)
    peak = peak_flops(device_name(device), args.precision)
    return {
        "tokens_per_s": round(median),
        "all_tokens_per_s": [round(one) for one in speeds],
        "mfu": None
        if peak is None
        else round(median * count_model(args.shape).flops_per_token / peak, 4),
    }


def run_case(args: argparse.Namespace, compiled: bool) -> dict[str, Any]:
    """Measure `raytrain-gpt train` on a made dataset of the same vocabulary size.

    Early steps are profiled, so the first span and at least these steps are not counted.
    """
    from made_data import made_dataset

    device = best_device()
    skipped = max(args.span_steps, STEPS_AFTER)
    steps = skipped + (args.spans - 1) * args.span_steps
    eval_tokens = EVAL_MICRO_BATCHES * args.sequences * args.shape.seq_len
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(1) as thread:
        made_dataset(Path(work, "data"), (steps + 1) * args.step_tokens, args.shape.vocab_size)
        config = quiet_config(
            steps,
            args.shape,
            args.micro_batches * args.sequences,
            Path(work),
            "run",
            micro_batch_sequences=args.sequences,
            log_every_steps=args.span_steps,
            precision=args.precision,
            compile=compiled,
            use_gpu=device.type == "cuda",
            eval_every_steps=steps // 2,
            eval_tokens=eval_tokens,
            profile_steps=PROFILED_STEPS,
            mlflow_uri=None,
            tensorboard=False,
        )
        over = threading.Event()
        state = thread.submit(hardest_state, device, over)
        try:
            rows = run_rows(config)
        finally:
            over.set()
        profiles = Path(work, "run", "profile")
        traces = [file.read_bytes() for file in profiles.glob("*.json.gz")]
        tables = [file.read_text() for file in profiles.glob("*.txt")]
    counted = step_rows(rows, skipped)
    # All steps of a log entry have their mean speed.
    logged = [row for row in counted if row["step"] % args.span_steps == 0]
    return {
        **speed(args, device, [row["perf/tokens_per_s"] for row in logged]),
        "run_mfu": logged[-1]["perf/mfu"],
        "data_wait_fraction": data_wait_fraction(counted),
        "eval_s": [round(row["perf/eval_s"], 2) for row in rows if "perf/eval_s" in row],
        "eval_tokens": eval_tokens,
        "peak_memory_mb": round(counted[-1]["perf/peak_memory_bytes"] / 1e6),
        "counted_memory_mb": counted_memory_mb(args, compiled),
        "gpu": state.result(),
        "sdpa": sdpa(traces[0]) if traces else None,
        "profile": tables[0].splitlines() if tables else None,
    }


if __name__ == "__main__":
    main()
