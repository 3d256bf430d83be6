"""Results of a study: `law.json`, which other commands read, forecasts, and `best.yaml`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import Field, ValidationError

from raytrain_gpt.config.kinds import Strict
from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import ConfigError, DataError, problem, reason
from raytrain_gpt.format import amount, duration
from raytrain_gpt.parsing import parse_json
from raytrain_gpt.scaling.law import Floats, Law, fit_law
from raytrain_gpt.scaling.plan import (
    FAR_EXTRAPOLATION,
    MOST_EPOCHS,
    MOST_EXTRAPOLATION,
    Size,
    StudyPlan,
    doubt_of_extrapolation,
)
from raytrain_gpt.scaling.rates import RateRule
from raytrain_gpt.storage.location import Location

LAW_FILE, BEST_FILE = "law.json", "best.yaml"
RECIPE = ("architecture", "optimizer", "seq_len", "global_batch_tokens")
"""Fields that a law holds for."""
_BUDGETS = (1, 3, 10, 30)
"""Rows of the table, in compute of the largest run."""
_EVALUATIONS = 20
BOOTSTRAP_DRAWS = 60

Number = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
AtLeast0 = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class RunResult(Strict):
    """A run of the study; `left_out` is why the law ignores it, or "" if it does not."""

    name: str
    role: Literal["rate", "size", "seed", "batch", "validation"]
    parameters: Positive
    tokens: Positive
    peak_lr: Positive
    loss: Number | None = None
    left_out: str = ""


class LawFile(Strict):
    """`law.json`: without times, so the same after any number of restarts.

    Attributes:
        recipe: Field of RECIPE -> value.
        half_width: Half of the interval, in nats per token, or None without a hold-out.
        largest_compute: FLOPs of the largest run in the law.
        noise: Standard deviation of the loss between seeds, at the smallest size.
        batch_cost: Loss with twice the batch minus that without, at equal tokens.
    """

    study: str
    recipe: dict[str, Any]
    vocab_hash: str
    e: AtLeast0
    a: AtLeast0
    b: AtLeast0
    alpha: Positive
    beta: Positive
    objective: AtLeast0
    half_width: AtLeast0 | None = None
    largest_compute: Positive
    rate_coefficient: Positive
    rate_exponent: Number
    noise: AtLeast0 | None = None
    batch_cost: Number | None = None
    runs: list[RunResult]

    @property
    def fitted(self) -> list[RunResult]:
        """Runs in the law."""
        return [run for run in self.runs if run.role == "size" and not run.left_out]

    def columns(self) -> tuple[Floats, Floats, Floats]:
        """Return parameters, tokens and losses of the runs in the law."""
        rows = [(run.parameters, run.tokens, run.loss) for run in self.fitted]
        parameters, tokens, losses = np.array(rows, float).reshape(-1, 3).T
        return parameters, tokens, losses

    @property
    def law(self) -> Law:
        """The law, without its hold-out."""
        return Law(self.e, self.a, self.b, self.alpha, self.beta, self.objective)

    @property
    def rule(self) -> RateRule:
        return RateRule(self.rate_coefficient, self.rate_exponent)

    def predict(self, parameters: float, tokens: float) -> float:
        return float(self.law.predict(parameters, tokens))

    @property
    def lengths(self) -> tuple[float, float]:
        """Fewest and most tokens per parameter of the runs in the law."""
        ratios = [run.tokens / run.parameters for run in self.fitted]
        return min(ratios), max(ratios)

    def optimal(self, compute: float) -> tuple[float, float]:
        """Return the best N and D for a compute in FLOPs, within the lengths that were tried."""
        parameters, tokens = self.law.optimal(compute)
        ratio = float(np.clip(tokens / parameters, *self.lengths))
        parameters = math.sqrt(compute / 6 / ratio)
        return parameters, ratio * parameters

    def loss_text(self, loss: float) -> str:
        return f"{loss:.3f}" + ("" if self.half_width is None else f" ± {self.half_width:.3f}")

    def times(self, parameters: float, tokens: float) -> float:
        """Return the compute of a run over that of the largest run in the law."""
        return 6 * parameters * tokens / self.largest_compute

    def expected(self, parameters: float, tokens: float, config: Config) -> str:
        """Format the loss to expect of a configuration; raises a ConfigError if the law does not reach it."""
        times, fields = self.times(parameters, tokens), config.field_values()
        doubts = list(doubt_of_extrapolation(times))
        doubts += [
            f"the law has {name}={value}, not {fields[name]}"
            for name in RECIPE
            if fields[name] != (value := self.recipe.get(name))
        ]
        loss = self.loss_text(self.predict(parameters, tokens))
        text = f"{loss} nats per token, by {self.study}, at {times:.2g} times its largest compute"
        return "; ".join([text, *doubts])


def law_file(
    plan: StudyPlan, vocab_hash: str, rule: RateRule, runs: Sequence[RunResult]
) -> tuple[LawFile, Law]:
    """Fit the law to the runs of a study; raises a ConfigError if too few are left."""
    by_name, base = {run.name: run for run in runs}, plan.base.field_values()
    seeds = [by_name[f"size-1-{plan.lengths[-1]}"], *(run for run in runs if run.role == "seed")]
    losses = [run.loss for run in seeds if run.loss is not None]
    twice, once = by_name["batch-2x"].loss, by_name[f"size-2-{plan.middle_length}"].loss
    file = LawFile(
        study=plan.study.study_name,
        recipe={name: base[name] for name in RECIPE},
        vocab_hash=vocab_hash,
        **{"e": 0, "a": 0, "b": 0, "alpha": 1, "beta": 1, "objective": 0},
        largest_compute=plan.largest_compute,
        rate_coefficient=rule.coefficient,
        rate_exponent=rule.exponent,
        noise=float(np.std(losses, ddof=1)) if len(losses) > 1 else None,
        batch_cost=None if twice is None or once is None else twice - once,
        runs=list(runs),
    )
    try:
        law = fit_law(*file.columns())
    except DataError as error:
        raise ConfigError(f"{plan.study.title} has no law: {error}") from None
    found = {name: getattr(law, name) for name in ("e", "a", "b", "alpha", "beta", "objective")}
    found["half_width"] = law.held_out and law.held_out.half_width
    found["largest_compute"] = max(6 * run.parameters * run.tokens for run in file.fitted)
    return file.model_copy(update=found), law


def to_json(result: Strict) -> str:
    return json.dumps(result.model_dump(exclude_none=True), indent=1) + "\n"


class Verdict(Strict):
    """`forecast.json`, and after the run `validation.json`, which has `seen` and `inside`."""

    parameters: Positive
    tokens: Positive
    times: Positive
    predicted: Number
    half_width: AtLeast0
    values: dict[str, Any]
    law_sha256: str
    seen: Number | None = None
    inside: bool | None = None


FileT = TypeVar("FileT", bound=Strict)


def read_result(kind: type[FileT], file: Location) -> FileT:
    """Read a `law.json` or `validation.json`; raises a ConfigError if it is missing or damaged."""
    try:
        return kind.model_validate(parse_json(file.read_bytes()))
    except ValidationError as error:
        raise ConfigError(f"{file} is not of a study: {problem(error.errors())}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {reason(error)}") from None


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
    if (times := file.times(best.size.parameters, best.tokens)) > FAR_EXTRAPOLATION:
        yield f"the target has {times:.0f} times the compute of the largest run; 10 times is safer"
    if not fewest < tokens / parameters < most:
        yield (
            f"the law's optimum has {tokens / parameters:.2g} tokens per parameter, but the runs had "
            f"{fewest:.0f} to {most:.0f}, to which the forecast keeps"
        )
    if (epochs := best.tokens / train_tokens) > MOST_EPOCHS:
        yield f"{epochs:.1f} epochs of the data are worth less than as many new tokens; add data"
    if file.batch_cost is not None and file.noise and file.batch_cost > 2 * file.noise:
        yield (
            f"twice the batch costs {file.batch_cost:.3f} nats, more than twice the noise of seeds: small "
            "runs are above the critical batch; lower global_batch_tokens"
        )


def objection_to(file: LawFile, best: BestRun) -> str:
    """Return why no run should be planned with a forecast, or ""."""
    times = file.times(best.size.parameters, best.tokens)
    if times > MOST_EXTRAPOLATION:
        return f"the target has {times:.0f} times the compute of the largest run, above {MOST_EXTRAPOLATION}"
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
        law = fit_law(sizes[rows], d[rows], losses[rows], **options)
        if min(law.a, law.b) > 0:
            yield name, law, float(law.predict(at, tokens)), law.optimal(6 * at * tokens)[0]


def bootstrap_half_width(file: LawFile, best: BestRun) -> float:
    """Return half of the 90% interval of the target's loss over resampled runs, if the law were exact."""
    n, d, losses = file.columns()
    draws = np.random.default_rng(0).integers(len(n), size=(BOOTSTRAP_DRAWS, len(n)))
    laws = [fit_law(n[rows], d[rows], losses[rows]) for rows in draws]
    seen = [float(law.predict(best.size.parameters, best.tokens)) for law in laws]
    return float(np.subtract(*np.quantile(seen, (0.95, 0.05)))) / 2
