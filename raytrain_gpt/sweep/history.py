"""The history of a sweep, one event per line: the input of `--resume`; and the trials that follow from it.

Trials are compared at equal token counts: one that was stopped early never ranks above one that used its
full budget. A failed trial and one with a non-finite objective cannot be the best.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from raytrain_gpt.parsing import parse_json
from raytrain_gpt.storage.location import Location

OBJECTIVE = "objective"
TOKENS_SEEN = "tokens_seen"
HISTORY_FILE = "sweep.jsonl"
ENDED = ("finished", "stopped", "diverged")
REPORTED = ("values", "objective", "tokens_seen", "tokens_per_s", "elapsed_s", "run_dir")
"""Fields of a trial in a `report`."""

Event = dict[str, Any]
State = Literal["pending", "running", "finished", "stopped", "diverged", "failed"]
"""`stopped`: by the sweep's scheduler, before its full budget; `diverged`: its objective is not
finite, a result; `failed`: any other error, and so no result."""


@dataclass(frozen=True)
class Trial:
    name: str
    state: State = "pending"
    values: dict[str, Any] = field(default_factory=dict)
    """Searched or tied field -> value, in the sweep file's order."""
    objective: float | None = None
    tokens_seen: int = 0
    tokens_per_s: float | None = None
    elapsed_s: float | None = None
    run_dir: str = ""
    """Directory or URL of the run."""
    error: str | None = None
    curve: tuple[tuple[int, float | None], ...] = ()
    """(tokens_seen, objective) of every evaluation, None or NaN if not finite."""
    maximize: bool = False
    """Whether a higher objective is better."""

    @property
    def score(self) -> float | None:
        """The objective, or None if the trial failed or it is not finite."""
        return None if self.state == "failed" or self.diverged else self.objective

    @property
    def diverged(self) -> bool:
        if self.objective is None:
            return self.state == "diverged" or bool(self.curve)
        return self.state == "diverged" or not math.isfinite(self.objective)


class History:
    """Events of a sweep or study, stored in a file, and the trials that follow from them.

    `started` has a trial's values; `report` an evaluation and its run; `ended` the last state and any error.

    Attributes:
        open: Trials that this session has to end; rules wait for them.
    """

    def __init__(
        self, directory: Location, maximize: bool = False, file: str = HISTORY_FILE
    ) -> None:
        self.directory, self.maximize = directory, maximize
        self.open: set[str] = set()
        self._file = directory / file
        content = self._file.read_bytes() if self._file.is_file() else b""
        self.events: list[Event] = [parse_json(line) for line in content.splitlines()]
        self._trials: dict[str, Trial] = {}
        for event in self.events:
            self._follow(event)

    def add(self, event: str, trial: str, **details: Any) -> None:
        self.events.append({"event": event, "trial": trial, "time": time.time(), **details})
        self._follow(self.events[-1])
        self._file.write_text("".join(json.dumps(one) + "\n" for one in self.events))
        if event == "ended":
            self.open.discard(trial)

    def add_report(self, trial: str, report: Event) -> None:
        """Add an evaluation with the fields of REPORTED, unless it is of an earlier session."""
        if report[TOKENS_SEEN] > self.trial(trial).tokens_seen:
            self.add("report", trial, **{key: report[key] for key in ("step", *REPORTED)})

    def trial(self, name: str) -> Trial:
        return self._trials.get(name) or Trial(name, maximize=self.maximize)

    def trials(self) -> list[Trial]:
        """Return all started trials by name; `running` unless ended."""
        return sorted(self._trials.values(), key=lambda trial: trial.name)

    def _follow(self, event: Event) -> None:
        trial = self.trial(event["trial"])
        if event["event"] == "started":
            trial = replace(trial, state="running", values=event["values"], error=None)
        elif event["event"] == "ended":
            trial = replace(trial, state=event["state"], error=event.get("error"))
        else:
            point = event["tokens_seen"], event["objective"]
            curve = (*(before for before in trial.curve if before[0] < point[0]), point)
            trial = replace(trial, curve=curve, **{name: event[name] for name in REPORTED})
        self._trials[trial.name] = trial


def ranking(trials: Iterable[Trial]) -> list[Trial]:
    """Rank all trials: by tokens, then score; those without a score; failed ones. Ties are by name."""

    def key(trial: Trial) -> tuple[bool, bool, int, float, str]:
        score = math.inf if trial.score is None else trial.score * (-1 if trial.maximize else 1)
        return trial.state == "failed", trial.score is None, -trial.tokens_seen, score, trial.name

    return sorted(trials, key=key)


def best_trial(trials: Iterable[Trial]) -> Trial | None:
    """Return the trial with the best objective among those with the most tokens, or None."""
    first = next(iter(ranking(trials)), None)
    return None if first is None or first.score is None else first


def value_text(value: Any) -> str:
    """Format a field's value: `6e-4`, `0.95`, `524,288`, `cosine`, `true`, `null`."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if 0 < abs(value) <= 0.01:
            digits, _, exponent = f"{value:.2e}".partition("e")
            return f"{float(digits):g}e{int(exponent)}"
        return f"{value:.4g}"
    return str(value)
