"""How far an average of checkpoints is from a real cooldown: `eval --average` against branches that decay.

A run with the modern recipe trains at a constant rate. At each of `--points` steps, its weights and their
averages over `--windows` checkpoints, one every `--every` steps and fewer near the start, are compared with a
branch from this step, which decays linearly to zero over a quarter more steps, on the same tokens.
`third` is the window nearest to a third of the steps so far.

    python benchmarks/averages.py tinyshakespeare.txt [--steps 1000] [--points 10] [--rows FILE]

The sources are anything that `raytrain-gpt prepare` takes, and become bytes. `--rows FILE` writes CSV.
"""

from __future__ import annotations

import csv
import statistics
import tempfile
from pathlib import Path

import torch
from harness import flags, in_new_process, report
from time_to_loss import MUON_LR, arm_config

from raytrain_gpt.config.call_options import PrepareOptions
from raytrain_gpt.config.schema import Config
from raytrain_gpt.evaluate.inference import evaluate_checkpoint
from raytrain_gpt.ingest.prepare import prepare
from raytrain_gpt.train.launch import train

DECAY_FRACTION = 0.2


def main() -> None:
    parser = flags(
        __doc__, width=128, steps=1000, points=10, every=10, windows=[2, 4, 8, 16], seed=11,
        threads=1, evaluations=1, precision="fp32", rows="",
    )  # fmt: skip
    parser.add_argument("sources", nargs="+")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        prepare(
            args.sources, Path(work, "data"), "bytes", PrepareOptions(val_fraction=0.1), log=print
        )
        config = arm_config(args, "heads", MUON_LR, args.seed, 1.0, work).updated({
            "decay_fraction": DECAY_FRACTION,
            "max_steps": round(args.steps / (1 - DECAY_FRACTION)),
            "eval_every_steps": 10**9,
            "run_name": "trunk",
        })  # fmt: skip
        steps = [args.steps * n // args.points for n in range(1, args.points + 1)]
        rows = in_new_process(measure, config, steps, args.every, args.windows)
    report(
        sources=args.sources,
        width=args.width,
        windows=args.windows,
        **summary(rows, args.every, args.windows),
    )
    if args.rows:
        with Path(args.rows).open("w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            table.writeheader()
            table.writerows(rows)


def measure(
    config: Config, steps: list[int], every: int, windows: list[int]
) -> list[dict[str, float]]:
    """Train the run and its branches; return one row of losses per step."""
    torch.set_num_threads(config.cluster.cpus_per_worker)
    keep = {"checkpoint_every_steps": every, "keep_checkpoints": 10**4}
    train(config.updated(keep), lambda line: None)
    trunk, rows = Path(config.run.storage_path, config.run.run_name), []
    for step in steps:
        branch = config.updated({
            "run_name": f"branch-{step}",
            "branch_from": f"{trunk}@{step}",
            "max_steps": round(step / (1 - DECAY_FRACTION)),
            "checkpoint_every_steps": 10**6,
        })  # fmt: skip
        train(branch, lambda line: None)
        row = {"step": step, "cooldown": loss(trunk.with_name(f"branch-{step}"), 1)}
        checkpoint = trunk / "checkpoints" / f"step={step:08d}"
        row |= {f"average of {n}": loss(checkpoint, min(n, step // every)) for n in (1, *windows)}
        rows.append(row)
        print(row, flush=True)
    return rows


def loss(path: Path, average: int) -> float:
    """Return the validation loss of a checkpoint or run."""
    _, metrics = evaluate_checkpoint(path, lambda line: None, average=average)
    return round(metrics["val/loss"], 4)


def summary(
    rows: list[dict[str, float]], every: int, windows: list[int]
) -> dict[str, dict[str, float]]:
    """Return the gaps to the cooldown's loss: mean, standard deviation, least and most."""
    gaps = {name: [row[name] - row["cooldown"] for row in rows] for name in list(rows[0])[2:]}
    thirds = [min(windows, key=lambda n: abs(n * every - row["step"] / 3)) for row in rows]
    gaps["third"] = [
        row[f"average of {n}"] - row["cooldown"] for n, row in zip(thirds, rows, strict=True)
    ]
    return {
        name: {
            "mean": round(statistics.fmean(of), 4),
            "sd": round(statistics.stdev(of), 4),
            "least": round(min(of), 4),
            "most": round(max(of), 4),
        }
        for name, of in gaps.items()
    }


if __name__ == "__main__":
    main()
