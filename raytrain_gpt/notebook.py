"""`train` for notebooks and other Python programs.

    from raytrain_gpt import train
    run = train(preset="quickstart", max_steps=100)
    plt.plot(*run.curve("train/loss"))

The console lines are printed. Interrupting the kernel saves a checkpoint; repeat the call to resume.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytrain_gpt.config.kinds import BUILT_IN, Registry
from raytrain_gpt.redact import say

if TYPE_CHECKING:
    from raytrain_gpt.runs.provenance import TrainedSequence


@dataclass(frozen=True)
class TrainedRun:
    """A run after `train`.

    Attributes:
        step: Optimizer steps done.
        checkpoint: Directory or URL of the newest checkpoint.
        best: Checkpoint with the lowest validation loss, or None without an evaluation.
        val_loss: Last validation loss in nats per token, or None without an evaluation.
        metrics: Rows of metrics.jsonl: training steps, evaluations and events.
        registry: Has the user code of the run.
    """

    run_dir: str
    step: int
    checkpoint: str
    best: str | None
    val_loss: float | None
    report: str
    metrics: list[dict[str, Any]] = field(repr=False)
    registry: Registry = field(default=BUILT_IN, repr=False)

    def curve(self, key: str) -> tuple[list[int], list[float]]:
        """Return steps and values of a metric, for `plt.plot(*run.curve("val/loss"))`; raises KeyError."""
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
        options |= {"registry": self.registry}
        return sample_checkpoint(path, prompt, print, num_samples=num_samples, **options)


def train(
    preset: str | None = None,
    config: str | Path | None = None,
    code: str | Path | Sequence[str | Path] | None = None,
    accept_changed_code: bool = False,
    **fields: Any,
) -> TrainedRun:
    """Train a model, or resume the run of this name, and return when it is finished.

    Args:
        preset: As in `raytrain-gpt train`.
        config: Path or URL of a YAML file, instead of a preset.
        code: Python files that register your own models, optimizers and so on.
        accept_changed_code: Resume although the code has changed.
        fields: Configuration fields by name, such as `max_steps=500`; they override both.

    Raises:
        UserError: the configuration, data, storage or cluster is unusable.
        Interrupted: the kernel was interrupted; a checkpoint is saved, except after a third interrupt.
        StorageError: the storage was unreachable for too long.
        TrainingFailed: the run failed.
    """
    from raytrain_gpt.data.locations import read_code  # slow to import
    from raytrain_gpt.train.run_config import run_config

    files = [code] if isinstance(code, str | Path) else code or ()
    registry = Registry(read_code(files, accept_changed_code))
    resolved, source = run_config(preset, config, fields, registry)
    # Ray and tqdm warn about missing ipywidgets, but the displays that use them are disabled here.
    logging.getLogger("ray.widgets").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "IProgress not found")
        from raytrain_gpt.checkpoint.catalog import Catalog, best_by_loss  # slow to import
        from raytrain_gpt.runs.report import REPORT_FILE
        from raytrain_gpt.runs.summary import run_end
        from raytrain_gpt.trackers.run_files import read_rows
        from raytrain_gpt.train import launch

    say(source)
    summary = launch.train(resolved, say)
    run_end(summary, say)
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
        registry=registry,
    )


def batch_at(
    run: str | Path, step: int, storage_path: str = "runs", data: str | None = None
) -> list[TrainedSequence]:
    """List the sequences that a run trained on at a step.

    Args:
        run: Its name in `storage_path`, or its path.
        data: Its dataset, as in `data_path`, or None for the one recorded by the run.

    Raises:
        UserError: the run, step or dataset does not exist.
    """
    from raytrain_gpt.data.locations import find
    from raytrain_gpt.runs.provenance import RunProvenance

    return RunProvenance(find(run, storage_path), data).step(step)


def replay(
    run: str | Path,
    first: int,
    last: int,
    *,
    storage_path: str = "runs",
    data: str | None = None,
    code: Sequence[str | Path] = (),
    new_code: Sequence[str | Path] = (),
    **change: Any,
) -> list[tuple[dict[str, Any], dict[str, str]]]:
    """Train the steps `first` to `last` of a run again, in this process.

    Args:
        run: As in `batch_at`, like `storage_path` and `data`.
        code: Files with the run's user code; `new_code`: those to use instead.
        change: `settings` or `masked`, as in `Replay`.

    Returns:
        For each step the values that a run records of its math, and of each parameter the SHA-256 after it.

    Raises:
        UserError: the run, a step, its data or its code does not exist.
    """
    from raytrain_gpt.data.locations import find, read_code
    from raytrain_gpt.replays.steps import Replay, sha256, undisturbed
    from raytrain_gpt.runs.provenance import RunProvenance

    source = RunProvenance(find(run, storage_path), data)

    def steps() -> list[tuple[dict[str, Any], dict[str, str]]]:
        changed = {**change, "new_code": read_code(new_code)}
        again = Replay(source, first, last, [read_code(code)], **changed, log=say)
        again.run_to(first - 1)
        parameters = dict(again.model.named_parameters())
        return [(row, {name: sha256(p) for name, p in parameters.items()}) for row in again.rows]

    return undisturbed(steps)
