"""Forecasts of a study: the best run for a budget, doubts about it, `best.yaml`, and other fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from raytrain_gpt.format import amount, duration
from raytrain_gpt.scaling.law import MIN_RUNS, Law, fit_law
from raytrain_gpt.scaling.law_file import LawFile
from raytrain_gpt.scaling.plan import (
    MAX_EPOCHS,
    MAX_EXTRAPOLATION,
    Size,
    StudyPlan,
    doubt_of_extrapolation,
)

BEST_FILE = "best.yaml"
_BUDGETS = (1, 3, 10, 30)
"""Rows of the table, in compute of the largest run."""
_EVALUATIONS = 20


@dataclass(frozen=True)
class BestRun:
    """A run at the optimum of a law; time and price are None if unknown."""

    size: Size
    steps: int
    tokens: int
    peak_lr: float
    loss: float
    seconds: float | None
    price: float | None

    @property
    def compute(self) -> float:
        return 6 * self.size.parameters * self.tokens


@dataclass(frozen=True)
class Forecasts:
    """Forecasts of a study.

    Attributes:
        flops: FLOP/s of the study's largest run, or None.
        devices: Number that it used.
    """

    plan: StudyPlan
    file: LawFile
    flops: float | None
    devices: int

    def best(self) -> BestRun:
        """Return the run for the study's target, which keeps its parameters or tokens."""
        target, law, (fewest, most) = self.plan.study.target, self.file.law, self.file.lengths
        if (n := target.parameters) is not None:
            return self._run(n, float(np.clip(law.optimal_tokens(n), fewest * n, most * n)))
        if (d := target.tokens) is not None:
            return self._run(float(np.clip(law.optimal_parameters(d), d / most, d / fewest)), d)
        return self._run(*self.file.optimal(self.plan.study.target_compute))

    def _run(self, parameters: float, tokens: float) -> BestRun:
        size, batch = self.plan.size_near(parameters), self.plan.batch_tokens
        # The nearest shape is not equal, the compute is.
        steps = max(1, round(tokens * parameters / size.parameters / batch))
        seconds = self.flops and 6 * size.parameters * steps * batch / self.flops
        rate = self.plan.study.price_per_hour
        price = None if seconds is None or rate is None else seconds / 3600 * self.devices * rate
        loss = self.file.predict(size.parameters, steps * batch)
        peak_lr = self.file.rule.rate(size.parameters)
        return BestRun(size, steps, steps * batch, peak_lr, loss, seconds, price)

    def table(self) -> list[list[str]]:
        """Return rows of cells, the first with the names, for several budgets."""
        computes = {self.file.largest_compute * times for times in _BUDGETS}
        runs = [self._run(*self.file.optimal(compute)) for compute in computes]
        has_price = self.plan.study.price_per_hour is not None
        names = ["FLOPs", "parameters", "tokens", "batch", "peak rate", "loss", "time"]
        rows = [[*names, *["price"] * has_price]]
        for run in sorted([*runs, self.best()], key=lambda run: run.compute):
            size = amount(run.size.parameters), amount(run.tokens), f"{self.plan.batch_tokens:,}"
            time = "unknown" if run.seconds is None else duration(run.seconds)
            price = ["unknown" if run.price is None else f"{run.price:,.2f}"] * has_price
            loss = self.file.loss_text(run.loss)
            rows.append([f"{run.compute:.2g}", *size, f"{run.peak_lr:g}", loss, time, *price])
        return rows


def doubts_about(file: LawFile, best: BestRun, train_tokens: int) -> Iterator[str]:
    """Yield doubts about a forecast."""
    parameters, tokens = file.law.optimal(best.compute)
    fewest, most = file.lengths
    if (times := file.times(best.size.parameters, best.tokens)) <= MAX_EXTRAPOLATION:
        yield from doubt_of_extrapolation(times)
    if not fewest < tokens / parameters < most:
        yield (
            f"the law's optimum has {tokens / parameters:.2g} tokens per parameter, but the runs had "
            f"{fewest:.0f} to {most:.0f}, to which the forecast keeps"
        )
    if (epochs := best.tokens / train_tokens) > MAX_EPOCHS:
        yield f"{epochs:.1f} epochs of the data are worth less than as many new tokens; add data"
    if file.batch_cost is not None and file.noise and file.batch_cost > 2 * file.noise:
        yield (
            f"twice the batch costs {file.batch_cost:.3f} nats, more than twice the noise of seeds: small "
            "runs are above the critical batch; lower global_batch_tokens"
        )


def objection_to(file: LawFile, best: BestRun) -> str:
    """Return why no run should be planned with a forecast, or ""."""
    times = file.times(best.size.parameters, best.tokens)
    if times > MAX_EXTRAPOLATION:
        return f"the target has {times:.0f} times the compute of the largest run, above {MAX_EXTRAPOLATION}"
    if file.half_width is None:
        return "too few runs are left for a hold-out"
    lowest = min(run.loss for run in file.fitted if run.loss is not None)
    if times > 1 and best.loss + file.half_width > lowest:
        return f"its interval, {file.loss_text(best.loss)}, reaches the lowest loss of the runs, {lowest:.3f}"
    return ""


def best_yaml(plan: StudyPlan, file: LawFile, best: BestRun) -> str:
    """Format the configuration of a forecast for `train --config`."""
    every = max(1, best.steps // _EVALUATIONS)
    often = {"eval_every_steps": every, "checkpoint_every_steps": every}
    spikes = {"spike_detection": plan.study.base.load().spikes.spike_detection}
    length = {"peak_lr": best.peak_lr, "max_steps": best.steps, "run_name": f"{file.study}-best"}
    config = plan.base.updated({**best.size.fields, **length, **often, **spikes})
    return (
        f"# By {file.study}, for {best.compute:.3g} FLOPs: {amount(best.size.parameters)} parameters (FLOPs "
        f"per token / 6) and {amount(best.tokens)} tokens.\n"
        f"# Expected validation loss: {file.loss_text(best.loss)} nats per token.\n{config.to_yaml()}"
    )


Variant = tuple[str, Law, float, float]
"""Name and law of another fit, its loss for the target, and its best parameters for the target's compute."""


def variants(file: LawFile, best: BestRun, inner: dict[float, float]) -> Iterator[Variant]:
    """Fit the runs in other ways; `inner` is N -> parameters without embedding and head."""
    n, d, losses = file.columns()
    target, tokens = best.size.parameters, float(best.tokens)
    longer, small = d / n > 1.5 * (d / n).min(), np.array([inner[one] for one in n])
    for name, rows, sizes, at, options in (
        ("Huber loss", d > 0, n, target, {}),
        ("least squares", d > 0, n, target, {"huber_threshold": 1.0}),
        ("without the shortest runs", longer, n, target, {}),
        ("N without embedding and head", d > 0, small, inner[target], {}),
    ):
        if rows.sum() < MIN_RUNS:
            continue
        law = fit_law(sizes[rows], d[rows], losses[rows], **options)
        if min(law.a, law.b) > 0:
            yield name, law, float(law.predict(at, tokens)), law.optimal(6 * at * tokens)[0]
