"""`train` for a notebook's cell, or any Python program: the command's run with its progress in place.

    from raytrain_gpt import train
    run = train(preset="quickstart", max_steps=100)
    plt.plot(*run.curve("train/loss"))

In Jupyter a bar, the loss so far and the last lines are drawn again with every line of the run;
elsewhere the lines are printed. Interrupting the kernel saves a checkpoint, and the same call goes on.
"""

from __future__ import annotations

import html
import logging
import re
import sys
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytrain_gpt.config.load import resolve
from raytrain_gpt.config.schema import Config
from raytrain_gpt.redact import redacted

if TYPE_CHECKING:
    from raytrain_gpt.tracking.summary import RunSummary

SHOWN_LINES = 12
WIDTH, HEIGHT = 640, 160
_COLOURS = {"train": "#1f77b4", "val": "#d62728"}
_LOSS_LINE = re.compile(r"step (\d+)/(\d+) \| (?:epoch \d+ \| |(val) )loss ([\d.]+) \|")
"""What `runtime.console` makes of a step's row and of an evaluation's."""

Point = tuple[int, float]


@dataclass(frozen=True)
class TrainedRun:
    """A run after `train`.

    Attributes:
        run_dir: Its directory or URL.
        step: Updates done.
        checkpoint: The newest one's directory or URL.
        best: The one with the lowest validation loss; None: none was evaluated.
        val_loss: Of the last evaluation, nats per token; None: there was none.
        report: Its report.html.
        metrics: The rows of metrics.jsonl: training steps, evaluations and events.
    """

    run_dir: str
    step: int
    checkpoint: str
    best: str | None
    val_loss: float | None
    report: str
    metrics: list[dict[str, Any]] = field(repr=False)

    def curve(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric, for `plt.plot(*run.curve("val/loss"))`.

        Raises:
            KeyError: no row has it; names those that there are.
        """
        points = [(row["step"], row[key]) for row in self.metrics if row.get(key) is not None]
        if not points:
            known = sorted({name for row in self.metrics for name in row if "/" in name})
            raise KeyError(f"no metric {key}; there are {', '.join(known)}")
        return [step for step, _ in points], [value for _, value in points]

    def sample(
        self,
        prompt: str,
        *,
        num_samples: int = 1,
        max_new_tokens: int = 100,
        top_k: int | None = 50,
        top_p: float = 1.0,
        temperature: float = 1.0,
        seed: int = 42,
    ) -> list[str]:
        """Continuations of a prompt, the prompt included, by the best checkpoint, else the newest.

        Args:
            prompt: What they start with.
            num_samples: How many.
            max_new_tokens: Of each, unless the text ends before.
            top_k: Draw from the k most likely tokens; None: from all.
            top_p: Draw from the most likely tokens that have this probability together.
            temperature: 0: always the most likely token.
            seed: Of the draws.
        """
        from raytrain_gpt.evaluate.inference import sample_checkpoint

        return sample_checkpoint(
            self.best or self.checkpoint,
            prompt,
            print,
            num_samples=num_samples,
            max_new_tokens=max_new_tokens,
            top_k=top_k,
            top_p=top_p,
            temperature=temperature,
            seed=seed,
        )


def train(preset: str | None = None, config: str | Path | None = None, **leaves: Any) -> TrainedRun:
    """Train, or go on where the run of this name stopped, and return when it is finished.

    Args:
        preset: As of `raytrain-gpt train`; None: quickstart.
        config: YAML file or its URL instead of a preset.
        leaves: Configuration by name, as `max_steps=500`; wins over both.

    Raises:
        UserError: something is wrong with the configuration, data, storage or cluster.
        Interrupted: the kernel was interrupted, after saving; a third time at once ends the kernel.
        StorageError: the storage was out of reach for too long.
        TrainingFailed: the run failed for good.
    """
    from raytrain_gpt.data.locations import config_on_disk  # here: its import takes a while

    with config_on_disk(config) as file:
        resolved = resolve(preset, file, leaves)
    # Ray and tqdm ask for ipywidgets in a notebook, for displays that are off here.
    logging.getLogger("ray.widgets").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "IProgress not found")
        from raytrain_gpt.tracking.summary import run_end  # here: seconds of import
        from raytrain_gpt.train import launch

    log = _log(resolved)
    summary = launch.train(resolved, log)
    run_end(summary, log)
    return _trained_run(summary)


def _trained_run(summary: RunSummary) -> TrainedRun:
    from raytrain_gpt.checkpoint.catalog import Catalog
    from raytrain_gpt.tracking.report import REPORT_FILE
    from raytrain_gpt.tracking.run_files import read_rows

    assert summary.checkpoint is not None, "a finished run has its last step's checkpoint"
    rows = read_rows(summary.sync.work_dir)
    losses = [row["val/loss"] for row in rows if row.get("val/loss") is not None]
    best = Catalog(summary.run_dir).best()
    return TrainedRun(
        run_dir=str(summary.run_dir),
        step=summary.step,
        checkpoint=str(summary.checkpoint.path),
        best=str(best.path) if best else None,
        val_loss=losses[-1] if losses else None,
        report=str(summary.run_dir / REPORT_FILE),
        metrics=rows,
    )


def _log(config: Config) -> Callable[[str], None]:
    """Where console lines go: into one output of the cell in Jupyter, else they are printed."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if getattr(shell, "kernel", None) is None:
        return lambda line: print(redacted(line), flush=True)
    from IPython.display import display

    progress = Progress(config.run.run_name, config.train.max_steps)
    handle = display(progress, display_id=True)

    def show(line: str) -> None:
        progress.add(redacted(line))
        handle.update(progress)

    return show


class Progress:
    """What a cell shows of a run, made from its console lines.

    Args:
        name: Of the run.
        max_steps: Until its lines tell another number.
    """

    def __init__(self, name: str, max_steps: int) -> None:
        self._name, self._step, self._max_steps = name, 0, max_steps
        self._lines: deque[str] = deque(maxlen=SHOWN_LINES)
        self._points: dict[str, list[Point]] = {"train": [], "val": []}

    def add(self, line: str) -> None:
        """Take a console line, which may be several."""
        self._lines.extend(line.splitlines())
        if found := _LOSS_LINE.match(line):
            self._step, self._max_steps = int(found[1]), int(found[2])
            self._points[found[3] or "train"].append((self._step, float(found[4])))

    def __repr__(self) -> str:
        return "\n".join(self._lines)

    def _repr_html_(self) -> str:
        lines = html.escape("\n".join(self._lines))
        return (
            f"<div><b>{html.escape(self._name)}</b> "
            f'<progress value="{self._step}" max="{self._max_steps}"></progress> '
            f"step {self._step} of {self._max_steps}{self._chart()}<pre>{lines}</pre></div>"
        )

    def _chart(self) -> str:
        """The losses so far as SVG: training blue, validation red; nothing before the second."""
        points = [point for kind in self._points.values() for point in kind]
        if len(self._points["train"]) < 2:
            return ""
        left, right = min(step for step, _ in points), max(step for step, _ in points)
        low, high = min(loss for _, loss in points), max(loss for _, loss in points)

        def place(point: Point) -> str:
            x = WIDTH * (point[0] - left) / max(right - left, 1)
            y = HEIGHT * (high - point[1]) / ((high - low) or 1)
            return f"{x:.1f},{y:.1f}"

        curves = "".join(
            f'<polyline fill="none" stroke="{_COLOURS[kind]}" points="{" ".join(map(place, found))}"/>'
            for kind, found in self._points.items()
        )
        label = (
            f"loss {high:.3f} to {low:.3f}, steps {left} to {right}; blue training, red validation"
        )
        box = f'viewBox="-4 -4 {WIDTH + 8} {HEIGHT + 8}" width="{WIDTH}" height="{HEIGHT}"'
        return f'<br><svg {box} role="img">{curves}</svg><br><small>{label}</small>'
