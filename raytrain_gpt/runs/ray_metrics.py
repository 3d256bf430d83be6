"""The tracker of Ray's metrics: gauges on the Prometheus endpoint of the driver's node.

Ray exports a gauge only in the interval in which it was set, and its endpoint drops it two intervals later.
So a thread sets all gauges again and again, and after the run, or a kill, they are gone.
"""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
from pathlib import Path

from ray.util.metrics import Gauge

from raytrain_gpt.columns import Row
from raytrain_gpt.config.kinds import Settings
from raytrain_gpt.runs.goodput import goodput
from raytrain_gpt.trackers.configured import ray_exports_metrics
from raytrain_gpt.trackers.run_files import read_rows
from raytrain_gpt.trackers.tracked_run import End, TrackedRun, plottable_values

_PREFIX = "raytrain_gpt_"
"""Of every name; Ray puts another `ray_` before it."""
_SET_EVERY_S = 1.0
"""Ray's shortest interval; the default is 10 s."""


class RayMetrics:
    """Newest values of a run's rows, with its name as the label `run`."""

    store, is_new = "", True  # a process needs all rows again, as Ray forgets

    def __init__(self, run: TrackedRun, _: Settings) -> None:
        self._run, self._tags = run, {"run": "/".join(filter(None, (run.group, run.name)))}
        self._values: dict[str, float] = {}
        self._gauges: dict[str, Gauge] = {}
        self._goodput_due = 0.0
        self._ended = threading.Event()
        if ray_exports_metrics():
            threading.Thread(target=self._keep_set, name="ray_metrics", daemon=True).start()
        else:
            run.log("ray_metrics is off: only a Ray cluster that the command joins exports metrics")

    def rows(self, rows: list[Row]) -> None:
        values = dict(self._values)
        for row in rows:
            numbers = plottable_values(row).items()
            # Parts of a mixture, such as val/loss/NAME, and events are in other trackers.
            values |= {k: v for k, v in numbers if k.count("/") == 1 and k[:7] != "events/"}
            values |= {k: math.nan for k, v in row.items() if v is None and k in values}
            if "event" not in row:  # which may be of an earlier step, such as a checkpoint's
                values["step"] = row["step"]
        self._values = values
        if time.monotonic() >= self._goodput_due:
            self._add_goodput()

    def _add_goodput(self) -> None:
        """Read the whole run, which takes seconds after 100,000 steps, in at most 1% of the time."""
        started = time.monotonic()
        with contextlib.suppress(OSError):
            spent = goodput(read_rows(self._run.directory))
            shares = {"restarts": spent.restarts, "goodput": spent.effective_fraction or 0.0}
            self._values = self._values | shares  # the other thread may be reading the old ones
        now = time.monotonic()
        self._goodput_due = now + max(100 * (now - started), 10.0)

    def _keep_set(self) -> None:
        while not self._ended.wait(_SET_EVERY_S):
            self._set()

    def _set(self) -> None:
        for key, value in self._values.items():
            if key not in self._gauges:
                name = _PREFIX + re.sub(r"\W", "_", key, flags=re.ASCII)
                self._gauges[key] = Gauge(name, f"{key} of a run", tag_keys=("run",))
            self._gauges[key].set(value, self._tags)

    def finish(self, end: End, files: list[Path]) -> None:
        self._ended.set()
        self._add_goodput()
        self._set()
