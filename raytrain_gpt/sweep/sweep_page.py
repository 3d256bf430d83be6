"""`report.html` of a sweep: learning curves, the objective by learning rate, and the trials.

It needs only the sweep's history and file, and no code of its user. Trials are compared at equal tokens.
Losses above the first ones are left out of the charts, so that one trial does not flatten the others.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field, ValidationError

from raytrain_gpt.config.kinds import Strict
from raytrain_gpt.errors import CheckpointError, ConfigError, reason
from raytrain_gpt.format import Log, amount, cut, short_duration
from raytrain_gpt.parsing import parse_yaml
from raytrain_gpt.storage.location import COMMAND_RETRY_S, Location, is_url
from raytrain_gpt.sweep.history import (
    HISTORY_FILE,
    History,
    Trial,
    best_trial,
    ranking,
    value_text,
)
from raytrain_gpt.sweep.results import counts_text, field_names
from raytrain_gpt.sweep.space import is_number
from raytrain_gpt.sweep.spec import SWEEP_FILE
from raytrain_gpt.tracking import pages
from raytrain_gpt.tracking.pages import Chart, Curve, curve_style
from raytrain_gpt.tracking.report import REPORT_FILE

_MAX_NAMED_CURVES = 10


class SweepFacts(Strict):
    """What the page needs of a sweep's file.

    Attributes:
        budget_tokens: Tokens of a trial that is not stopped.
        searched: Fields that are not computed from others.
    """

    name: str
    objective: str
    budget_tokens: Annotated[int, Field(ge=1)]
    maximize: bool
    searched: list[str]

    @classmethod
    def read(cls, directory: Location) -> SweepFacts:
        """Read the sweep's file without its user's code; raises a ConfigError if it is damaged."""
        try:
            raw = parse_yaml((directory / SWEEP_FILE).read_text())
            return cls(
                name=raw["sweep_name"],
                objective=raw["objective"],
                budget_tokens=raw["budget_tokens"],
                maximize=raw["objective_mode"] == "max",
                searched=[n for n, domain in raw["space"].items() if "expression" not in domain],
            )
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
    return pages.page("sweep", facts.name, _blocks(history.trials(), facts), [history.directory])


def _blocks(trials: list[Trial], facts: SweepFacts) -> Iterator[str]:
    ranked = ranking(trials)
    yield f"{counts_text(trials)}. Trials are compared at equal tokens."
    yield pages.tiles(_numbers(trials, facts))
    yield pages.heading("Curves")
    yield "The thick curve is the best trial's. Values above the scale are left out; pale ones have no name."
    yield pages.figures(sweep_charts(ranked, facts))
    yield pages.heading("Trials")
    yield "Click a heading to sort."
    fields = field_names(ranked)
    names = ("Rank", "Trial", "State", facts.objective, "Tokens", "Tokens/s", "Time")
    yield pages.table(
        [*names, *fields, "Error"], (_row(t, i, fields) for i, t in enumerate(ranked, 1))
    )


def _numbers(trials: list[Trial], facts: SweepFacts) -> Iterator[tuple[str, str, str]]:
    if best := best_trial(trials):
        yield f"Best {facts.objective}", f"{best.score:.4f}", f"trial {best.name}, {best.state}"
        for name, value in best.values.items():
            yield name, value_text(value), "of the best trial"
    budget, full = facts.budget_tokens, len(trials) * facts.budget_tokens
    yield "Trials", str(len(trials)), f"{amount(budget)} tokens each, unless stopped"
    yield "Tokens trained", amount(sum(t.tokens_seen for t in trials)), f"of {amount(full)}"
    saved = sum(budget - t.tokens_seen for t in trials if t.state == "stopped")
    yield "Saved by stopping early", f"{saved / full:.0%}", f"{amount(saved)} tokens"


def _row(trial: Trial, rank: int, fields: Sequence[str]) -> list[str]:
    score, speed, spent_s = trial.score, trial.tokens_per_s, trial.elapsed_s
    values = [trial.values.get(name) for name in fields]
    cells: list[tuple[Any, str]] = [
        (None, "–") if score is None else (rank, str(rank)),
        (trial.name, trial.name),
        (trial.state, trial.state),
        (score, "not finite" if trial.diverged else "–" if score is None else f"{score:.4f}"),
        (trial.tokens_seen, amount(trial.tokens_seen)),
        (speed, "–" if speed is None else f"{speed:,.0f}"),
        (spent_s, "–" if spent_s is None else short_duration(spent_s)),
        *((value, value_text(value)) for value in values),
        (trial.error, cut(" ".join((trial.error or "").split()), 300)),
    ]
    return [pages.sorted_by(value, text) for value, text in cells]


def sweep_charts(ranked: Sequence[Trial], facts: SweepFacts) -> list[Chart]:
    """Return the charts of trials in the order of `ranking`; none before the first evaluation."""
    drawn = [trial for trial in ranked if trial.curve]
    if all(trial.score is None for trial in drawn):
        return []
    limit = _limit(drawn)
    curves = []
    for rank, trial in enumerate(drawn):
        tokens, values = np.array(trial.curve, np.float64).T
        color, dash, _ = curve_style(rank)
        label = trial.name
        if rank >= _MAX_NAMED_CURVES:
            label, color, dash = "", pages.FAINT, ""
        width = 3 if trial is best_trial(ranked) else 1.4
        shown = np.where(values <= limit, values, np.nan)
        curves.append(Curve(label, tokens, shown, color, dash, width=width))
    return [
        Chart("Learning curves", facts.objective, curves, x="tokens"),
        *_by_field(drawn, facts, limit),
    ]


def _by_field(drawn: Sequence[Trial], facts: SweepFacts, limit: float) -> list[Chart]:
    """Chart the objectives of unstopped trials over one field, with a curve for each value of another.

    Over the learning rate for each batch size if they were searched, else over the first number for a field
    with few values.
    """

    def is_discrete(name: str) -> bool:
        return 2 * len({trial.values[name] for trial in drawn}) <= len(drawn)

    numbers = [n for n in facts.searched if all(is_number(trial.values[n]) for trial in drawn)]
    x_field = next((n for n in ("peak_lr", *numbers) if n in numbers), "")
    others = [n for n in facts.searched if n != x_field and is_discrete(n)]
    line_field = next((n for n in ("global_batch_tokens", *others) if n in others), "")
    lines: dict[Any, dict[float, float]] = {}
    for trial in reversed(drawn):  # so that the best one of equal fields stays
        is_full = trial.tokens_seen == facts.budget_tokens
        if x_field and is_full and trial.score is not None and trial.score <= limit:
            lines.setdefault(trial.values.get(line_field), {})[trial.values[x_field]] = trial.score
    # If a further field varies freely, neighbors on the axis are not neighbors in the space.
    is_line = {*facts.searched} <= {x_field, line_field} or (bool(x_field) and is_discrete(x_field))
    curves = []
    for i, value in enumerate(sorted(lines, key=lambda value: (str(type(value)), value))):
        xs, scores = np.array(sorted(lines[value].items()), np.float64).T
        label = f"{line_field} {value_text(value)}" if line_field else facts.objective
        curves.append(Curve(label, xs, scores, *curve_style(i), 1.6 if is_line else 0))
    places = {x for line in lines.values() for x in line}
    is_log = (
        len(places) > 1
        and min(places) > 0
        and (x_field == "peak_lr" or max(places) > 8 * min(places))
    )
    title = f"Final {facts.objective} by {x_field}"
    return [Chart(title, facts.objective, curves, x=x_field, log=is_log)] if len(places) > 1 else []


def _limit(trials: Sequence[Trial]) -> float:
    """Return the upper end of the y axis: about the first losses, or infinity if higher values are better."""
    if trials[0].maximize:
        return math.inf
    finite = ([v for _, v in t.curve if v is not None and math.isfinite(v)] for t in trials)
    first = statistics.median_low([values[0] for values in finite if values])
    return first + 0.05 * abs(first)
