"""Validation loss over seconds: nanoGPT's own train.py, the product's GPT-2, and its modern recipe.

The text is every `.py` file of this Python's library and packages, each content once, in the order of their
SHA-256; the last twentieth of the files is held out. On these tokens, one after another, for equal seconds:

- `nanogpt`: `train.py` of the checkout `--nanogpt`, unchanged, once for each of `--rates`;
- `plain`: the preset gpt2-124m at nanoGPT's better rate (the first one if nanoGPT has not run);
- `modern`: the preset modern-124m at its own rate;
- `killed`: the same again, with SIGKILL after a third and two thirds of the steps.

`--gpu` compiles 124M parameters in bf16, `--tiny` trains 10M on the CPU. Seconds are those of training steps:
a calibration times a few steps and decides how many fit into `--seconds`; the schedule spans exactly these.
Startup and evaluations do not count. The steps before a process's first evaluation, which compile, count as
median steps; their excess is `compile_s`. Logged steps that a kill loses count. Only the product saves.

Losses are those of the product's evaluation on the same sequences, at every 16th of the steps. For nanoGPT's
model it runs in a hook after the optimizer's step. The JSON is rewritten each time. It has all cases in
`--work`, where corpus, calibrations and rows stay, so later commands add to it.
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
from harness import CORES, Row, flags, in_new_process
from matplotlib.figure import Figure
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_post_hook

from raytrain_gpt.config.call_options import PrepareOptions
from raytrain_gpt.config.load import load_preset
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core import device
from raytrain_gpt.core.model import GPT2_VOCAB_SIZE, GPTShape
from raytrain_gpt.core.registry import count_model
from raytrain_gpt.data.locations import read_data
from raytrain_gpt.evaluate.evaluation import evaluation_sums, loss_metrics
from raytrain_gpt.ingest.feed import EvalFeed
from raytrain_gpt.ingest.prepare import prepare
from raytrain_gpt.trackers.run_files import read_rows

KINDS = {  # kind of case -> its legend
    "nanogpt": "nanoGPT, learning rate {:g}",
    "plain": "raytrain-gpt, GPT-2, learning rate {:g}",
    "modern": "raytrain-gpt, modern recipe",
    "killed": "raytrain-gpt, modern recipe, killed twice",
}
SCALES: dict[str, dict[str, Any]] = {
    "gpu": {"num_layers": 12, "num_heads": 12, "embd_size": 768, "seq_len": 1024}
    | {"micro_batch_sequences": 32, "global_batch_tokens": 2**17, "eval_tokens": 2**19},
    "tiny": {"num_layers": 6, "num_heads": 5, "embd_size": 160, "seq_len": 256}
    | {"micro_batch_sequences": 2, "global_batch_tokens": 2**9, "eval_tokens": 2**13}
    | {"precision": "fp32", "residual_dtype": "fp32", "use_gpu": False, "compile": False},
}
RATES = {"gpu": [6e-4, 1.8e-3], "tiny": [2e-3, 4e-3]}
CORPUS_MB = {"gpu": 1000, "tiny": 60}
SPANS, SPAN_STEPS = 16, 8  # evaluations of a case; steps between those of a calibration


def main() -> None:
    args = parsed()
    if not (args.work / "corpus" / "corpus.json").exists():
        prepare_corpus(args)
    for kind in args.cases:
        for rate in (args.rates if args.nanogpt else []) if kind == "nanogpt" else [None]:
            run_case(args, kind, rate)
    draw(found := summarize(args), args.out.with_suffix(".svg"))
    print(json.dumps(found))


def parsed() -> argparse.Namespace:
    """Return the arguments, with `sizes`; paths are absolute."""
    out, work = Path(os.environ.get("OUT", "."), "headline.json"), Path("build/headline")
    parser = flags(__doc__, seconds=150.0, threads=min(CORES, 4), work=work, out=out, corpus_mb=0)
    scale = parser.add_mutually_exclusive_group(required=True)
    for name in SCALES:
        scale.add_argument(f"--{name}", dest="scale", action="store_const", const=name)
    parser.add_argument("--cases", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--nanogpt", type=Path, help="checkout; without it, no nanoGPT")
    parser.add_argument("--rates", nargs="+", type=float, help="learning rates of nanoGPT")
    args = parser.parse_args()
    args.sizes, args.rates = SCALES[args.scale], args.rates or RATES[args.scale]
    args.work, args.out, args.gpu = args.work.resolve(), args.out.resolve(), args.scale == "gpu"
    return args


def prepare_corpus(args: argparse.Namespace) -> None:
    """Write `train.bin` and `val.bin` as nanoGPT reads them, and import both as the product's dataset."""
    directory, encoding = args.work / "corpus", tiktoken.get_encoding("gpt2")
    directory.mkdir(parents=True, exist_ok=True)
    roots = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    by_hash: dict[str, Path] = {}
    for path in sorted({path for root in roots for path in Path(root).rglob("*.py")}):
        if path.is_file() and (content := path.read_bytes()):
            by_hash.setdefault(hashlib.sha256(content).hexdigest(), path)
    files = [by_hash[digest] for digest in sorted(by_hash)]
    ends = np.cumsum([path.stat().st_size for path in files])
    files = files[: int((ends <= (args.corpus_mb or CORPUS_MB[args.scale]) * 1e6).sum())]
    cut, about = len(files) - len(files) // 20, {"files": len(files)}
    for split, paths in {"train": files[:cut], "val": files[cut:]}.items():
        with (directory / f"{split}.bin").open("wb") as file:
            for i in range(0, len(paths), 1000):
                texts = [path.read_text("utf-8", "replace") for path in paths[i : i + 1000]]
                for ids in encoding.encode_ordinary_batch(texts, num_threads=CORES):
                    file.write(np.array([*ids, encoding.eot_token], np.uint16).tobytes())
            about[f"{split}_tokens"] = file.tell() // 2
    bins = [str(directory / f"{split}.bin") for split in ("train", "val")]
    prepare(bins, directory / "data", "gpt2", PrepareOptions(), log=print, in_process=True)
    (directory / "corpus.json").write_text(json.dumps(about))


def run_case(args: argparse.Namespace, kind: str, rate: float | None) -> None:
    """Run a case, after a calibration if its recipe has none."""
    recipe, name = kind.replace("killed", "modern"), kind if rate is None else f"{kind}-{rate:g}"
    before, pace = summarize(args), args.work / f"pace-{recipe}.txt"
    rate = rate or before["cases"].get(before["best_nanogpt"], {"rate": args.rates[0]})["rate"]
    if not pace.exists():
        train(args, config_of(args, "calibration", recipe, SPAN_STEPS, rate), recipe)
        rows = read_rows(args.work / "runs" / "calibration")
        pace.write_text(str(timed(rows, SPAN_STEPS)[0]["step_s"]))
    every = max(1, int(args.seconds / float(pace.read_text()) / SPANS))
    config = config_of(args, name, recipe, every, rate)
    rate, counts = config.optim.peak_lr, count_model(GPTShape.of(config, GPT2_VOCAB_SIZE))
    about = {"kind": kind, "label": KINDS[kind].format(rate), "rate": rate, "steps": every * SPANS}
    about |= {"parameters": counts.num_parameters, "flops_per_token": counts.flops_per_token}
    file, started = args.work / f"{[*KINDS].index(kind)}-{name}.json", time.perf_counter()
    file.write_text(json.dumps(about))
    train(args, config, kind)
    about["wall_s"] = round(time.perf_counter() - started, 1)
    if kind == "killed":
        runs = [args.work / "runs" / name / "checkpoints" for name in ("killed", "modern")]
        one, other = (load_file(max(run.glob("*/model.safetensors"))) for run in runs)
        about["weights_differ_by"] = max(float((one[n] - other[n]).abs().max()) for n in one)
    file.write_text(json.dumps(about))


def config_of(args: argparse.Namespace, name: str, recipe: str, every: int, rate: float) -> Config:
    """Return the product's configuration, from which nanoGPT's flags are taken too."""
    steps = every * (3 if name == "calibration" else SPANS)
    fields = args.sizes | {"run_name": name, "num_samples": 0, "keep_checkpoints": 1}
    fields |= {"mlflow_uri": None, "tensorboard": False, "num_workers": 0}
    fields |= {"data_path": str(args.work / "corpus/data"), "storage_path": str(args.work / "runs")}
    fields |= {"cpus_per_worker": args.threads, "max_steps": steps, "log_every_steps": every}
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
                if step := re.match(r"step (\d+)/.*val loss", line):
                    summarize(args)
                    if kill_at and int(step[1]) >= kill_at:
                        process.kill()
        if process.returncode and not kill_at:
            sys.exit(f"{config.run.run_name}: raytrain-gpt train failed")


def train_nanogpt(args: argparse.Namespace, config: Config, directory: Path) -> None:
    """Run nanoGPT's train.py in this process, with a hook that times its steps and evaluates its model."""
    seq_len, micro = config.data.seq_len, config.train.micro_batch_sequences
    model, optim, steps = config.model, config.optim, config.train.max_steps
    place, data = torch.device("cuda" if args.gpu else "cpu"), read_data(config)
    tokens, ids = data.read("val", seq_len, data.val_ids(seq_len, config.eval.eval_tokens))
    val = EvalFeed(tokens, ids, data, micro // 4 or 1, place)
    text_bytes = torch.ones(2**16, dtype=torch.int64, device=place)
    autocast = device.make_autocast(config.train.precision, place)
    every, step, began = config.eval.eval_every_steps, 0, time.perf_counter()

    def losses(ids: torch.Tensor, targets: torch.Tensor, reduction: str) -> Any:
        return losses.gpt(ids, targets.contiguous())[1].expand(targets.shape)  # the batch's mean

    def after_step(*_: Any) -> None:
        nonlocal step, began
        step += 1
        if step % every:
            return
        device.synchronize(place)
        row: Row = {"perf/step_time_s": (time.perf_counter() - began) / every}
        row["perf/peak_memory_bytes"] = device.peak_memory_bytes(place)
        raw_model = sys.modules["__main__"].raw_model  # train.py's, while it runs
        losses.gpt = gpt = getattr(raw_model, "_orig_mod", raw_model)  # before compilation
        losses.eval, losses.device = gpt.eval, place  # type: ignore[attr-defined]
        sums = evaluation_sums(losses, val.micro_batches()[0], text_bytes, autocast)  # type: ignore
        gpt.train()
        row |= {"step": step, "val/loss": loss_metrics(sums)["val/loss"]}
        with (directory / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        summarize(args)
        began = time.perf_counter()

    sys.argv = f"""train.py --n_layer={model.num_layers} --n_head={model.num_heads}
        --n_embd={model.embd_size} --block_size={seq_len} --batch_size={micro} --eval_iters=1
        --gradient_accumulation_steps={config.batch_sequences // micro} --log_interval=100
        --learning_rate={optim.peak_lr} --min_lr={optim.min_lr} --warmup_iters={optim.warmup_steps}
        --max_iters={steps - 1} --lr_decay_iters={steps} --eval_interval={steps + 1} --device={place}
        --dtype={"bfloat16" if args.gpu else "float32"} --compile={config.train.compile}""".split()
    sys.argv += [f"--dataset={args.work / 'corpus'}", f"--out_dir={directory}"]
    sys.dont_write_bytecode = True
    os.chdir(args.nanogpt)
    sys.path.insert(0, str(Path.cwd()))
    torch.set_num_threads(args.threads)
    register_optimizer_step_post_hook(after_step)
    runpy.run_path("train.py", run_name="__main__")


def timed(rows: list[Row], every: int) -> tuple[Row, dict[int, float]]:
    """Return times of the median step, of compiling and of lost steps, and seconds at each evaluation."""
    begun = [row for row in rows if row.get("event") == "attempt"]
    lost = {row["step"]: row["lost_s"] for row in begun} or {0: 0.0}
    ends = [row for row in rows if "perf/step_time_s" in row and row["step"] % every == 0]
    spans = {row["step"]: every * row["perf/step_time_s"] for row in ends}
    later = [spans[step] for step in spans if step - every not in lost] or [*spans.values(), 0.0]
    span_s = float(np.median(later))
    counted = {step: span_s if step - every in lost else spans[step] for step in spans}
    after = np.cumsum([counted[step] + lost.get(step - every, 0.0) for step in spans]).tolist()
    found = {"starts": max(1, len(begun)), "lost_s": sum(lost.values()), "step_s": span_s / every}
    found["compile_s"] = sum(spans.values()) - sum(counted.values())
    return found, dict(zip(spans, after, strict=True))


def summarize(args: argparse.Namespace) -> Row:
    """Write the JSON of all cases in `--work`, compared with the better one of nanoGPT, and return it."""
    machine = device.device_name(device.best_device(), in_detail=True)
    found: Row = {"machine": machine, "torch": torch.__version__, "threads": args.threads}
    corpus = json.loads((args.work / "corpus" / "corpus.json").read_text())
    found |= {"corpus": corpus, **args.sizes, "cases": {}}
    for file in sorted(args.work.glob("?-*.json")):
        case, rows = json.loads(file.read_text()), read_rows(args.work / "runs" / file.stem[2:])
        times, after = timed(rows, case["steps"] // SPANS)
        speed = args.sizes["global_batch_tokens"] / (times["step_s"] or np.inf)
        flops = device.peak_flops(machine, "bf16") or np.inf
        peaks = [row["perf/peak_memory_bytes"] for row in rows if "perf/peak_memory_bytes" in row]
        case |= {key: round(times[key], 4) for key in times}
        case |= {"tokens_per_s": round(speed), "peak_memory_mb": max(peaks, default=0) // 10**6}
        case["mfu"] = round(speed * case["flops_per_token"] / flops, 4) or None
        points = [
            (r["step"], r["val/loss"]) for r in rows if r.get("val/loss") and r["step"] in after
        ]
        case["curve"] = [[step, round(loss, 4), round(after[step], 2)] for step, loss in points]
        found["cases"][file.stem[2:]] = case
    curves = {name: case["curve"] for name, case in found["cases"].items() if case["curve"]}
    peers = {name: curves[name][-1][1] for name in curves if name.startswith("nanogpt")}
    found["best_nanogpt"] = best = min(peers, key=peers.__getitem__, default=None)
    found["nanogpt_loss"] = target = peers.get(best, 0.0)
    end = min((curve[-1][2] for curve in curves.values()), default=0.0)
    found["at_s"] = at = (end * np.array([0.25, 0.5, 0.75, 1])).round(1).tolist()
    for name, curve in curves.items():
        _, losses, seconds = zip(*curve, strict=True)
        found["cases"][name]["loss_at_s"] = np.interp(at, seconds, losses).round(4).tolist()
        found["cases"][name]["passes_nanogpt"] = next((p for p in curve if p[1] <= target), None)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    return found


def draw(found: Row, file: Path) -> None:
    """Draw loss over seconds as SVG."""
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, case in found["cases"].items():
        seconds, losses = ([point[i] for point in case["curve"]] for i in (2, 1))
        axes.plot(seconds, losses, "--" if name == "killed" else "-", label=case["label"])
    if found["nanogpt_loss"]:
        axes.axhline(found["nanogpt_loss"], color="black", ls=":", label="nanoGPT's last loss")
    axes.set(xlabel="seconds of training", ylabel="validation loss, nats per token")
    axes.legend(frameon=False)
    figure.savefig(file)


if __name__ == "__main__":
    main()
