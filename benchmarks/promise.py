"""Loss curve of a run with three SIGKILLs and 4, 2 and again 4 workers, over that of an undisturbed run.

Both runs are `raytrain-gpt train` on a private Ray cluster, with `exact: true`. In the second, SIGKILL hits:

1. a worker; the run restarts by itself;
2. the command and all its processes, Ray's included; the command is repeated with two workers;
3. the command alone, so that Ray ends its processes; the command is repeated with four workers.

The benchmark fails unless both runs record every step once, with the same order hash. It prints the steps
that were lost and trained again, the largest difference of losses, also between the first and the second
time of such a step, and whether the final weights are the same bits.

    python benchmarks/promise.py tinyshakespeare.txt       # stdlib if no source is given
    python benchmarks/promise.py --draw                    # the picture, from the recorded CSV
"""

from __future__ import annotations

import contextlib
import csv
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from harness import flags, report, without_cluster

from raytrain_gpt.columns import Row
from raytrain_gpt.config.call_options import PrepareOptions
from raytrain_gpt.config.load import load_preset
from raytrain_gpt.config.schema import Config
from raytrain_gpt.ingest.prepare import prepare
from raytrain_gpt.trackers.run_files import read_rows

HERE = Path(__file__).parent
STEPS, CHECKPOINT_EVERY = 400, 50
COMMANDS = ((4, {85: "worker", 190: "everything"}), (2, {287: "command"}), (4, {}))
"""Workers of each command, and what is killed once a step is recorded."""
GONE_TIMEOUT_S = 120


def main() -> None:
    csv_file, picture = HERE / "results" / "promise.csv", HERE.parent / "docs/images/promise.png"
    parser = flags(__doc__, csv=str(csv_file), picture=str(picture), draw=False)
    parser.add_argument("source", nargs="?", default="stdlib", help="default: %(default)s")
    args = parser.parse_args()
    if not args.draw:
        with tempfile.TemporaryDirectory() as work:
            rows, facts = compare(args.source, Path(work))
        Path(args.csv).parent.mkdir(exist_ok=True)
        with Path(args.csv).open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        report(source=Path(args.source).name, **facts)
    with Path(args.csv).open(newline="") as file:
        draw(list(csv.DictReader(file)), args.picture)


def compare(source: str, work: Path) -> tuple[list[Row], dict[str, Any]]:
    """Train both runs; return a row per step, and how they compare."""
    prepare([source], work / "data", "bytes", PrepareOptions(val_fraction=0.1), log=print)
    whole, killed = Run(work, "undisturbed"), Run(work, "killed")
    whole.command(4, {})
    for workers, kills in COMMANDS:
        killed.command(workers, kills)
    return results(whole, killed)


class Run:
    """A run of the benchmark.

    Attributes:
        recorded: Step, loss and order hash of all steps, also of those that were lost.
    """

    def __init__(self, work: Path, name: str) -> None:
        self.work, self.dir = work, work / name
        self.recorded: set[tuple[int, float, str]] = set()
        self.config = work / f"{name}.yaml"
        self.config.write_text(config(work, name).to_yaml())

    def command(self, workers: int, kills: dict[int, str]) -> None:
        """Run `raytrain-gpt train` until it ends; once a step in `kills` is recorded, kill."""
        print(f"{self.dir.name}: train --num_workers {workers}", flush=True)
        argv = ["train", f"--config={self.config}", f"--num_workers={workers}"]
        env = {**without_cluster(), "TMPDIR": str(self.work)}
        due = sorted(kills)
        with self.dir.with_suffix(".log").open("a") as log:
            process = psutil.Popen(
                [sys.executable, "-m", "raytrain_gpt.cli", *argv], env=env, stdout=log, stderr=log
            )
            while process.poll() is None:
                self.record()
                if due and any(step >= due[0] for step, *_ in self.recorded):
                    kill(process, kills[due.pop(0)])
                time.sleep(0.1)
        self.record()
        if due or (process.returncode and not kills):
            sys.exit(f"train failed:\n{self.dir.with_suffix('.log').read_text()}")
        deadline = time.monotonic() + GONE_TIMEOUT_S
        while self.has_processes() and time.monotonic() < deadline:
            time.sleep(1)

    def record(self) -> None:
        self.recorded |= {
            (row["step"], row["train/loss"], row["data/order_hash"]) for row in self.steps()
        }

    def has_processes(self) -> bool:
        """Return whether processes of a command remain, found by their TMPDIR."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("TMPDIR", "").startswith(str(self.work)):
                    return True
        return False

    def steps(self) -> list[Row]:
        return [row for row in read_rows(self.dir) if "train/loss" in row]

    def weights(self) -> bytes:
        return (self.dir / f"checkpoints/step={STEPS:08d}/model.safetensors").read_bytes()


def kill(command: psutil.Process, what: str) -> None:
    """SIGKILL a worker, the command, or the command and all its descendants."""
    below = command.children(recursive=True)
    workers = [child for child in below if "ray::RayTrainWorker" in " ".join(child.cmdline())]
    victims = {"worker": workers[:1], "command": [command], "everything": [command, *below]}[what]
    print(f"  SIGKILL: {what}, {len(victims)} of {1 + len(below)} processes", flush=True)
    for victim in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()


def results(whole: Run, killed: Run) -> tuple[list[Row], dict[str, Any]]:
    """Return a row per step, and how the runs compare."""
    expected, found = whole.steps(), killed.steps()
    for rows in (expected, found):
        assert [row["step"] for row in rows] == [*range(1, STEPS + 1)], "not every step once"
    hashes = {row["step"]: row["data/order_hash"] for row in expected}
    assert all(order == hashes[step] for step, _, order in killed.recorded), "another order"
    attempts = [row for row in read_rows(killed.dir) if row.get("event") == "attempt"]
    names = iter(name for _, kills in COMMANDS for name in kills.values())
    ends = {row["step"] + row["lost_steps"]: next(names) for row in attempts[1:]}
    again = {s for a in attempts for s in range(a["step"] + 1, a["step"] + a["lost_steps"] + 1)}
    losses = {row["step"]: row["train/loss"] for row in expected}
    rows = [
        {
            "step": row["step"],
            "undisturbed": losses[row["step"]],
            "killed": row["train/loss"],
            "workers": [a["num_workers"] for a in attempts if a["step"] < row["step"]][-1],
            "trained": 1 + (row["step"] in again),
            "sigkill": ends.get(row["step"], ""),
            "order_hash": row["data/order_hash"],
        }
        for row in found
    ]
    return rows, {
        "steps": STEPS,
        "kills": {name: step for step, name in ends.items()},
        "lost_steps": [attempt["lost_steps"] for attempt in attempts[1:]],
        "same_order_hash": True,
        "largest_loss_difference": max(abs(loss - losses[s]) for s, loss, _ in killed.recorded),
        "same_weights": whole.weights() == killed.weights(),
    }


def config(work: Path, name: str) -> Config:
    fields = {
        "global_batch_tokens": 24 * 64,
        "micro_batch_sequences": 6,
        "exact": True,
        "max_steps": STEPS,
        "log_every_steps": 1,
        "checkpoint_every_steps": CHECKPOINT_EVERY,
        "eval_every_steps": STEPS,
        "num_samples": 0,
        "cpus_per_worker": 1,
        "data_path": str(work / "data"),
        "storage_path": str(work),
        "run_name": name,
        "mlflow_uri": None,
        "tensorboard": False,
    }
    return load_preset("shakespeare").updated(fields)


def draw(rows: list[dict[str, str]], picture: str) -> None:
    """Draw both curves, the kills, the steps trained again and the workers, and one kill in detail."""
    from matplotlib.figure import Figure
    from matplotlib.patches import ConnectionPatch

    pale, dark, orange, gray = "#9fd0f5", "#0b3c6f", "#c65400", "#4d565f"
    workers = [row["workers"] for row in rows]
    whole, killed = ([float(row[name]) for row in rows] for name in ("undisturbed", "killed"))
    kills = [int(row["step"]) for row in rows if row["sigkill"]]
    figure = Figure(figsize=(10, 4.2))
    axes = figure.add_axes((0.07, 0.25, 0.91, 0.74))
    detail = axes.inset_axes((0.5, 0.36, 0.5, 0.64))
    for ax, width in ((axes, 8), (detail, 12)):
        ax.plot(range(1, STEPS + 1), whole, color=pale, linewidth=width, solid_capstyle="round")
        ax.plot(range(1, STEPS + 1), killed, color=dark, linewidth=1.8)
        for step in kills:
            checkpoint = (step - 1) // CHECKPOINT_EVERY * CHECKPOINT_EVERY
            height = 1 if ax is detail else 0.36
            ax.axvspan(checkpoint, step, 0, height, color=orange, alpha=0.15, linewidth=0)
            marker = {"marker": "X", "markersize": 16, "markeredgecolor": "white", "zorder": 5}
            ax.plot(step, killed[step - 1], color=orange, **marker)
    first, last = kills[1] - 47, kills[1] + 14
    shown = whole[first - 1 : last]
    detail.set(xlim=(first, last), ylim=(min(shown) - 0.16, max(shown) + 0.05))
    detail.set(xticks=[], yticks=[])
    axes.set(xlim=(0, STEPS + 1), ylim=(min(whole) - 0.75, max(whole) + 0.1))
    axes.set_xticks([0, 100, 200, 300, 400], ["step 0", "100", "200", "300", "400"])
    axes.tick_params(labelsize=17, color=gray, labelcolor=gray)
    box = axes.indicate_inset_zoom(detail, edgecolor=gray, alpha=0.6)
    for connector in box.connectors:
        connector.set_visible(False)
    corner = {"coordsA": "data", "coordsB": detail.transAxes, "axesA": axes}
    for x, side in ((first, 0), (last, 1)):
        line = ConnectionPatch(
            (x, detail.get_ylim()[1]), (side, 0), color=gray, alpha=0.6, **corner
        )
        axes.add_artist(line)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylabel("training loss", fontsize=17, color=gray)

    def write(x: float, y: float, text: str, color: str, ax: Any = axes, **how: Any) -> None:
        ax.text(x, y, text, color=color, fontsize=17, transform=ax.get_xaxis_transform(), **how)

    write(48, 0.8, "undisturbed run", "#2f84c4")
    write(48, 0.67, "killed three times", dark)
    for step in kills:
        write(step, 0.045, "SIGKILL", orange, ha="center")
    write(kills[1] - 21, 0.06, "lost, trained again", orange, detail, ha="center")
    changes = [0, *(i for i in range(1, STEPS) if workers[i] != workers[i - 1]), STEPS]
    for start, stop in pairwise(changes):
        line = {"color": gray, "linewidth": 2, "clip_on": False}
        axes.plot([start + 2, stop - 2], [-0.19] * 2, transform=axes.get_xaxis_transform(), **line)
        text = f"{workers[start]} workers"
        write((start + stop) / 2, -0.22, text, gray, ha="center", va="top")
    figure.savefig(picture, dpi=100)


if __name__ == "__main__":
    main()
