"""Text output of a sweep: tables, `results.csv` and `best.yaml`.

Tables are plain text for terminals, job logs and files. Everywhere, `objective` is the name of the metric and
`budget_tokens` the tokens of a trial that is not stopped.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, get_args

from raytrain_gpt.config.schema import Config
from raytrain_gpt.format import amount, count, cut, short_duration, table
from raytrain_gpt.sweep.history import State, Trial, best_trial, ranking, value_text
from raytrain_gpt.sweep.spec import Sweep

RESULTS_FILE, BEST_FILE = "results.csv", "best.yaml"

_MAX_ERROR_CHARS = 160
_STATES: tuple[State, ...] = get_args(State)  # in the order of a trial's life


def final_table(trials: Sequence[Trial], objective: str, budget_tokens: int) -> str:
    """Format the result of a sweep: trials by rank, errors of failed ones, and tokens used."""
    ranked = ranking(trials)
    names, rows = trial_table(ranked, objective)
    lines = table(names[:3], names[3:], [[text for _, text in row] for row in rows])
    for trial in ranked:
        if trial.state in ("diverged", "failed"):
            lines.append(f"{trial.name} {trial.state}: {error_text(trial)}")
    return "\n".join([*lines, summary(trials, objective, budget_tokens)])


def summary(trials: Sequence[Trial], objective: str, budget_tokens: int) -> str:
    """Format states, tokens and the best trial as one line."""
    trained, full = sum(t.tokens_seen for t in trials), len(trials) * budget_tokens
    saved = sum(max(budget_tokens - t.tokens_seen, 0) for t in trials if t.state == "stopped")
    line = (
        f"{count(len(trials), 'trial')}: {counts_text(trials)} | {amount(trained)} of {amount(full)} tokens "
        f"trained, stopping early saved {saved / max(full, 1):.0%}"
    )
    if (best := best_trial(trials)) is None:
        return line
    at = f"{_objective_text(best)} at {amount(best.tokens_seen)} tokens"
    return f"{line} | best {best.name}: {objective} {at}"


def failure_text(trials: Sequence[Trial], title: str) -> str | None:
    """Return the error message of a sweep with failed trials, which `--resume` retries."""
    if not (failed := [trial for trial in trials if trial.state == "failed"]):
        return None
    names = ", ".join(trial.name for trial in failed)
    return (
        f"{len(failed)} of {len(trials)} trials of {title} failed ({cut(names, 80)}); "
        f"{failed[0].name}: {error_text(failed[0])}; fix the cause, then run the same command with --resume"
    )


def results_csv(trials: Sequence[Trial], objective: str) -> str:
    """Format `results.csv`: full precision, by rank; unknown values and ranks without a score are empty."""
    fields = _field_names(trials)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    measured = ("tokens_seen", "tokens_per_s", "elapsed_s")
    writer.writerow(["trial", "state", "rank", objective, *measured, *fields, "run_dir", "error"])
    for rank, trial in enumerate(ranking(trials), 1):
        ranked = [trial.name, trial.state, "" if trial.score is None else rank, trial.objective]
        numbers = [getattr(trial, name) for name in measured]
        values = [trial.values.get(name, "") for name in fields]
        plain = [value if isinstance(value, str) else json.dumps(value) for value in values]
        writer.writerow([*ranked, *numbers, *plain, trial.run_dir, trial.error])
    return text.getvalue()


def best_yaml(config: Config, trial: Trial, sweep: Sweep) -> str:
    """Format `best.yaml`: the best trial's configuration for `train --config`, as `<sweep>-best`."""
    values = ", ".join(f"{name}={json.dumps(value)}" for name, value in trial.values.items())
    header = [
        f"Best trial of {sweep.title}: {trial.name}, {trial.state}, {sweep.objective} "
        f"{_objective_text(trial)} at {trial.tokens_seen:,} tokens.",
        f"Set by the sweep: {values or 'nothing'}",
        "All other values are this trial's, except for run_name.",
        "Train it again: raytrain-gpt train --config best.yaml",
    ]
    named = config.updated({"run_name": f"{sweep.sweep_name}-best"})
    return "".join(f"# {line}\n" for line in header) + named.to_yaml()


def trial_table(
    ranked: Sequence[Trial], objective: str
) -> tuple[list[str], list[list[tuple[Any, str]]]]:
    """Return the columns' names, and value and text of every cell."""
    fields = _field_names(ranked)
    rows: list[list[tuple[Any, str]]] = [
        [
            (None, "-") if trial.score is None else (rank, str(rank)),
            (trial.name, trial.name),
            (trial.state, trial.state),
            (trial.score, _objective_text(trial)),
            (trial.tokens_seen, amount(trial.tokens_seen)),
            (speed := trial.tokens_per_s, "-" if speed is None else f"{speed:,.0f}"),
            (spent_s := trial.elapsed_s, "-" if spent_s is None else short_duration(spent_s)),
            *((trial.values.get(name), value_text(trial.values.get(name))) for name in fields),
        ]
        for rank, trial in enumerate(ranked, 1)
    ]
    return ["rank", "trial", "state", objective, "tokens", "tokens/s", "time", *fields], rows


def counts_text(trials: Iterable[Trial]) -> str:
    """Format as `2 running, 3 stopped`."""
    counts = Counter(trial.state for trial in trials)
    return ", ".join(f"{counts[state]} {state}" for state in _STATES if counts[state])


def _field_names(trials: Iterable[Trial]) -> list[str]:
    return list(dict.fromkeys(name for trial in trials for name in trial.values))


def _objective_text(trial: Trial) -> str:
    if trial.diverged:
        return "not finite"
    return "-" if trial.objective is None else f"{trial.objective:.4f}"


def error_text(trial: Trial) -> str:
    return cut(" ".join((trial.error or "").split()), _MAX_ERROR_CHARS)
