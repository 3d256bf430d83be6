"""A sweep in text: its tables, `results.csv` and `best.yaml`.

Tables are plain text, so that they read the same in a terminal, a job's log and a file.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, get_args

from rich.console import Console
from rich.table import Table
from rich.text import Text

from raytrain_gpt.config.schema import Config
from raytrain_gpt.format import amount, duration
from raytrain_gpt.sweep.trials import State, Trial, best_trial, ranking, value_text

RESULTS_FILE, BEST_FILE = "results.csv", "best.yaml"

MAX_PROGRESS_ROWS = 20
"""The table comes again and again: more would bury what else is printed."""

_MAX_ERROR_CHARS = 160
_MAX_TABLE_CHARS = 1000
_PROGRESS_ORDER: tuple[State, ...] = ("running", "finished", "stopped", "failed")


def plan_table(planned: Sequence[dict[str, Any]], max_steps: Sequence[int]) -> list[str]:
    """Lines of a table of the trials to come.

    Args:
        planned: Leaf -> value of each.
        max_steps: Steps of each.
    """
    table = Table(box=None, pad_edge=False)
    table.add_column("trial")
    for name in (*planned[0], "steps"):
        table.add_column(Text(name), justify="right", no_wrap=True)
    for number, (values, steps) in enumerate(zip(planned, max_steps, strict=True)):
        table.add_row(
            f"{number:03d}", *(Text(value_text(v)) for v in values.values()), f"{steps:,}"
        )
    return _lines(table)


def progress_table(trials: Sequence[Trial], objective: str, budget_tokens: int) -> str:
    """How a sweep is going: a line of counts, then its trials, those that run first.

    Pending trials are only counted; so are those beyond MAX_PROGRESS_ROWS.

    Args:
        trials: All trials.
        objective: Name of the metric that is minimised.
        budget_tokens: Tokens of a trial that is not stopped.
    """
    started = [t for t in ranking(trials, budget_tokens) if t.state != "pending"]
    started.sort(key=lambda trial: _PROGRESS_ORDER.index(trial.state))
    shown, hidden = started[:MAX_PROGRESS_ROWS], started[MAX_PROGRESS_ROWS:]
    best = best_trial(trials, budget_tokens)
    lines = [f"{len(trials)} trials: {_counts(trials)}" + _best_text(best, objective)]
    lines += _table(shown, objective, budget_tokens) if shown else []
    lines += [f"and {len(hidden)} more: {_counts(hidden)}"] if hidden else []
    return "\n".join(lines)


def final_table(trials: Sequence[Trial], objective: str, budget_tokens: int) -> str:
    """What a sweep found: its trials by rank, the errors of failed ones, and what it cost.

    Args:
        trials: All trials.
        objective: Name of the metric that is minimised.
        budget_tokens: Tokens of a trial that is not stopped.
    """
    ranked = ranking(trials, budget_tokens)
    lines = _table(ranked, objective, budget_tokens, ranks=True)
    lines += [f"{t.name} failed: {_one_line(t.error)}" for t in ranked if t.state == "failed"]
    trained, full = sum(t.tokens_seen for t in trials), len(trials) * budget_tokens
    saved = sum(max(budget_tokens - t.tokens_seen, 0) for t in trials if t.state == "stopped")
    lines.append(
        f"{len(trials)} trials: {_counts(trials)} | {amount(trained)} of {amount(full)} tokens trained, "
        f"stopping early saved {saved / max(full, 1):.0%}"
        + _best_text(best_trial(trials, budget_tokens), objective)
    )
    return "\n".join(lines)


def results_csv(trials: Sequence[Trial], objective: str, budget_tokens: int) -> str:
    """`results.csv`: a line for each trial, by rank, with every number as it is.

    What is not known is empty; rank is empty for a failed trial and an objective that is not finite.

    Args:
        trials: All trials.
        objective: Name of the metric that is minimised; heads its column.
        budget_tokens: Tokens of a trial that is not stopped.
    """
    leaves = _leaf_names(trials)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    measured = ("tokens_seen", "tokens_per_s", "elapsed_s")
    writer.writerow(["trial", "state", "rank", objective, *measured, *leaves, "run_dir", "error"])
    for rank, trial in enumerate(ranking(trials, budget_tokens), 1):
        writer.writerow(
            [
                *(trial.name, trial.state, "" if trial.score is None else rank),
                *(trial.objective, *(getattr(trial, name) for name in measured)),
                *(_plain(trial.values[name]) if name in trial.values else "" for name in leaves),
                *(trial.run_dir, trial.error),
            ]
        )
    return text.getvalue()


def best_yaml(config: Config, trial: Trial, sweep_name: str, objective: str) -> str:
    """`best.yaml`: the best trial's configuration for `train --config`, named `<sweep>-best`.

    Args:
        config: The trial's resolved configuration.
        trial: The trial.
        sweep_name: Name of the sweep.
        objective: Name of the metric that was minimised.
    """
    values = ", ".join(f"{name}={json.dumps(value)}" for name, value in trial.values.items())
    header = [
        f"The best trial of sweep {sweep_name}: {trial.name}, {trial.state}, {objective} "
        f"{_objective_text(trial)} at {trial.judged_tokens:,} tokens.",
        f"Set by the sweep: {values or 'nothing'}",
        "All other values are this trial's too, the run's name aside.",
        "Train it again: raytrain-gpt train --config best.yaml",
    ]
    named = config.updated({"run_name": f"{sweep_name}-best"})
    return "".join(f"# {line}\n" for line in header) + named.to_yaml()


def _table(
    trials: Iterable[Trial], objective: str, budget_tokens: int, ranks: bool = False
) -> list[str]:
    """Lines of a table, as wide as it needs."""
    trials = list(trials)
    leaves = _leaf_names(trials)
    table = Table(box=None, pad_edge=False)
    if ranks:
        table.add_column("rank", justify="right")
    table.add_column("trial")
    table.add_column("state")
    for name in (objective, "tokens", "share", "tokens/s", "time", *leaves):
        table.add_column(Text(name), justify="right", no_wrap=True)
    for rank, trial in enumerate(trials, 1):
        cells = [
            *([] if not ranks else ["-" if trial.score is None else str(rank)]),
            *(trial.name, trial.state, _objective_text(trial)),
            *(amount(trial.tokens_seen), f"{trial.tokens_seen / budget_tokens:.0%}"),
            "-" if trial.tokens_per_s is None else f"{trial.tokens_per_s:,.0f}",
            "-" if trial.elapsed_s is None else duration(trial.elapsed_s),
            *(value_text(trial.values[n]) if n in trial.values else "-" for n in leaves),
        ]
        table.add_row(*map(Text, cells))  # as Text: a value in brackets is not markup
    return _lines(table)


def _lines(table: Table) -> list[str]:
    text = io.StringIO()
    console = Console(file=text, width=_MAX_TABLE_CHARS, color_system=None, force_terminal=False)
    console.print(table)
    return [line.rstrip() for line in text.getvalue().splitlines()]


def _counts(trials: Iterable[Trial]) -> str:
    """`2 running, 3 stopped`: in the order of a trial's life."""
    counts = Counter(trial.state for trial in trials)
    return ", ".join(f"{counts[state]} {state}" for state in get_args(State) if counts[state])


def _best_text(best: Trial | None, objective: str) -> str:
    if best is None:
        return ""
    tokens = amount(best.judged_tokens)
    return f" | best {best.name}: {objective} {_objective_text(best)} at {tokens} tokens"


def _leaf_names(trials: Iterable[Trial]) -> list[str]:
    return list(dict.fromkeys(name for trial in trials for name in trial.values))


def _objective_text(trial: Trial) -> str:
    if trial.diverged:
        return "not finite"
    return "-" if trial.objective is None else f"{trial.objective:.4f}"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _one_line(error: str | None) -> str:
    line = " ".join((error or "no message").split())
    return line if len(line) <= _MAX_ERROR_CHARS else f"{line[: _MAX_ERROR_CHARS - 1]}…"
