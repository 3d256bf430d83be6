"""`scale.html` of a study: recommended runs, the ladder, and checks of the law."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from raytrain_gpt.format import amount
from raytrain_gpt.runs import pages
from raytrain_gpt.runs.pages import Chart, Curve, curve_style
from raytrain_gpt.scaling.forecasts import BestRun, Forecasts
from raytrain_gpt.scaling.law import Floats
from raytrain_gpt.scaling.law_file import LawFile, Verdict, columns

_Losses = partial(Chart, unit="nats per token", log=True)
_dots = partial(Curve, marker="o", width=0)


def scale_page(forecasts: Forecasts, doubts: list[str], verdict: Verdict | None) -> str:
    """Format the page of a study, with doubts about the forecast, one line each, and any validation."""
    blocks = _blocks(forecasts, doubts, verdict)
    return pages.page("scaling study", forecasts.file.study, blocks, ["law.json"])


def _blocks(forecasts: Forecasts, doubts: list[str], verdict: Verdict | None) -> Iterator[str]:
    file, best = forecasts.file, forecasts.best()
    recipe = ", ".join(f"{name} {value}" for name, value in file.recipe.items())
    yield f"{len(file.fitted)} runs in the law · {recipe}"
    yield from forecasts.summary()
    if verdict is not None:
        yield f"Validation: {verdict.text}."
    if doubts:
        yield pages.heading("Doubts")
        yield from doubts
    yield pages.heading("For a budget")
    yield "The best run for each compute, with this data, recipe and batch."
    names, *rows = forecasts.table()
    yield pages.table(names, rows)
    yield pages.heading("The law")
    yield (
        f"loss = {file.E:.3f} + {file.A:.4g} · N^−{file.alpha:.3f} + {file.B:.4g} · D^−{file.beta:.3f} nats "
        "per token. N is FLOPs per token / 6, D the training tokens. A law of the smaller runs predicts the "
        "larger ones; half the interval is twice the 90th percentile of its errors."
    )
    yield pages.figures([_over_compute(file, best, verdict), _ladder(file), _rates(file)])
    yield pages.heading("Runs")
    names = ["Run", "parameters", "tokens", "peak rate", "loss", "minus the law"]
    yield pages.table(names, _runs(file))


def _runs(file: LawFile) -> Iterator[list[str]]:
    for run in file.runs:
        sizes = [pages.sorted_by(size, amount(size)) for size in (run.parameters, run.tokens)]
        cells = [run.name, *sizes, f"{run.peak_lr:g}"]
        if run.loss is None:
            yield [*cells, run.left_out, "–"]
        else:
            error = run.loss - float(file.predict(run.parameters, run.tokens))
            yield [*cells, f"{run.loss:.4f}", f"{error:+.4f}"]


def _by_size(file: LawFile, role: str, x: str) -> Iterator[tuple[int, float, Floats, Floats]]:
    """Yield number, parameters, sorted `x` and losses of the runs of each size, smallest first."""
    runs = [
        run for run in file.runs if run.role == role and run.loss is not None and not run.left_out
    ]
    for i, parameters in enumerate(sorted({run.parameters for run in runs})):
        points = [(getattr(run, x), run.loss) for run in runs if run.parameters == parameters]
        xs, losses = np.array(sorted(points), float).T
        yield i, parameters, xs, losses


def _over_compute(file: LawFile, best: BestRun, verdict: Verdict | None) -> Chart:
    n, d, losses = columns(file.fitted)
    line = np.geomspace(6 * (n * d).min(), 1.2 * max(best.compute, file.largest_compute), 60)
    optimal = np.array([file.predict(*file.optimal(compute)) for compute in line])
    half = np.nan if file.half_width is None else file.half_width
    curves = [
        _dots("runs", 6 * n * d, losses, 3),
        Curve("best for the compute", line, optimal, 1, width=2),
        Curve("interval", line, optimal + half, 1, "4 3"),
        Curve("", line, optimal - half, 1, "4 3"),
        _dots("target", np.array([best.compute]), np.array([best.loss]), 2, marker="D"),
    ]
    if verdict is not None and verdict.seen is not None:
        compute = np.array([6 * verdict.parameters * verdict.tokens])
        curves.append(_dots("validation", compute, np.array([verdict.seen]), 4, marker="s"))
    return _Losses("Loss over compute", curves=curves, x="FLOPs")


def _ladder(file: LawFile) -> Chart:
    curves = []
    for i, parameters, tokens, losses in _by_size(file, "size", "tokens"):
        color, _, marker = curve_style(i)
        line = np.geomspace(tokens[0], tokens[-1], 60)
        curves.append(_dots(amount(parameters), tokens, losses, color, marker=marker))
        curves.append(Curve("", line, file.predict(parameters, line), color, width=1.2))
    title = "Ladder: runs (marks) and the law (lines), by parameters"
    return _Losses(title, curves=curves, x="tokens")


def _rates(file: LawFile) -> Chart:
    runs = _by_size(file, "rate", "peak_lr")
    curves = [Curve(amount(n), rates, losses, *curve_style(i)) for i, n, rates, losses in runs]
    return _Losses("Loss by peak rate, by parameters", curves=curves, x="peak_lr")
