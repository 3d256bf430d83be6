"""Files of a run besides checkpoints: configuration, report and the recorder's rows."""

from __future__ import annotations

from raytrain_gpt.checkpoint.catalog import CODE_FILE, Checkpoint
from raytrain_gpt.config.load import load_recorded
from raytrain_gpt.config.schema import Config
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
    merge_rows,
    read_rows,
)
from raytrain_gpt.tracking.sync import RunSync
from raytrain_gpt.tracking.trackers import TrackedRun


class RunOutput:
    """Small files of a run, edited in a local directory and copied to an object store."""

    def __init__(self, run_dir: Location, tracker_tags: dict[str, str], log: Log) -> None:
        self.run_dir, self.sync = run_dir, RunSync(run_dir)
        self._tracker_tags, self.log = tracker_tags, log

    def check_is_ours(self) -> None:
        """Check, before the first step, that only files of a run would be replaced.

        Raises:
            CheckpointError: the directory has files of these names but no run's configuration.
        """
        names = (CONFIG_FILE, METRICS_FILE, LOG_FILE, SAMPLES_FILE, REPORT_FILE)
        existing = [name for name in names if (self.sync.work_dir / name).exists()]
        if not existing:
            return
        try:
            load_recorded(self.sync.work_dir / CONFIG_FILE)
        except ConfigError:
            raise CheckpointError(
                f"{self.run_dir} has {' and '.join(existing)}, but was not written by a run; use another "
                "run_name or storage_path"
            ) from None

    def write_config(self, config: Config) -> None:
        """Write the resolved configuration and the code, so that `--config` and `--code` repeat the run."""
        Location.of(self.sync.work_dir / CONFIG_FILE).write_text(config.to_yaml())
        if config.code:
            Location.of(self.sync.work_dir / CODE_FILE).write_text(config.code.text)
        self.sync.push()

    def recorder_spec(
        self, config: Config, step: int, checkpoints: list[Checkpoint], attempt: Row
    ) -> RecorderSpec:
        """Specify a recorder.

        Args:
            step: Rows above it are dropped, since those steps are repeated.
            checkpoints: Their rows replace those that a dead recorder did not write.
            attempt: Details of the event `attempt`.
        """
        saved_rows = [row for checkpoint in checkpoints for row in checkpoint.rows()]
        return RecorderSpec(
            sync=self.sync,
            run=TrackedRun(self.sync.work_dir, config, step, self._tracker_tags),
            attempt=attempt,
            saved_rows=saved_rows,
        )

    def last_steps(self, step: int, saved_rows: list[Row], number: int) -> list[Row]:
        """Rows of up to `number` steps before a step, including rows of dead recorders."""
        rows = merge_rows(read_rows(self.sync.work_dir), saved_rows, step)
        return [row for row in rows if "train/loss" in row][-number:]

    def write_report(self) -> None:
        """Write `report.html`; call it before closing the recorder, which uploads it to the trackers."""
        try:
            write_report(self.sync)
        except Exception as error:  # a failed chart must not cost a trained model
            self.log(f"no report: {error!r}")

    def next_attempt(self, newest: int) -> int:
        """First attempt number above `newest` that is unused by Ray's directories and by rows.

        Every `fit()` gets a fresh name. Ray Train resumes automatically from the index of a used name
        and rewrites it in place, so a kill at the wrong moment makes the name unusable.
        """
        names = (self.run_dir / "ray").names()
        rows = read_rows(self.sync.work_dir)
        recorded: list[int] = [row["attempt"] for row in rows if row.get("event") == "attempt"]
        return max([newest, *recorded, *(int(name) for name in names if name.isdigit())]) + 1
