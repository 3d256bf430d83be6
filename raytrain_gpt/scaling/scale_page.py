"""`scale.html` of a study: recommended runs, the ladder, and checks of the law."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import numpy as np

from raytrain_gpt.format import amount
from raytrain_gpt.scaling.forecasts import BestRun, Forecasts
from raytrain_gpt.scaling.law import Floats, Law
from raytrain_gpt.scaling.law_file import LawFile, Verdict
from raytrain_gpt.scaling.plan import RunResult
from raytrain_gpt.tracking.charts import Chart, Curve
from raytrain_gpt.tracking.page import page
from raytrain_gpt.tracking.report import curve_style

_FAINT = 6
_NATS = "nats per token"
_OverCompute = partial(Chart, unit=_NATS, x="FLOPs", log=True)
_dots = partial(Curve, marker="o", width=0)


def scale_page(
    forecasts: Forecasts,
    law: Law,
    best: BestRun,
    doubts: list[str],
    verdict: Verdict | None,
) -> str:
    """Format the page of a study.

    Args:
        law: With its hold-out.
        doubts: Doubts about the forecast, one line each.
        verdict: Content of `validation.json`, or None.
    """
    file = forecasts.file
    names, *budgets = forecasts.table()
    return page(
        "scaling/scale_template.html",
        file=file,
        best=best,
        times=file.times(best.size.parameters, best.tokens),
        doubts=doubts,
        verdict=verdict,
        names=names,
        budgets=budgets,
        charts=[
            _over_compute(file, best, verdict),
            _ladder(file),
            _contours(file, best),
            _residuals(file),
            *_hold_out(law),
            _rates(file),
        ],
    )


def _by_size(runs: Iterable[RunResult], x: str) -> Iterator[tuple[int, float, Floats, Floats]]:
    """Yield number, parameters, sorted `x` and losses of each size, smallest first."""
    runs = [run for run in runs if run.loss is not None]
    for i, parameters in enumerate(sorted({run.parameters for run in runs})):
        points = [(getattr(run, x), run.loss) for run in runs if run.parameters == parameters]
        places, losses = np.array(sorted(points), float).T
        yield i, parameters, places, losses


def _over_compute(file: LawFile, best: BestRun, verdict: Verdict | None) -> Chart:
    n, d, losses = file.columns()
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
    return _OverCompute("Loss over compute", curves=curves)


def _ladder(file: LawFile) -> Chart:
    curves = []
    for i, parameters, tokens, losses in _by_size(file.fitted, "tokens"):
        color, _, marker = curve_style(i)
        line = np.geomspace(tokens[0], tokens[-1], 60)
        curves.append(_dots(amount(parameters), tokens, losses, color, marker=marker))
        curves.append(Curve("", line, file.law.predict(parameters, line), color, width=1.2))
    title = "Ladder: runs (marks) and the law (lines), by parameters"
    return Chart(title, _NATS, curves, x="tokens", log=True)


def _contours(file: LawFile, best: BestRun) -> Chart:
    """Draw lines of equal loss: D = ((L − E − A·N^-α) / B)^(-1/β)."""
    (n, d, _), law, target = file.columns(), file.law, best.size.parameters
    sizes = np.geomspace(n.min() / 1.3, 1.3 * max(n.max(), target), 240)
    low, high = d.min() / 1.5, 1.5 * max(d.max(), best.tokens)

    def inside(tokens: Floats) -> Floats:
        return np.where((tokens >= low) & (tokens <= high), tokens, np.nan)

    curves = []
    for i, level in enumerate(np.linspace(file.predict(n.min(), d.min()), best.loss, 7)[1:]):
        rest = np.maximum((level - law.e - law.a * sizes**-law.alpha) / law.b, 1e-9)
        color, dash, _ = curve_style(i)
        curves.append(Curve(f"{level:.2f}", sizes, inside(rest ** (-1 / law.beta)), color, dash))
    optimal = np.array([law.optimal_tokens(size) for size in sizes])
    curves += [
        Curve("best for the compute", sizes, inside(optimal), 1, width=2.4),
        _dots("runs", n, d, 3),
        _dots("target", np.array([target]), np.array([float(best.tokens)]), 2, marker="D"),
    ]
    return Chart("Lines of equal loss", "tokens", curves, x="parameters", log=True, log_y=True)


def _residuals(file: LawFile) -> Chart:
    curves = []
    for i, parameters, tokens, losses in _by_size(file.fitted, "tokens"):
        color, _, marker = curve_style(i)
        errors = losses - file.law.predict(parameters, tokens)
        curves.append(
            _dots(amount(parameters), 6 * parameters * tokens, errors, color, marker=marker)
        )
    n, d, _ = file.columns()
    ends = 6 * np.array([(n * d).min(), (n * d).max()])
    return _OverCompute(
        "Measured minus the law", curves=[*curves, Curve("", ends, np.zeros(2), _FAINT)]
    )


def _hold_out(law: Law) -> Sequence[Chart]:
    if (held := law.held_out) is None:
        return ()
    compute = 6 * held.parameters * held.tokens
    curves = [
        _dots("seen", compute, held.seen, 2, marker="s"),
        _dots("predicted by the smaller runs", compute, held.predicted, 1),
    ]
    return (_OverCompute("Hold-out: runs above a quarter of the largest compute", curves=curves),)


def _rates(file: LawFile) -> Chart:
    curves = []
    for i, parameters, rates, losses in _by_size(
        (r for r in file.runs if r.role == "rate"), "peak_lr"
    ):
        color, dash, marker = curve_style(i)
        curves.append(Curve(amount(parameters), rates, losses, color, dash, marker))
    return Chart("Loss by peak rate, by parameters", _NATS, curves, x="peak_lr", log=True)
