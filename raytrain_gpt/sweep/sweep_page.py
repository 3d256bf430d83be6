"""`report.html` of a sweep: curves, objective by learning rate, trials, decisions, and what stopping saved.

It needs only the sweep's history and file, and no code of its user.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, ValidationError

from raytrain_gpt.config.kinds import Strict
from raytrain_gpt.errors import CheckpointError, ConfigError, reason
from raytrain_gpt.format import Log, amount, cut
from raytrain_gpt.parsing import parse_yaml
from raytrain_gpt.storage.location import COMMAND_RETRY_S, Location, is_url
from raytrain_gpt.sweep.halving import Halving
from raytrain_gpt.sweep.history import (
    HISTORY_FILE,
    Event,
    History,
    Trial,
    best_trial,
    ranking,
    value_text,
)
from raytrain_gpt.sweep.results import counts_text, field_names
from raytrain_gpt.sweep.spec import SWEEP_FILE, Asha, NoScheduler
from raytrain_gpt.sweep.sweep_charts import sweep_charts
from raytrain_gpt.tracking.page import page
from raytrain_gpt.tracking.report import REPORT_FILE

_TEMPLATE = "sweep/sweep_template.html"


class SweepFacts(Strict):
    """What the page needs of a sweep's file.

    Attributes:
        searched: Fields that are not computed from others.
    """

    name: str
    objective: str
    budget_tokens: Annotated[int, Field(ge=1)]
    maximize: bool
    searched: list[str]
    scheduler: NoScheduler | Asha

    @classmethod
    def read(cls, directory: Location) -> SweepFacts:
        """Read the sweep's file without its user's code; raises a ConfigError if it is damaged."""
        try:
            raw = parse_yaml((directory / SWEEP_FILE).read_text())
            if (kind := raw["scheduler"]["kind"]) not in ("none", "asha"):
                raise ConfigError(f"{directory}: scheduler {kind} is no longer supported")
            searched = [name for name, domain in raw["space"].items() if "expression" not in domain]
            facts = {name: raw[name] for name in ("objective", "budget_tokens", "scheduler")}
            more = {"maximize": raw["objective_mode"] == "max", "searched": searched}
            return cls.model_validate({"name": raw["sweep_name"], **facts, **more})
        except (ValueError, LookupError, TypeError, AttributeError, ValidationError) as error:
            raise ConfigError(f"{directory / SWEEP_FILE} is damaged: {reason(error)}") from None


def report_sweep(name: str, storage_path: str, as_json: bool, say: Log) -> bool:
    """Write the page of a sweep, given by its name or path; return False if there is none."""
    storage = Location.of(storage_path, retry_for_s=COMMAND_RETRY_S)
    for path in (Location.of(name),) if is_url(name) else (storage / name, Location.of(name)):
        if (path / SWEEP_FILE).is_file() and (path / HISTORY_FILE).is_file():
            facts = SweepFacts.read(path)
            history = History(path, facts.maximize)
            if not history.events:
                raise CheckpointError(f"{path} has no trial yet; wait for the first one")
            (path / REPORT_FILE).write_text(sweep_page(history, facts))
            say(f"report {path / REPORT_FILE}")
            say("next: open it in a browser")
            if as_json:
                say(json.dumps({"report": str(path / REPORT_FILE)}))
            return True
    return False


def sweep_page(history: History, facts: SweepFacts) -> str:
    trials, budget_tokens = history.trials(), facts.budget_tokens
    ranked = ranking(trials)
    stopped = [(t, budget_tokens - t.tokens_seen) for t in trials if t.state == "stopped"]
    return page(
        _TEMPLATE,
        facts=facts,
        trials=ranked,
        best=best_trial(trials),
        states=counts_text(trials),
        charts=sweep_charts(ranked, facts.searched, facts.objective, budget_tokens),
        trained_tokens=sum(t.tokens_seen for t in trials),
        saved_tokens=sum(tokens for _, tokens in stopped),
        saved_s=math.fsum(tokens / t.tokens_per_s for t, tokens in stopped if t.tokens_per_s),
        fields=field_names(ranked),
        rows=_rows(ranked, facts),
        lanes=_lanes(history),
        elapsed_s=history.events[-1]["time"] - history.events[0]["time"],
        decisions=list(_decisions(history, facts)),
        directory=history.directory,
        value_text=value_text,
    )


def _rows(ranked: list[Trial], facts: SweepFacts) -> list[list[tuple[str, Any]]]:
    """Return a row of cells per trial: text, and the value to sort by."""
    rows, fields = [], field_names(ranked)
    for rank, trial in enumerate(ranked, 1):
        share = trial.judged_tokens / facts.budget_tokens
        score, speed, spent_s = trial.score, trial.tokens_per_s, trial.elapsed_s
        row: list[tuple[str, Any]] = [
            (str(rank), rank) if score is not None else ("–", math.inf),
            (trial.name, trial.name),
            (trial.state, trial.state),
            ("not finite" if trial.diverged else "–" if score is None else f"{score:.4f}", score),
            (f"{amount(trial.tokens_seen)}, {share:.0%}", trial.tokens_seen),
            ("–" if speed is None else f"{speed:,.0f}", speed),
            ("–" if spent_s is None else f"{spent_s:,.1f} s", spent_s),
        ]
        values = [trial.values.get(name) for name in fields]
        rows.append([*row, *((value_text(value), value) for value in values)])
    return rows


def _lanes(history: History) -> list[tuple[Trial, list[tuple[float, float]], list[float]]]:
    """Return per trial the start and width of its times in a process, and its reports, in percent."""
    first, last = history.events[0]["time"], history.events[-1]["time"]
    scale = 100 / ((last - first) or 1)
    spans: dict[str, list[tuple[float, float]]] = {}
    reports: dict[str, list[float]] = {}
    for event in history.events:
        name, at = event["trial"], scale * (event["time"] - first)
        if event["event"] == "started":
            spans.setdefault(name, []).append((at, at))
        elif name in spans:
            spans[name][-1] = spans[name][-1][0], at
        if event["event"] == "report":
            reports.setdefault(name, []).append(at)
    return [
        (t, [(a, b - a) for a, b in spans.get(t.name, [])], reports.get(t.name, []))
        for t in history.trials()
    ]


def _decisions(history: History, facts: SweepFacts) -> Iterator[tuple[float, str, str]]:
    """Yield the time since the start, in seconds, the trial, and what happened to it."""
    first = history.events[0]["time"]
    halving = None
    if isinstance(facts.scheduler, Asha):
        names = [trial.name for trial in history.trials()]
        halving = Halving(facts.scheduler, facts.budget_tokens, names, facts.maximize)
        halving.replay(history.events)
    latest: dict[str, Event] = {}
    begun: set[str] = set()
    for event in history.events:
        name, kind, text = event["trial"], event["event"], ""
        if kind == "started":
            text = "starts again in another process" if name in begun else ""
            begun.add(name)
        elif kind == "report":
            latest[name] = event
        else:
            text = _end_text(event, latest.get(name), facts.objective, halving)
        if text:
            yield event["time"] - first, name, text


def _end_text(event: Event, report: Event | None, objective: str, halving: Halving | None) -> str:
    if event.get("error"):
        return f"{event['state']}: {cut(' '.join(event['error'].split()), 300)}"
    if report is None or report["objective"] is None:
        return str(event["state"])
    tokens, score = report["tokens_seen"], f"{objective} {report['objective']:.4f}"
    if event["state"] != "stopped":
        return f"{event['state']} at {amount(tokens)} tokens with {score}"
    text = f"stopped at {amount(tokens)} tokens with {score}"
    needed = None if halving is None else halving.needed(event["trial"], tokens)
    return f"{text}; {needed}" if needed else text
