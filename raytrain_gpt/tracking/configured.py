"""The trackers that a configuration names, and their settings."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name

from raytrain_gpt.config.schema import Config
from raytrain_gpt.config.sections import TRACKERS
from raytrain_gpt.format import Log
from raytrain_gpt.storage.location import Location
from raytrain_gpt.tracking import mlflow_run
from raytrain_gpt.tracking.run_files import RunFiles
from raytrain_gpt.tracking.trackers import TrackedRun, TrackerQueue


def open_trackers(run: TrackedRun, files: RunFiles, log: Log) -> list[TrackerQueue]:
    """Create the trackers of an attempt, with the rows and samples that they may lack."""
    settings = run.config.tracking
    openers = [
        path for name, path in TRACKERS.items() if getattr(settings, name) not in (None, False)
    ]
    opened = [resolve_name(path)(run, files, log) for path in openers]
    trackers: list[TrackerQueue] = [tracker for tracker in opened if tracker is not None]
    for tracker in trackers:
        for step, text in files.found_samples:
            tracker.text(step, "samples", text)
    return trackers


def mark_interrupted(directory: Location, config: Config) -> None:
    """End a run in trackers that do not notice its process's death; may raise any error."""
    mlflow_run.mark_killed(directory, config)


def tracker_warnings(config: Config) -> list[str]:
    """List trackers that a different setting turns off."""
    is_off = config.tracking.mlflow_uri == "auto" and mlflow_run.tracking_uri(config) is None
    return [mlflow_run.OFF] if is_off else []


def absolute_stores(config: Config, absolute: Callable[[str, str], str]) -> dict[str, str]:
    """Return trackers' settings with absolute paths, by a function of field and path.

    Raises:
        ConfigError: a tracker does not support its store.
    """
    if (uri := config.tracking.mlflow_uri) is None or uri == "auto":
        return {}
    mlflow_run.check_uri(uri)
    prefix = mlflow_run.SQLITE if uri.startswith(mlflow_run.SQLITE) else ""
    return {"mlflow_uri": prefix + absolute("mlflow_uri", uri.removeprefix(prefix))}
