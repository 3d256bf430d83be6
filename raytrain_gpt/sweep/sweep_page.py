"""`report.html` of a sweep: learning curves, the objective by each searched number, and the trials.

It needs only the sweep's history and file, no user code. Trials are compared at equal token counts.
Losses above the first ones are omitted from the charts, so that one trial does not flatten the others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from raytrain_gpt.errors import CheckpointError
from raytrain_gpt.parsing import parse_yaml
from raytrain_gpt.runs import pages
from raytrain_gpt.runs.pages import Chart, Curve, curve_style
from raytrain_gpt.runs.report import REPORT_FILE
from raytrain_gpt.storage.location import Location
from raytrain_gpt.sweep.history import HISTORY_FILE, History, Trial, best_trial, ranking, value_text
from raytrain_gpt.sweep.results import error_text, summary, trial_table
from raytrain_gpt.sweep.space import is_number
from raytrain_gpt.sweep.spec import SWEEP_FILE

_MAX_NAMED_CURVES = 10
_BATCH = "global_batch_tokens"


def write_sweep_page(path: Location) -> Location | None:
    """Write the page of a sweep; None if there is no sweep. Raises CheckpointError before its first trial."""
    if not all((path / file).is_file() for file in (SWEEP_FILE, HISTORY_FILE)):
        return None
    sweep = parse_yaml((path / SWEEP_FILE).read_text())
    history = History(path, sweep["objective_mode"] == "max")
    if not history.events:
        raise CheckpointError(f"{path} has no trial yet; wait for the first one")
    (path / REPORT_FILE).write_text(sweep_page(history, sweep))
    return path / REPORT_FILE


def sweep_page(history: History, sweep: Mapping[str, Any]) -> str:
    """Format the page; `sweep` is the content of the sweep's file."""
    blocks = _blocks(history.trials(), sweep)
    return pages.page("sweep", sweep["sweep_name"], blocks, [history.directory])


def _blocks(trials: list[Trial], sweep: Mapping[str, Any]) -> Iterator[str]:
    ranked = ranking(trials)
    yield summary(trials, sweep["objective"], sweep["budget_tokens"])
    yield "Trials are compared at equal token counts."
    yield pages.heading("Curves")
    yield "The thick curve is the best trial. Values above the scale are omitted; pale curves are not named."
    yield pages.figures(sweep_charts(ranked, sweep))
    yield pages.heading("Trials")
    yield "Click a heading to sort."
    names, rows = trial_table(ranked, sweep["objective"])
    errors = [(trial.error, error_text(trial)) for trial in ranked]
    cells = ([*row, error] for row, error in zip(rows, errors, strict=True))
    yield pages.table([*names, "error"], ([pages.sorted_by(*one) for one in row] for row in cells))


def sweep_charts(ranked: Sequence[Trial], sweep: Mapping[str, Any]) -> list[Chart]:
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
        Chart("Learning curves", sweep["objective"], curves, x="tokens"),
        *_by_field(drawn, sweep, limit),
    ]


def _by_field(drawn: Sequence[Trial], sweep: Mapping[str, Any], limit: float) -> Iterator[Chart]:
    """Chart the objectives of unstopped trials over each number that was searched.

    Each batch size that was searched has a curve of its own.
    """
    full = [trial for trial in drawn if trial.tokens_seen == sweep["budget_tokens"]]
    shown = [trial for trial in full if trial.score is not None and trial.score <= limit]
    searched = [name for name, domain in sweep["space"].items() if "expression" not in domain]
    for name in searched:
        if not all(is_number(trial.values[name]) for trial in shown):
            continue
        line_field = _BATCH if _BATCH in searched and name != _BATCH else ""
        lines: dict[Any, list[tuple[float, float | None]]] = {}
        for trial in shown:
            point = trial.values[name], trial.score
            lines.setdefault(trial.values.get(line_field), []).append(point)
        places = {x for points in lines.values() for x, _ in points}
        if len(places) < 2:
            continue
        # If a third field varies, neighbors on the axis are not neighbors in the space.
        width = 1.6 if {*searched} == {name, line_field} else 0
        curves = []
        for i, batch in enumerate(sorted(lines) if line_field else lines):
            xs, scores = np.array(sorted(lines[batch]), np.float64).T
            label = f"{line_field} {value_text(batch)}" if line_field else ""
            color, dash, marker = curve_style(i)
            curves.append(Curve(label, xs, scores, color, dash, marker, width))
        is_log = min(places) > 0 and max(places) > 8 * min(places)
        title = f"Final {sweep['objective']} by {name}"
        yield Chart(title, sweep["objective"], curves, x=name, log=is_log)


def _limit(trials: Sequence[Trial]) -> float:
    """Return the upper end of the y axis: about the first losses, or infinity if higher values are better."""
    if trials[0].maximize:
        return math.inf
    finite = ([v for _, v in t.curve if v is not None and math.isfinite(v)] for t in trials)
    first = statistics.median_low([values[0] for values in finite if values])
    return first + 0.05 * abs(first)
