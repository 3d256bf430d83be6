"""`train` for notebooks and other Python programs.

    from raytrain_gpt import train
    run = train(preset="quickstart", max_steps=100)
    plt.plot(*run.curve("train/loss"))

In Jupyter the cell shows a live progress bar, the loss and the last console lines; elsewhere the lines
are printed. Interrupting the kernel saves a checkpoint; repeat the call to resume.
"""

from __future__ import annotations

import html
import logging
import re
import sys
import warnings
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytrain_gpt.config.load import describe_config, given_fields, resolve
from raytrain_gpt.config.schema import Config, check_kinds
from raytrain_gpt.format import Log
from raytrain_gpt.redact import printable

if TYPE_CHECKING:
    from raytrain_gpt.train.provenance import TrainedSequence

SHOWN_LINES = 12
_COLORS = "--c1: #1f77b4; --c2: #d62728; --c7: currentColor; --c8: #8884"
"""Style variables of `tracking.charts`."""
_LOSS_LINE = re.compile(r"step (\d+)/(\d+) \| (?:epoch \d+ \| |(val) )loss ([\d.]+) \|")
"""As `format.step_line` and `format.eval_line` write them."""


@dataclass(frozen=True)
class TrainedRun:
    """A run after `train`.

    Attributes:
        step: Optimizer steps done.
        checkpoint: Directory or URL of the newest checkpoint.
        best: Checkpoint with the lowest validation loss, or None without an evaluation.
        val_loss: Last validation loss in nats per token, or None without an evaluation.
        metrics: Rows of metrics.jsonl: training steps, evaluations and events.
    """

    run_dir: str
    step: int
    checkpoint: str
    best: str | None
    val_loss: float | None
    report: str
    metrics: list[dict[str, Any]] = field(repr=False)

    def curve(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric, for `plt.plot(*run.curve("val/loss"))`; raises KeyError."""
        points = [(row["step"], row[key]) for row in self.metrics if row.get(key) is not None]
        if not points:
            names = sorted({name for row in self.metrics for name in row if "/" in name})
            raise KeyError(f"no metric {key} (available: {', '.join(names)})")
        return [step for step, _ in points], [value for _, value in points]

    def sample(self, prompt: str, *, num_samples: int = 1, **options: Any) -> list[str]:
        """Continue a prompt with the best checkpoint, else the newest; returns texts with the prompt.

        Args:
            options: As in `raytrain-gpt sample`: max_new_tokens, temperature, top_k, top_p, seed.

        Raises:
            ConfigError: an option is unknown or out of range.
        """
        from raytrain_gpt.evaluate.inference import sample_checkpoint

        path = self.best or self.checkpoint
        return sample_checkpoint(path, prompt, print, num_samples=num_samples, **options)


def train(
    preset: str | None = None,
    config: str | Path | None = None,
    code: str | Path | None = None,
    accept_changed_code: bool = False,
    **fields: Any,
) -> TrainedRun:
    """Train a model, or resume the run of this name, and return when it is finished.

    Args:
        preset: As in `raytrain-gpt train` (default: quickstart).
        config: Path or URL of a YAML file, instead of a preset.
        code: Python file with your own kinds, as in docs/extending.md.
        accept_changed_code: Resume although the code has changed.
        fields: Configuration fields by name, such as `max_steps=500`; they override both.

    Raises:
        UserError: the configuration, data, storage or cluster is unusable.
        Interrupted: the kernel was interrupted, after saving; a third interrupt stops without saving.
        StorageError: the storage was unreachable for too long.
        TrainingFailed: the run failed.
    """
    from raytrain_gpt.data.locations import file_on_disk, use_code  # here: imports take a while

    use_code(code, accept_changed_code)
    with file_on_disk(config) as file:
        if "init_from" in given_fields(file, fields):
            from raytrain_gpt.train.preflight import sizes_of_init_from  # here: seconds of import

            fields = {**sizes_of_init_from(preset, file, fields), **fields}
        resolved = resolve(preset, file, fields)
        check_kinds(resolved)
    # Ray and tqdm warn about missing ipywidgets, which only displays disabled here would use.
    logging.getLogger("ray.widgets").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "IProgress not found")
        from raytrain_gpt.checkpoint.catalog import Catalog, best_by_loss  # here: seconds of import
        from raytrain_gpt.cluster.signals import StopSignals
        from raytrain_gpt.tracking.report import REPORT_FILE
        from raytrain_gpt.tracking.run_files import read_rows
        from raytrain_gpt.tracking.summary import run_end
        from raytrain_gpt.train import launch, preflight
        from raytrain_gpt.train.supervisor import BEFORE_FIRST_STEP

    log = _log(resolved)
    log(describe_config(preset, config, resolved))
    with StopSignals(BEFORE_FIRST_STEP):
        preflight.prepare_default_data(resolved, log)
    summary = launch.train(resolved, log)
    run_end(summary, log)
    rows = read_rows(summary.sync.work_dir)
    losses = [row["val/loss"] for row in rows if row.get("val/loss") is not None]
    best = best_by_loss(Catalog(summary.run_dir).complete())
    return TrainedRun(
        run_dir=str(summary.run_dir),
        step=summary.step,
        checkpoint=str(summary.checkpoint.path),
        best=str(best.path) if best else None,
        val_loss=losses[-1] if losses else None,
        report=str(summary.run_dir / REPORT_FILE),
        metrics=rows,
    )


def batch_at(
    run: str | Path, step: int, storage_path: str = "runs", data: str | None = None
) -> list[TrainedSequence]:
    """List the sequences that a run trained on at a step.

    Args:
        run: Its directory, or its name in `storage_path`.
        data: Its dataset, as in `data_path`, or None for the one recorded by the run.

    Raises:
        UserError: the run, step or dataset does not exist.
    """
    from raytrain_gpt.storage.location import Location
    from raytrain_gpt.train.provenance import RunProvenance

    return RunProvenance(str(run), Location.of(storage_path), data).step(step)


def _log(config: Config) -> Log:
    """Logger of console lines: a display of the cell in Jupyter, else print."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if getattr(shell, "kernel", None) is None:
        return lambda line: print(printable(line), flush=True)
    from IPython.display import display

    shown = RunDisplay(config.run.run_name, config.train.max_steps)
    handle = display(shown, display_id=True)

    def show(line: str) -> None:
        shown.add(printable(line))
        handle.update(shown)

    return show


class RunDisplay:
    """A cell's display of a run, made from its console lines."""

    def __init__(self, name: str, max_steps: int) -> None:
        self._name, self._step, self._max_steps = name, 0, max_steps
        self._lines: deque[str] = deque(maxlen=SHOWN_LINES)
        self._losses: dict[str, list[tuple[int, float]]] = {"train": [], "val": []}

    def add(self, line: str) -> None:
        """Show a console message of one or more lines."""
        self._lines.extend(line.splitlines())
        if match := _LOSS_LINE.match(line):
            self._step, self._max_steps = int(match[1]), int(match[2])
            self._losses[match[3] or "train"].append((self._step, float(match[4])))

    def __repr__(self) -> str:
        return "\n".join(self._lines)

    def _repr_html_(self) -> str:
        return (
            f'<div style="max-width: 40em; {_COLORS}"><b>{html.escape(self._name)}</b> '
            f'<progress value="{self._step}" max="{self._max_steps}"></progress> '
            f"step {self._step} of {self._max_steps}{self._chart()}</div>"
            f"<pre>{html.escape(repr(self))}</pre>"
        )

    def _chart(self) -> str:
        """Draw the losses as SVG once there are two training losses."""
        if len(self._losses["train"]) < 2:
            return ""
        import numpy as np

        from raytrain_gpt.tracking.charts import Chart, Curve, draw

        curves = []
        for color, (name, losses) in enumerate(self._losses.items(), start=1):
            if losses:
                steps, values = np.array(losses, dtype=float).T
                curves.append(Curve(name, steps, values, color))
        drawn = draw(Chart("loss", "nats per token", curves))
        return f"{drawn}<small>loss: blue training, red validation</small>"
