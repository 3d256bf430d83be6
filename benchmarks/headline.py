"""Validation loss over seconds: nanoGPT's own train.py, the product's GPT-2, and its modern recipe.

The text is every `.py` file of this Python's library and packages, each content once, in the order of their
SHA-256; the last twentieth of the files is held out. On these tokens, one after another, for equal seconds:

- `nanogpt`: `train.py` of the checkout `--nanogpt`, unchanged, once for each of `--rates`;
- `plain`: the preset gpt2-124m at nanoGPT's better rate (the first one if nanoGPT has not run);
- `modern`: the preset modern-124m at its own rate;
- `killed`: the same again, with SIGKILL after a third and two thirds of the steps.

    python benchmarks/headline.py --gpu --nanogpt DIR --cases nanogpt --seconds 120      # then the others
    python benchmarks/headline.py --tiny --nanogpt DIR                          # 10M parameters on the CPU

Seconds are those of training steps: a calibration times a few steps and decides how many fit into
`--seconds`; the schedule spans exactly these. Startup and evaluations do not count. The first steps of a
process, which compile, count as median steps; their excess is `compile_s`. Logged steps that a kill loses
count. The product also writes checkpoints, nanoGPT does not. `wall_s` is the time of the whole case.

Losses are those of the product's evaluation on the same sequences. For nanoGPT's model it runs in a hook
after the optimizer's step. The JSON is rewritten at each evaluation. It has all cases in `--work`, where
corpus, calibrations and rows stay, so later commands add to it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
import torch
from harness import CORES, STEPS_PER_LOG, Row, flags, in_new_process, machine
from safetensors.torch import load_file

from raytrain_gpt.config.call_options import PrepareOptions
from raytrain_gpt.config.load import load_preset
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core import device
from raytrain_gpt.core.model import GPT2_VOCAB_SIZE, GPTShape
from raytrain_gpt.core.registry import count_model
from raytrain_gpt.data.locations import data_of
from raytrain_gpt.evaluate.validation_loss import evaluation_sums, loss_metrics
from raytrain_gpt.ingest.feed import EvalFeed
from raytrain_gpt.ingest.prepare import prepare
from raytrain_gpt.tracking.run_files import read_rows

KINDS = {
    "nanogpt": "nanoGPT, learning rate {:g}",
    "plain": "raytrain-gpt, GPT-2, learning rate {:g}",
    "modern": "raytrain-gpt, modern recipe",
    "killed": "the same, killed twice",
}
"""Kind of case -> its legend."""
SCALES: dict[str, dict[str, Any]] = {
    "gpu": {"num_layers": 12, "num_heads": 12, "embd_size": 768, "seq_len": 1024}
    | {"micro_batch_sequences": 32, "global_batch_tokens": 2**17, "eval_tokens": 2**19}
    | {"precision": "bf16", "residual_dtype": "bf16", "use_gpu": True, "compile": True},
    "tiny": {"num_layers": 6, "num_heads": 5, "embd_size": 160, "seq_len": 256}
    | {"micro_batch_sequences": 4, "global_batch_tokens": 2**10, "eval_tokens": 2**14}
    | {"precision": "fp32", "residual_dtype": "fp32", "use_gpu": False, "compile": False},
}
RATES = {"gpu": [6e-4, 1.8e-3], "tiny": [2e-3, 4e-3]}
CORPUS_MB = {"gpu": 1000, "tiny": 60}
QUIET = {"num_samples": 0, "keep_checkpoints": 1, "mlflow_uri": None, "tensorboard": False}
CALIBRATION_STEPS = 5 * STEPS_PER_LOG


def main() -> None:
    args = parsed()
    prepare_corpus(args)
    for kind in args.cases:
        for rate in args.rates if kind == "nanogpt" else [None]:
            run_case(args, kind, rate)
    draw(found := summarize(args), args.out.with_suffix(".svg"))
    print(json.dumps(found))


def parsed() -> argparse.Namespace:
    """Return the arguments, with `sizes`; paths are absolute."""
    out, work = Path(os.environ.get("OUT", "."), "headline.json"), Path("build/headline")
    parser = flags(__doc__, seconds=150.0, threads=min(CORES, 4), work=work, out=out)
    scale = parser.add_mutually_exclusive_group(required=True)
    for name in SCALES:
        scale.add_argument(f"--{name}", dest="scale", action="store_const", const=name)
    parser.add_argument("--cases", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--nanogpt", type=Path, help="checkout; without it, no nanoGPT")
    parser.add_argument("--rates", nargs="+", type=float, help="learning rates of nanoGPT")
    parser.add_argument("--corpus_mb", type=int, help="most text to take")
    args = parser.parse_args()
    args.sizes, args.rates = SCALES[args.scale], args.rates or RATES[args.scale]
    args.cases = [kind for kind in args.cases if kind != "nanogpt" or args.nanogpt]
    args.work, args.out = args.work.resolve(), args.out.resolve()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    return args


def prepare_corpus(args: argparse.Namespace) -> None:
    """Write `train.bin` and `val.bin` as nanoGPT reads them, and import both as the product's dataset."""
    directory, encoding = args.work / "corpus", tiktoken.get_encoding("gpt2")
    if (directory / "corpus.json").exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    roots = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    by_hash: dict[str, Path] = {}
    for path in sorted({path for root in roots for path in Path(root).rglob("*.py")}):
        if path.is_file() and (content := path.read_bytes()):
            by_hash.setdefault(hashlib.sha256(content).hexdigest(), path)
    files = [by_hash[digest] for digest in sorted(by_hash)]
    ends = np.cumsum([path.stat().st_size for path in files])
    files = files[: int((ends <= (args.corpus_mb or CORPUS_MB[args.scale]) * 1e6).sum())]
    about: Row = {"files": len(files), "text_bytes": int(ends[len(files) - 1])}
    cut = len(files) - len(files) // 20
    for split, paths in {"train": files[:cut], "val": files[cut:]}.items():
        with (directory / f"{split}.bin").open("wb") as file:
            for i in range(0, len(paths), 1000):
                texts = [path.read_text("utf-8", "replace") for path in paths[i : i + 1000]]
                for ids in encoding.encode_ordinary_batch(texts, num_threads=CORES):
                    file.write(np.array([*ids, encoding.eot_token], np.uint16).tobytes())
            about[f"{split}_tokens"] = file.tell() // 2
    if about["val_tokens"] <= args.sizes["eval_tokens"]:
        sys.exit(f"{about['val_tokens']} held-out tokens are too few; raise --corpus_mb")
    bins = [str(directory / f"{split}.bin") for split in ("train", "val")]
    prepare(bins, directory / "data", "gpt2", PrepareOptions(), log=print, in_process=True)
    (directory / "corpus.json").write_text(json.dumps(about))


def run_case(args: argparse.Namespace, kind: str, rate: float | None) -> None:
    """Run a case, after a calibration if its recipe has none."""
    recipe, name = kind.replace("killed", "modern"), kind if rate is None else f"{kind}-{rate:g}"
    before = summarize(args)
    best = before["cases"].get(before["best_nanogpt"], {"rate": args.rates[0]})
    rate = rate or best["rate"]
    pace = args.work / f"pace-{recipe}.txt"
    if not pace.exists():
        train(args, config_of(args, "calibration", recipe, CALIBRATION_STEPS, rate), recipe)
        pace.write_text(str(timed(read_rows(args.work / "runs" / "calibration"))[0]["step_s"]))
    steps = max(2 * STEPS_PER_LOG, int(args.seconds / float(pace.read_text())))
    config = config_of(args, name, recipe, steps, rate)
    rate, counts = config.optim.peak_lr, count_model(GPTShape.of(config, GPT2_VOCAB_SIZE))
    about = {"kind": kind, "label": KINDS[kind].format(rate), "rate": rate, "steps": steps}
    about |= {"parameters": counts.num_parameters, "flops_per_token": counts.flops_per_token}
    file = args.work / f"{[*KINDS].index(kind)}-{name}.json"
    file.write_text(json.dumps(about))
    started = time.perf_counter()
    train(args, config, kind)
    about["wall_s"] = round(time.perf_counter() - started, 1)
    if kind == "killed":
        runs = [args.work / "runs" / name / "checkpoints" for name in ("killed", "modern")]
        one, other = (load_file(max(run.glob("*/model.safetensors"))) for run in runs)
        about["weights_differ_by"] = max(float((one[n] - other[n]).abs().max()) for n in one)
    file.write_text(json.dumps(about))
    case = summarize(args)["cases"][name]
    print(name, {key: case[key] for key in case if key != "curve"}, flush=True)


def config_of(args: argparse.Namespace, name: str, recipe: str, steps: int, rate: float) -> Config:
    """Return the product's configuration, from which nanoGPT's flags are taken too."""
    fields = QUIET | args.sizes | {"run_name": name, "storage_path": str(args.work / "runs")}
    fields |= {"data_path": str(args.work / "corpus" / "data"), "cpus_per_worker": args.threads}
    fields |= {"num_workers": 0, "max_steps": steps, "log_every_steps": STEPS_PER_LOG}
    every = max(1, steps // 16)
    fields |= {"eval_every_steps": every, "checkpoint_every_steps": 2 * every}
    if recipe == "modern":
        return load_preset("modern-124m").updated(fields | {"warmup_steps": steps // 50})
    fields |= {"warmup_steps": steps // 20, "peak_lr": rate, "min_lr": rate / 10}
    return load_preset("gpt2-124m").updated(fields)


def train(args: argparse.Namespace, config: Config, kind: str) -> None:
    """Train in a new process, in an empty directory."""
    directory, steps = Path(config.run.storage_path, config.run.run_name), config.train.max_steps
    shutil.rmtree(directory, ignore_errors=True)
    if kind == "nanogpt":
        directory.mkdir(parents=True)
        in_new_process(train_nanogpt, args, config, directory)
        return
    file = args.work / "config.yaml"
    file.write_text(config.to_yaml())
    command = [sys.executable, "-m", "raytrain_gpt.cli", "train", f"--config={file}"]
    for kill_at in [steps // 3, 2 * steps // 3, None] if kind == "killed" else [None]:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout or ():
                if "val loss" in line:
                    summarize(args)
                step = re.match(r"step (\d+)/", line)
                if kill_at and step and int(step[1]) >= kill_at:
                    process.kill()
        if process.returncode and not kill_at:
            sys.exit(f"{config.run.run_name}: raytrain-gpt train failed")


def train_nanogpt(args: argparse.Namespace, config: Config, directory: Path) -> None:
    """Run nanoGPT's train.py in this process, with a hook that times its steps and evaluates its model."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    seq_len, micro = config.data.seq_len, config.train.micro_batch_sequences
    model, optim, steps = config.model, config.optim, config.train.max_steps
    place, data = torch.device("cuda" if config.cluster.use_gpu else "cpu"), data_of(config)
    tokens, ids = data.read("val", seq_len, data.val_ids(seq_len, config.eval.eval_tokens))
    held_out = EvalFeed(tokens, ids, data, micro // 4 or 1, place)
    autocast = device.make_autocast(config.train.precision, place)
    step, reported, began = 0, 0, time.perf_counter()

    def after_step(*_: Any) -> None:
        nonlocal step, reported, began
        step += 1
        evaluates = step % config.eval.eval_every_steps == 0 or step == steps
        if step % STEPS_PER_LOG and not evaluates:
            return
        device.synchronize(place)
        row = {"perf/step_time_s": (time.perf_counter() - began) / (step - reported)}
        row["perf/peak_memory_bytes"] = device.peak_memory_bytes(place)
        rows = [{"step": number, **row} for number in range(reported + 1, step + 1)]
        if evaluates:
            gpt = sys.modules["__main__"].raw_model  # train.py's, while it runs
            lengths = torch.ones(2**16, dtype=torch.int64, device=place)
            batches = held_out.micro_batches()[0]
            sums = evaluation_sums(MeanLosses(gpt, place), batches, lengths, autocast)
            gpt.train()
            rows.append({"step": step, "val/loss": loss_metrics(sums)["val/loss"]})
        with (directory / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        summarize(args)
        reported, began = step, time.perf_counter()

    settings: Row = {
        "dataset": args.work / "corpus",
        "out_dir": directory,
        "eval_interval": steps + 1,
    }
    settings |= {"n_layer": model.num_layers, "n_head": model.num_heads, "n_embd": model.embd_size}
    settings |= {"block_size": seq_len, "batch_size": micro, "device": place, "eval_iters": 1}
    settings |= {"gradient_accumulation_steps": config.batch_sequences // micro}
    settings |= {"learning_rate": optim.peak_lr, "min_lr": optim.min_lr, "max_iters": steps - 1}
    settings |= {"warmup_iters": optim.warmup_steps, "lr_decay_iters": steps, "log_interval": 100}
    settings |= {"dtype": "bfloat16" if config.train.precision == "bf16" else "float32"}
    settings |= {"compile": config.train.compile}
    sys.argv = ["train.py", *(f"--{name}={value}" for name, value in settings.items())]
    sys.dont_write_bytecode = True
    os.chdir(args.nanogpt)
    sys.path.insert(0, str(Path.cwd()))
    torch.set_num_threads(args.threads)
    register_optimizer_step_post_hook(after_step)
    runpy.run_path("train.py", run_name="__main__")


class MeanLosses:
    """nanoGPT's model as the product's evaluation calls it: each target gets the mean loss of its batch."""

    def __init__(self, gpt: Any, place: torch.device) -> None:
        self.gpt, self.device, self.eval = gpt, place, gpt.eval

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor, reduction: str) -> Any:
        return self.gpt(inputs, targets.contiguous())[1].expand(targets.shape)


def timed(rows: list[Row]) -> tuple[Row, dict[int, float]]:
    """Return times of the median step, of compiling and of lost steps, and the seconds after each step."""
    begun = [row for row in rows if row.get("event") == "attempt"]
    lost = {row["step"]: row["lost_s"] for row in begun} or {0: 0.0}
    first = {start + i for start in lost for i in range(1, STEPS_PER_LOG + 1)}
    steps = {row["step"]: row["perf/step_time_s"] for row in rows if "perf/step_time_s" in row}
    step_s = float(np.median([steps[s] for s in steps if s not in first] or [*steps.values(), 0.0]))
    counted = {step: step_s if step in first else steps[step] for step in steps}
    ends = np.cumsum([counted[step] + lost.get(step - 1, 0.0) for step in steps])
    found = {"step_s": step_s, "compile_s": sum(steps.values()) - sum(counted.values())}
    found |= {"starts": max(1, len(begun)), "lost_s": sum(lost.values())}
    return found, dict(zip(steps, ends.tolist(), strict=True))


def summarize(args: argparse.Namespace) -> Row:
    """Write the JSON of all cases in `--work`, compared with the better one of nanoGPT, and return it."""
    found: Row = {"machine": machine(), "threads": args.threads, **args.sizes, "best_nanogpt": None}
    found |= {"corpus": json.loads((args.work / "corpus" / "corpus.json").read_text()), "cases": {}}
    for file in sorted(args.work.glob("?-*.json")):
        rows = read_rows(args.work / "runs" / file.stem[2:])
        times, after = timed(rows)
        speed = args.sizes["global_batch_tokens"] / (times["step_s"] or np.inf)
        flops = device.peak_flops(machine()["device"], args.sizes["precision"]) or np.inf
        peaks = [row["perf/peak_memory_bytes"] for row in rows if "perf/peak_memory_bytes" in row]
        case = json.loads(file.read_text()) | {key: round(times[key], 4) for key in times}
        case |= {"tokens_per_s": round(speed), "peak_memory_mb": max(peaks, default=0) // 10**6}
        case["mfu"] = round(speed * case["flops_per_token"] / flops, 4) or None
        points = [(row["step"], row["val/loss"]) for row in rows if "val/loss" in row]
        case["curve"] = [[step, round(loss, 4), round(after[step], 2)] for step, loss in points]
        found["cases"][file.stem[2:]] = case
    curves = {name: case["curve"] for name, case in found["cases"].items() if case["curve"]}
    peers = {name: curves[name][-1][1] for name in curves if name.startswith("nanogpt")}
    found["best_nanogpt"] = best = min(peers, key=peers.__getitem__, default=None)
    end = min((curve[-1][2] for curve in curves.values()), default=0.0)
    found["at_s"] = at = [round(end * part, 1) for part in (0.25, 0.5, 0.75, 1)]
    for name, curve in curves.items():
        _, losses, seconds = zip(*curve, strict=True)
        found["cases"][name]["loss_at_s"] = np.interp(at, seconds, losses).round(4).tolist()
        below = [point for point in curve if best and point[1] <= peers[best]]
        found["cases"][name]["passes_nanogpt"] = below[0] if below else None
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    return found


def draw(found: Row, file: Path) -> None:
    """Draw loss over seconds as SVG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes, best = figure.subplots(), found["best_nanogpt"]
    for name, case in found["cases"].items():
        is_dashed = name == "killed" or (case["kind"] == "nanogpt" and name != best)
        seconds, losses = ([point[i] for point in case["curve"]] for i in (2, 1))
        axes.plot(seconds, losses, "--" if is_dashed else "-", label=case["label"])
    if best:
        axes.axhline(
            found["cases"][best]["curve"][-1][1], color="black", linewidth=0.8, linestyle=":"
        )
    axes.set(xlabel="seconds of training", ylabel="validation loss, nats per token")
    axes.legend(frameon=False)
    figure.savefig(file)


if __name__ == "__main__":
    main()
