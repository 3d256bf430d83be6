"""The history of a sweep, one event per line: the input of `--resume`.

Ray Tune saves its state, but not its scheduler's. So the reports are stored in order, and replayed to a new
scheduler (`schedulers`).
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

from raytrain_gpt.errors import ConfigError, reason
from raytrain_gpt.parsing import parse_json
from raytrain_gpt.storage.location import Location
from raytrain_gpt.sweep.trials import Trial

HISTORY_FILE = "sweep.jsonl"
ENDED = ("finished", "stopped", "diverged")
REPORTED = ("values", "objective", "tokens_seen", "tokens_per_s", "elapsed_s", "run_dir")
"""Fields of a trial in a `report`."""

Event = dict[str, Any]


class History:
    """Events of a sweep, stored in a file in its directory.

    `started` has a trial's values; `report` an evaluation and its run; `ended` the last state and any error.

    Args:
        maximize: Whether a higher objective is better.
    """

    def __init__(self, directory: Location, maximize: bool = False) -> None:
        self._maximize = maximize
        self._file = directory / HISTORY_FILE
        content = self._file.read_bytes() if self._file.is_file() else b""
        lines = enumerate(content.splitlines(), 1)
        self.events = [self._event(number, line) for number, line in lines]

    def _event(self, number: int, line: bytes) -> Event:
        try:
            event: Event = parse_json(line)
            _after(Trial(event["trial"]), event)
            return event
        except (ValueError, TypeError, LookupError) as error:
            raise ConfigError(
                f"line {number} of {self._file} is damaged: {type(error).__name__}, {reason(error)}; "
                "restore it, or remove the line and lose its report"
            ) from None

    def add(self, event: str, trial: str, **details: Any) -> None:
        self.events.append({"event": event, "trial": trial, "time": time.time(), **details})
        self._file.write_text("".join(json.dumps(one) + "\n" for one in self.events))

    def trials(self) -> list[Trial]:
        """Return all started trials by name; `running` unless ended."""
        trials: dict[str, Trial] = {}
        for event in self.events:
            name = event["trial"]
            trials[name] = _after(trials.get(name) or Trial(name, maximize=self._maximize), event)
        return sorted(trials.values(), key=lambda trial: trial.name)

    def last_report(self, trial: str) -> Event | None:
        reports = [e for e in self.events if (e["event"], e["trial"]) == ("report", trial)]
        return reports[-1] if reports else None


def _after(trial: Trial, event: Event) -> Trial:
    if event["event"] == "started":
        return replace(trial, state="running", values=event["values"], error=None)
    if event["event"] == "ended":
        return replace(trial, state=event["state"], error=event.get("error"))
    point = event["tokens_seen"], event["objective"]
    curve = (*(before for before in trial.curve if before[0] < point[0]), point)
    return replace(trial, curve=curve, **{name: event[name] for name in REPORTED})
