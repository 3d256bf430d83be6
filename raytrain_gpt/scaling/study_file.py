"""A study file: base configuration, target, and the ladder of small runs that shall forecast it.

    base: {preset: quickstart}
    overrides: {global_batch_tokens: 1024}           fixed for all runs
    target: {compute: 4.0e+13}                       or gpu_hours, parameters, tokens
    peak_lrs: [3.0e-3, 1.0e-2, 3.0e-2]               tried at the two smallest sizes

Designs that cannot determine a law are refused when the file is read; `plan` derives the runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from raytrain_gpt.config.kinds import Strict
from raytrain_gpt.config.open_section import Name
from raytrain_gpt.core.device import ASSUMED_MFU, GpuSpec, gpu_specs_matching
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.format import count
from raytrain_gpt.sweep.space import field_value
from raytrain_gpt.sweep.spec import Base, load_file

STUDY_FILE = "study.yaml"
"""The resolved study in its directory."""
STUDY_FLAGS = ("study_name", "device", "price_per_hour", "max_concurrent_runs")
"""Fields that can be set on the command line, besides all of the configuration."""
_DECAY = "runs decay linearly to 0 over their last fifth, so that short ones branch from long ones"
_ENDS = "runs are evaluated at their end, and saved where others branch from them"
SET_BY_STUDY = {
    **dict.fromkeys(("min_lr", "schedule", "decay_fraction", "branch_from"), _DECAY),
    **dict.fromkeys(("eval_every_steps", "checkpoint_every_steps", "keep_checkpoints"), _ENDS),
    "peak_lr": "set peak_lrs",
    "max_steps": "set tokens_per_parameter",
    "run_name": "set study_name",
    "init_from": "runs start from random weights",
    "resume": "use --resume",
}  # fmt: skip
"""Field that a study sets in every run -> the reason, or what to do instead."""
LEAST = {"sizes": (5, 8), "tokens_per_parameter": (4, 8), "peak_lrs": (3, 2)}
"""Field -> minimum number of values, and minimum ratio of the last to the first. Synthetic studies of 3 sizes
× 3 lengths never covered the truth at ten times the compute; nine in ten of 5 × 4 did."""
_SHORTEST_TOKENS_PER_PARAMETER = 5
_USUAL_TOKENS_PER_PARAMETER = 20
"""Hoffmann et al. (2022); it only converts targets to compute."""

Positive = Annotated[float, Field(gt=0, lt=1e30)]


class Target(Strict):
    """Budget of the run to forecast; one of these."""

    compute: Positive | None = None
    """FLOPs, 6·N·D."""
    gpu_hours: Positive | None = None
    """Hours of the study's device at an MFU of 0.4."""
    parameters: Positive | None = None
    """N, FLOPs per token / 6."""
    tokens: Positive | None = None
    """D."""

    @model_validator(mode="after")
    def _is_one(self) -> Target:
        if len(self.model_dump(exclude_none=True)) != 1:
            raise ValueError(f"target needs exactly one of {', '.join(Target.model_fields)}")
        return self


class Study(Strict):
    study_name: Name = Field(max_length=190)
    """Name of the study and its directory; default: the file's name."""
    base: Base
    """Base configuration of the runs: {preset: NAME} or {config: FILE}; its shape sets proportions."""
    overrides: dict[str, Any] = Field({})
    """Field -> its value in all runs."""
    target: Target
    """Run to forecast: {compute: FLOPS}, {gpu_hours: HOURS}, {parameters: N} or {tokens: D}."""
    peak_lrs: tuple[Positive, ...]
    """Peak learning rates to try at the two smallest sizes, three or more."""
    sizes: tuple[Annotated[float, Field(ge=1000, lt=1e13)], ...] | None = None
    """Parameters of five or more models; null: 1/16 to 1 of one with a tenth of the target's compute."""
    tokens_per_parameter: tuple[Annotated[int, Field(ge=1, lt=10_000)], ...] = (5, 10, 20, 40)
    """Lengths of the runs, four or more, multiples of the first."""
    device: str | None = None
    """GPU of the runs, for gpu_hours and the plan's time; null: speed measured here."""
    price_per_hour: float | None = Field(None, ge=0, lt=1e9)
    """Price of one device per hour; null: no prices."""
    max_concurrent_runs: int | None = Field(None, ge=1)
    """Maximum number of concurrent runs; null: as many as fit."""

    @field_validator("overrides", mode="before")
    @classmethod
    def _known_fields(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            raise ValueError("overrides has no fields below it")
        return {name: field_value(str(name), value) for name, value in raw.items()}

    @model_validator(mode="after")
    def _determines_a_law(self) -> Study:
        for name in self.overrides.keys() & SET_BY_STUDY.keys():
            raise ConfigError(
                f"{name} is set by the study: {SET_BY_STUDY[name]}; remove it from overrides"
            )
        for name in LEAST:
            if (values := getattr(self, name)) is not None:
                _check(name, values)
        shortest = self.tokens_per_parameter[0]
        if shortest < _SHORTEST_TOKENS_PER_PARAMETER:
            raise ConfigError(
                f"tokens_per_parameter starts at {shortest}, where runs follow no power law; start at "
                f"{_SHORTEST_TOKENS_PER_PARAMETER} or more"
            )
        if odd := [length for length in self.tokens_per_parameter if length % shortest]:
            raise ConfigError(
                f"tokens_per_parameter has {odd[0]}; use multiples of the first, {shortest}, so that runs "
                "can branch from one another"
            )
        gpu = self.gpu
        if self.target.gpu_hours and gpu is None:
            raise ConfigError(
                "a target in gpu_hours needs the GPU; set device, for example to H100"
            )
        return self

    @property
    def title(self) -> str:
        return f"study {self.study_name}"

    @property
    def gpu(self) -> GpuSpec | None:
        """The GPU of `device`; raises a ConfigError if it is not in the table."""
        if self.device is None:
            return None
        specs = gpu_specs_matching(self.device)
        specs = [spec for spec in specs if spec.is_sxm] or specs
        if len(specs) != 1:
            raise ConfigError(
                f"device={self.device} is not one GPU of the table; write H100 or A100-SXM4-80GB"
            )
        return specs[0]

    @property
    def target_compute(self) -> float:
        """FLOPs of the target, by 20 tokens per parameter if it gives only one of both."""
        target, ratio = self.target, _USUAL_TOKENS_PER_PARAMETER
        if target.parameters is not None:
            return 6 * ratio * target.parameters**2
        if target.tokens is not None:
            return 6 * target.tokens**2 / ratio
        if target.gpu_hours is not None and self.gpu is not None:
            return target.gpu_hours * 3600 * self.gpu.bf16_flops * ASSUMED_MFU
        return target.compute or 0.0


def _check(name: str, values: Sequence[float]) -> None:
    """Refuse a list that is too short, not increasing, or spans too little."""
    number, ratio = LEAST[name]
    if len(values) < number:
        raise ConfigError(f"{name} has {count(len(values), 'value')}; a law needs {number} or more")
    if list(values) != sorted(set(values)):
        raise ConfigError(
            f"{name} is not increasing: {', '.join(f'{v:g}' for v in values)}; sort it"
        )
    if values[-1] < ratio * values[0]:
        raise ConfigError(
            f"{name} spans a factor of {values[-1] / values[0]:.2g}; a law needs {ratio} or more"
        )


def load_study(path: Path, flags: Mapping[str, Any]) -> Study:
    """Load a study file; raises a ConfigError if it is missing, not YAML, or invalid."""
    return load_file(Study, "study", path, flags, STUDY_FLAGS, (Base, Target))
