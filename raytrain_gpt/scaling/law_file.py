"""`law.json`, which other commands read: the runs of a study, their law, and the rule of the peak rate."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from pydantic import NonNegativeFloat, PositiveFloat

from raytrain_gpt.config.kinds import Strict
from raytrain_gpt.config.schema import Config
from raytrain_gpt.data.locations import data_is_there, read_data
from raytrain_gpt.errors import ConfigError, DataError, damage_as
from raytrain_gpt.parsing import parse_json
from raytrain_gpt.scaling.law import Floats, Law, fit_law
from raytrain_gpt.scaling.plan import RunResult, StudyPlan, check_extrapolation
from raytrain_gpt.scaling.rates import RateRule
from raytrain_gpt.storage.location import Location
from raytrain_gpt.train.preflight import expected_vocab_size

LAW_FILE = "law.json"
_RECIPE = ("architecture", "optimizer", "seq_len", "global_batch_tokens")
"""Fields that a law holds for."""


class _Scope(Strict):
    """What a law holds for; first in the file."""

    study: str
    recipe: dict[str, Any]
    """Field of _RECIPE -> value."""
    vocab_hash: str


class LawFile(Law, _Scope, extra="ignore"):
    """`law.json`: without times, so the same after any number of restarts."""

    largest_compute: PositiveFloat
    """FLOPs of the largest run in the law."""
    rate_coefficient: PositiveFloat
    rate_exponent: float
    runs: list[RunResult]

    @property
    def fitted(self) -> list[RunResult]:
        """Runs in the law."""
        return [run for run in self.runs if run.role == "size" and not run.left_out]

    @property
    def rule(self) -> RateRule:
        return RateRule(self.rate_coefficient, self.rate_exponent)

    def optimal(self, compute: float) -> tuple[float, float]:
        """Return the best N and D for a compute in FLOPs, within the lengths that were tried."""
        parameters, tokens = super().optimal(compute)
        tried = [run.tokens / run.parameters for run in self.fitted]
        ratio = float(np.clip(tokens / parameters, min(tried), max(tried)))
        parameters = math.sqrt(compute / 6 / ratio)
        return parameters, ratio * parameters

    def loss_text(self, loss: float) -> str:
        return f"{loss:.3f}" + ("" if self.half_width is None else f" ± {self.half_width:.3f}")

    def times(self, parameters: float, tokens: float) -> float:
        """Return the compute of a run divided by that of the largest run in the law."""
        return 6 * parameters * tokens / self.largest_compute

    def expected(self, parameters: float, tokens: float, config: Config) -> str:
        """Format the loss to expect of a configuration; raises a ConfigError if the law does not reach it."""
        times, fields = self.times(parameters, tokens), config.field_values()
        check_extrapolation(times)
        doubts = [
            f"the law has {name}={value}, not {fields[name]}"
            for name in _RECIPE
            if fields[name] != (value := self.recipe.get(name))
        ]
        if data_is_there(config) and read_data(config).vocab_hash != self.vocab_hash:
            doubts.append("the law has another tokenizer")
        loss, most = float(self.predict(parameters, tokens)), math.log(expected_vocab_size(config))
        if not loss + (self.half_width or 0.0) <= most:
            raise ConfigError(
                f"{self.study} forecasts {self.loss_text(loss)}, but guessing gives {most:.3f}; "
                "use another law"
            )
        by = f"nats per token, by {self.study}, at {times:.2g} times its largest compute"
        return "; ".join([f"{self.loss_text(loss)} {by}", *doubts])


def law_file(
    plan: StudyPlan, vocab_hash: str, rule: RateRule, runs: Sequence[RunResult]
) -> LawFile:
    """Fit the law to the runs of a study; raises a ConfigError if too few are left."""
    base = plan.base.field_values()
    fitted = [run for run in runs if run.role == "size" and not run.left_out]
    try:
        law = fit_law(*columns(fitted))
    except DataError as error:
        raise ConfigError(f"{plan.study.title} has no law: {error}") from None
    return LawFile(
        study=plan.study.study_name,
        recipe={name: base[name] for name in _RECIPE},
        vocab_hash=vocab_hash,
        **law.model_dump(),
        largest_compute=max(6 * run.parameters * run.tokens for run in fitted),
        rate_coefficient=rule.coefficient,
        rate_exponent=rule.exponent,
        runs=list(runs),
    )


def columns(runs: Sequence[RunResult]) -> tuple[Floats, Floats, Floats]:
    rows = [(run.parameters, run.tokens, run.loss) for run in runs]
    parameters, tokens, losses = np.array(rows, float).reshape(-1, 3).T
    return parameters, tokens, losses


def to_json(result: Strict) -> str:
    return json.dumps(result.model_dump(by_alias=True, exclude_none=True), indent=1) + "\n"


class Verdict(Strict):
    """`forecast.json`, and after the run `validation.json`, which has `seen` and `inside`."""

    parameters: PositiveFloat
    tokens: PositiveFloat
    times: PositiveFloat
    predicted: float
    half_width: NonNegativeFloat
    values: dict[str, Any]
    law_sha256: str
    seen: float | None = None
    inside: bool | None = None

    @property
    def text(self) -> str:
        """Observed and predicted loss, in words."""
        seen = "not finite" if self.seen is None else f"{self.seen:.3f}"
        return (
            f"{seen}, predicted {self.predicted:.3f} ± {self.half_width:.3f}: "
            f"{'inside' if self.inside else 'outside'}, at {self.times:.1f} times the largest run"
        )


FileT = TypeVar("FileT", bound=Strict)


def read_result(kind: type[FileT], file: Location) -> FileT:
    """Read a `law.json` or `validation.json`; raises a ConfigError if it is missing or damaged."""
    with damage_as(ConfigError, file):
        return kind.model_validate(parse_json(file.read_bytes()))
