"""What a tracker is given: the run, the numbers of a row, and which rows its store lacks."""

from __future__ import annotations

import functools
import math
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from raytrain_gpt.columns import Row
from raytrain_gpt.config.schema import Config
from raytrain_gpt.format import Log
from raytrain_gpt.redact import say
from raytrain_gpt.trackers.run_files import CONFIG_FILE, PROFILE_DIR, RUN_ID_FILE, SAMPLES_FILE

End = Literal["finished", "failed", "interrupted"]


@dataclass
class TrackedRun:
    """One attempt of a run."""

    directory: Path  # of the run's files; for a run in an object store, a local copy
    config: Config
    step: int  # to resume at, 0 for a new run
    tags: dict[str, str]  # for trackers; `sweep` is the sweep of a trial
    newest_checkpoint: str | None = None  # path or URL, set before a tracker finishes
    log: Log = say  # prints a line on the console

    @property
    def name(self) -> str:
        return self.config.run.run_name

    @property
    def configuration(self) -> dict[str, Any]:
        """Field -> value."""
        return self.config.field_values()

    @property
    def first_step(self) -> int:
        """First step that this attempt trains, from 1."""
        return self.step + 1

    @property
    def resumed(self) -> bool:
        return self.step > 0

    @property
    def group(self) -> str | None:
        """Name of the sweep of a trial."""
        return self.tags.get("sweep")

    @functools.cached_property
    def id(self) -> str:
        """Random hex digits, the same in all attempts until the run starts over at step 0."""
        file = self.directory / RUN_ID_FILE
        known = file.read_text("utf-8", "replace") if self.resumed and file.exists() else ""
        if not re.fullmatch("[0-9a-f]{16}", known):
            known = secrets.token_hex(8)
            file.write_text(known)
        return known

    def files(self) -> list[Path]:
        """List the existing files to show with the run."""
        names = (CONFIG_FILE, "report.html", SAMPLES_FILE, f"{PROFILE_DIR}/*")
        return [path for name in names for path in sorted(self.directory.glob(name))]


def plottable_values(row: Row) -> dict[str, float]:
    """Return the numbers of a row to plot: `a/b` keys with finite values; an event is 1."""
    numbers = {k: v for k, v in row.items() if "/" in k and isinstance(v, int | float)}
    events = {f"events/{row['event']}": 1.0} if "event" in row else {}
    return {key: float(v) for key, v in numbers.items() if math.isfinite(v)} | events


class DeliveryState(BaseModel):
    """Rows that a tracker has; a new attempt sends those that an outage or a kill kept from it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    step: int = 0  # last training step; later ones are new
    evaluated: frozenset[int] = frozenset()  # steps of evaluations
    event_s: float = 0.0  # time of the last event (Unix seconds)

    def until(self, step: int) -> DeliveryState:
        """Return the state in which later steps are new."""
        evaluated = frozenset(at for at in self.evaluated if at <= step)
        return DeliveryState(step=min(self.step, step), evaluated=evaluated, event_s=self.event_s)

    def take(self, rows: Iterable[Row], resumed_at: int) -> tuple[list[Row], DeliveryState]:
        """Return the rows of an attempt that are new, and the state once the tracker has them.

        Above `resumed_at`, where the attempt resumed, steps after a rollback are new again.
        """
        new: list[Row] = []
        step, evaluated, event_s = self.step, set(self.evaluated), self.event_s
        seen = set[tuple[str, float]]()  # the run's file and the queue may have the same events
        for row in rows:
            at = row["step"]
            if "event" in row:
                event = row["event"], (time_s := row.get("time", 0.0))
                if time_s <= self.event_s or event in seen:
                    continue
                seen.add(event)
                event_s = max(event_s, time_s)
                if row["event"] == "rollback" and at > resumed_at:
                    step = min(step, row["to_step"])
                    evaluated = {one for one in evaluated if one <= step}
            elif "train/loss" in row:
                if at <= step:
                    continue
                step = at
            elif at in evaluated:
                continue
            else:
                evaluated.add(at)
            new.append(row)
        return new, DeliveryState(step=step, evaluated=frozenset(evaluated), event_s=event_s)
