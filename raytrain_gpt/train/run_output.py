"""What a run writes besides checkpoints: configuration, report, and the rows of its recorder."""

from __future__ import annotations

from raytrain_gpt.checkpoint.catalog import Checkpoint
from raytrain_gpt.config.load import load_config_file
from raytrain_gpt.config.resolved import FittedConfig
from raytrain_gpt.errors import CheckpointError, ConfigError
from raytrain_gpt.format import Log
from raytrain_gpt.storage.location import Location
from raytrain_gpt.tracking.recorder import RecorderSpec
from raytrain_gpt.tracking.report import REPORT_FILE, write_report
from raytrain_gpt.tracking.run_files import (
    CONFIG_FILE,
    LOG_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    Row,
    check_rows,
    merge_rows,
    read_rows,
)
from raytrain_gpt.tracking.sync import RunSync


class RunOutput:
    """The small files of a run, worked on in a local directory and copied to an object store."""

    def __init__(self, run_dir: Location, mlflow_tags: dict[str, str], log: Log) -> None:
        self.run_dir, self.sync = run_dir, RunSync(run_dir)
        self._mlflow_tags, self.log = mlflow_tags, log

    def check_is_ours(self) -> None:
        """Check, before the first step, that no file is replaced that a run did not write.

        Raises:
            CheckpointError: the directory has files of these names and no run's configuration.
        """
        names = (CONFIG_FILE, METRICS_FILE, LOG_FILE, SAMPLES_FILE, REPORT_FILE)
        there = [name for name in names if (self.sync.work_dir / name).exists()]
        if not there:
            return
        try:
            load_config_file(self.sync.work_dir / CONFIG_FILE)
        except ConfigError:
            raise CheckpointError(
                f"{self.run_dir} has {' and '.join(there)}, but no run wrote there; use another run_name or "
                "storage_path"
            ) from None

    def write_config(self, config: FittedConfig) -> None:
        """Write the resolved configuration, with which `--config` repeats the run."""
        Location.of(self.sync.work_dir / CONFIG_FILE).write_text(config.to_yaml())
        self.sync.push()

    def rows(self) -> list[Row]:
        """What is in metrics.jsonl."""
        return read_rows(self.sync.work_dir)

    def recorder_spec(
        self, config: FittedConfig, step: int, checkpoints: list[Checkpoint], attempt: Row | None
    ) -> RecorderSpec:
        """What a recorder begins with.

        Args:
            step: Rows above it are dropped: those steps are done again.
            checkpoints: Their rows fill in what a dead recorder had not written.
            attempt: Details of the event `attempt`; None: nothing is trained, only evaluated.
        """
        saved_rows = [row for checkpoint in checkpoints for row in checkpoint.rows()]
        check_rows(self.sync.work_dir, saved_rows, self.log)
        samples = [(c.state.step, c.evaluated.samples) for c in checkpoints if c.evaluated]
        return RecorderSpec(
            sync=self.sync,
            config=config,
            mlflow_tags=self._mlflow_tags,
            step=step,
            attempt=attempt,
            saved_rows=saved_rows,
            saved_samples=[(at, text) for at, text in samples if text],
        )

    def last_steps(self, step: int, saved_rows: list[Row], number: int) -> list[Row]:
        """The rows of up to `number` steps before a step, those of dead recorders included."""
        rows = merge_rows(self.rows(), saved_rows, step)
        return [row for row in rows if "train/loss" in row][-number:]

    def write_report(self) -> None:
        """Write `report.html`; before the recorder closes, which hands it to the trackers."""
        try:
            write_report(self.sync)
        except Exception as error:  # a chart that cannot be drawn must not cost a trained model
            self.log(f"no report: {error!r}")

    def next_attempt(self, newest: int) -> int:
        """The first attempt number, above `newest`, that Ray has no directory for and no row tells of.

        Every `fit()` gets a name of its own: Ray Train resumes by itself from a name's index, which it
        rewrites in place, so that one killed at the wrong moment makes the name unusable.
        """
        names = (self.run_dir / "ray").names()
        told: list[int] = [row["attempt"] for row in self.rows() if row.get("event") == "attempt"]
        return max([newest, *told, *(int(name) for name in names if name.isdigit())]) + 1
