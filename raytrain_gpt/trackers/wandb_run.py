"""The trackers Weights & Biases and Trackio, which has the same interface."""

from __future__ import annotations

import glob
import html
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from raytrain_gpt.columns import Row
from raytrain_gpt.config.built_in import TrackioSettings, WandbSettings
from raytrain_gpt.errors import reason
from raytrain_gpt.format import shell
from raytrain_gpt.trackers.tracked_run import End, TrackedRun, plottable_values

_INIT_TIMEOUT_S = 30
_UPLOAD_TIMEOUT_S = 20
"""Both together are less than the minute that a tracker has to finish."""


class Wandb:
    """A run of Weights & Biases, the same in all attempts; offline if the server cannot be used.

    Steps are values on the x axis: wandb's own step only grows, and it drops a row that goes back.
    """

    def __init__(self, run: TrackedRun, settings: WandbSettings) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._tracked, self._wandb = run, wandb
        hooks = sys.exit, sys.excepthook
        try:
            self._run, offline = self._open(run, settings)
        finally:
            sys.exit, sys.excepthook = hooks
        sync = f"{shell('wandb', 'sync', run.directory / 'wandb')}/offline-run-*-{run.id}"
        run.log(f"wandb       {f'offline{offline}; upload: {sync}' if offline else self._run.url}")
        self.store = f"{settings.wandb_entity}/{settings.wandb_project}"
        self.is_new = not offline and not self._run.resumed
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def _open(self, run: TrackedRun, settings: WandbSettings) -> tuple[Any, str]:
        """Start wandb's run; return it and, if it is offline, why."""
        quiet = self._wandb.Settings(
            silent=True,
            console="off",
            disable_code=True,
            disable_git=True,
            save_code=False,
            symlink=False,
            init_timeout=_INIT_TIMEOUT_S,
            finish_timeout=_UPLOAD_TIMEOUT_S,
            stop_fn=lambda: None,  # wandb's page would send SIGINT to this process
            x_disable_stats=True,
            x_disable_meta=True,
            x_save_requirements=False,
        )
        start = partial(
            self._wandb.init,
            project=settings.wandb_project,
            entity=settings.wandb_entity,
            name=run.name,
            id=run.id,
            group=run.group,
            config=run.configuration,
            dir=str(run.directory),
            resume="allow",
            allow_val_change=True,
            reinit="create_new",
            settings=quiet,
        )
        if settings.wandb_mode == "offline":
            return start(mode="offline"), " by wandb_mode"
        try:
            if self._wandb.login(prompt=False, verify=False):
                return start(mode="online"), ""
            why = " without an API key (WANDB_API_KEY, or wandb login)"
        except self._wandb.Error as error:
            why = f" ({reason(error)})"
            self._wandb.teardown()  # after a failed start, its process refuses the same id
        return start(mode="offline"), why

    def rows(self, rows: list[Row]) -> None:
        for row in rows:
            self._run.log({**plottable_values(row), "step": row["step"]})

    def text(self, step: int, name: str, text: str) -> None:
        self._run.log({name: self._wandb.Html(_page(text)), "step": step})

    def finish(self, end: End, files: list[Path]) -> None:
        for file in files:  # in a folder, since wandb has a config.yaml of its own
            self._run.save(
                glob.escape(str(file)), base_path=self._tracked.directory.parent, policy="now"
            )
        if end == "interrupted":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if end == "finished" else 1)
        if self._wandb.run is None:  # a notebook may have a run of its user's
            self._wandb.teardown()  # its process may still write, but ends with a Ray actor


class Trackio:
    """A run of Trackio, found by its name when it resumes."""

    def __init__(self, run: TrackedRun, settings: TrackioSettings) -> None:
        import matplotlib.figure  # noqa: F401, else trackio may see it half imported and drop numbers
        import trackio

        for module in ("trackio", "trackio.run", "trackio.utils", "trackio.deploy"):
            setattr(sys.modules[module], "print", lambda *_, **__: None)  # noqa: B010
        self._run_dir, self._id, self._trackio = run.directory, run.id, trackio
        place = "" if settings.trackio_space else os.environ.get("TRACKIO_DIR", "")
        self.store = settings.model_dump_json() + place
        self._run = trackio.init(
            project=settings.trackio_project,
            name=f"{run.name}-{run.id[:6]}",  # it finds runs by name
            group=run.group,
            space_id=settings.trackio_space,
            private=True if settings.trackio_space else None,
            config=run.configuration,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        show = shell("trackio", "show", "--project", settings.trackio_project)
        space = settings.trackio_space
        run.log(f"trackio     {f'https://huggingface.co/spaces/{space}' if space else show}")

    def rows(self, rows: list[Row]) -> None:
        for row in rows:
            self._run.log(plottable_values(row), step=row["step"])

    def text(self, step: int, name: str, text: str) -> None:
        self._run.log({name: self._trackio.Html(_page(text))}, step=step)

    def finish(self, end: End, files: list[Path]) -> None:
        artifact = self._trackio.Artifact(f"run-{self._id}", "run")
        for file in files:
            artifact.add_file(file, file.relative_to(self._run_dir).as_posix())
        if files:
            self._run.log_artifact(artifact)
        self._run.finish()


def _page(text: str) -> str:
    return f'<pre style="white-space: pre-wrap">{html.escape(text)}</pre>'
