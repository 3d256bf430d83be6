"""A sweep file: search space, budget and validation.

    base: {preset: quickstart}                       or {config: FILE}
    overrides: {num_layers: 2}                       fixed for all trials
    space: {peak_lr: {loguniform: [1e-4, 1e-2]}}     differs between them, see `space`
    budget_tokens: 1048576                           per trial
    report_every_tokens: 131072
    num_trials: 8

Trials are compared at equal tokens, so the file counts in tokens, and a trial's steps follow from its batch.
Errors in the file itself are refused when it is read (`rules`); `trial_plan` derives the trials and checks
each of them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from raytrain_gpt.config.kinds import Strict
from raytrain_gpt.config.load import load_config_file, load_preset, read_mapping
from raytrain_gpt.config.open_section import Name
from raytrain_gpt.config.schema import FIELDS, Config
from raytrain_gpt.config.sections import CountOrAuto
from raytrain_gpt.config.wording import MAX_SHOWN, refusal, suggestion
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.format import preview
from raytrain_gpt.sweep import rules
from raytrain_gpt.sweep.space import Domain, Searched, field_value, parse_domain

SWEEP_FLAGS = (
    "sweep_name",
    "budget_tokens",
    "report_every_tokens",
    "num_trials",
    "max_concurrent_trials",
    "trials_per_gpu",
    "sweep_seed",
)
"""Fields that can be set on the command line, besides all of the configuration."""
SET_BY_SWEEP = {
    "max_steps": "set budget_tokens",
    "eval_every_steps": "set report_every_tokens",
    "checkpoint_every_steps": "set report_every_tokens",
    "run_name": "set sweep_name",
    "resume": "trials always resume, and `tune --resume` continues a sweep",
}
"""Field that the sweep sets in every trial -> what to do instead of setting it."""


SWEEP_FILE = "sweep.yaml"
"""The resolved sweep in its directory."""


class Base(Strict):
    preset: str | None = None
    """Name of a preset."""
    config: str | None = None
    """A configuration file, relative to the sweep file's directory."""

    @model_validator(mode="after")
    def _one_of_them(self) -> Base:
        if (self.preset is None) == (self.config is None):
            raise ValueError("base needs either preset or config; write {preset: quickstart}")
        return self

    def load(self) -> Config:
        if self.preset is not None:
            return load_preset(self.preset)
        return load_config_file(Path(str(self.config)))


class NoScheduler(Strict):
    """Scheduler that never stops a trial."""

    kind: Literal["none"] = "none"


class Asha(Strict):
    """Asynchronous successive halving (Li et al., 2020): the best 1/reduction_factor pass each rung.

    Rungs are grace_tokens · reduction_factor^k, so trials report at all of them if at the first one.
    """

    kind: Literal["asha"]
    grace_tokens: int = Field(ge=1)
    """Tokens of the first rung; no trial is stopped earlier."""
    reduction_factor: int = Field(3, ge=2)
    """Fraction of trials that continues at each rung, as 1/N."""


class Sweep(Strict):
    sweep_name: Name = Field(max_length=190)
    """Name of the sweep and its directory; default: the file's name."""
    base: Base
    """Base configuration of the trials: {preset: NAME} or {config: FILE}."""
    overrides: dict[str, Any] = Field({})
    """Field -> its value in all trials."""
    space: dict[str, Domain] = Field({})
    """Field -> domain of its values."""
    objective: str = "val/loss"
    """Metric: val/loss, val/perplexity, val/bits_per_byte, or EVALUATION/KEY of your --code."""
    objective_mode: Literal["min", "max"] | None = None
    """Whether lower (min) or higher values are better (max); required for a key of your --code."""
    budget_tokens: int = Field(ge=1)
    """Tokens per trial that is not stopped."""
    report_every_tokens: int = Field(ge=1)
    """Tokens between evaluations, at which trials save a checkpoint and are compared."""
    num_trials: int | None = Field(None, ge=1)
    """Number of trials; null: one for each point of the grid."""
    max_concurrent_trials: int | None = Field(None, ge=1)
    """Maximum number of concurrent trials; null: as many as fit."""
    trials_per_gpu: CountOrAuto | None = None
    """Trials that share a GPU; auto: as many as fit, by measured memory; null: see gpus_per_worker."""
    sweep_seed: int = Field(0, ge=0)
    """Seed of the values drawn; the seed of training is the field seed."""
    scheduler: Annotated[NoScheduler | Asha, Field(discriminator="kind")] = NoScheduler()
    """Rule to stop trials: {kind: none} or {kind: asha, …}; values: by grid, at random, or by Optuna."""
    searcher: Literal["random", "optuna"] = "random"
    """Source of values; random: grids and draws, fixed in advance; optuna: chosen from earlier losses."""

    @field_validator("overrides", "space", mode="before")
    @classmethod
    def _known_fields(cls, raw: Any, info: ValidationInfo) -> Any:
        if not isinstance(raw, Mapping):
            raise ValueError(f"{info.field_name} has no fields below it: {preview(raw, MAX_SHOWN)}")
        read = field_value if info.field_name == "overrides" else parse_domain
        return {name: read(str(name), value) for name, value in raw.items()}

    @model_validator(mode="after")
    def _fits_together(self) -> Sweep:
        for name in (*self.overrides, *self.space):
            if name in SET_BY_SWEEP:
                raise ConfigError(f"{name} is set by the sweep; {SET_BY_SWEEP[name]}")
        if self.trials_per_gpu and "gpus_per_worker" in self.overrides:
            raise ConfigError("trials_per_gpu sets gpus_per_worker; remove one of them")
        rules.check_objective(self.objective, self.objective_mode)
        rules.check_space(self.space, self.overrides, self.objective)
        rules.check_num_trials(self.space, self.searcher, self.num_trials)
        report, budget = self.report_every_tokens, self.budget_tokens
        if report > budget:
            raise ConfigError(
                f"report_every_tokens={report} is above budget_tokens={budget}; set it to {budget} or less"
            )
        if isinstance(self.scheduler, Asha):
            rules.check_first_rung(self.scheduler.grace_tokens, report, budget)
        return self

    @property
    def mode(self) -> Literal["min", "max"]:
        """Whether a lower or a higher objective is better."""
        return self.objective_mode or "min"

    @property
    def title(self) -> str:
        """Text `sweep NAME`, or just the name if it starts with `sweep`, as sweep.yaml's default does."""
        name = self.sweep_name
        return name if name.startswith("sweep") else f"sweep {name}"

    @property
    def searched(self) -> list[str]:
        """Fields of the space that are not computed from others, in the file's order."""
        return [name for name, d in self.space.items() if isinstance(d, Searched)]


def load_sweep(path: Path, flags: Mapping[str, Any]) -> Sweep:
    """Load a sweep file; raises a ConfigError if it is missing, not YAML, or invalid.

    `flags` maps SWEEP_FLAGS, and fields that become overrides, to texts; `null` is None.
    """
    return load_file(Sweep, "sweep", path, flags, SWEEP_FLAGS, (Asha, Base))


FileT = TypeVar("FileT", bound=Strict)


def load_file(
    kind: type[FileT],
    what: str,
    path: Path,
    flags: Mapping[str, Any],
    own_flags: Container[str],
    below: Iterable[type[Strict]],
) -> FileT:
    """Load a file with `base` and `overrides`, whose default name is the file's.

    Args:
        flags: Name -> text; `null` is None. Those not in `own_flags` become overrides.
        below: Models of values in it, whose fields are known to messages.

    Raises:
        ConfigError: it is missing, not YAML, or invalid.
    """
    raw = read_mapping(path, what, kind.model_fields)
    empty = {name for name in kind.model_fields if raw.get(name, 0) is None}
    raw = {f"{what}_name": path.stem} | {k: v for k, v in raw.items() if k not in empty}
    base = raw.get("base")
    if isinstance(base, dict) and isinstance(base.get("config"), str):
        raw["base"] = {**base, "config": str((path.parent / base["config"]).absolute())}
    for name, text in flags.items():
        fields = raw if name in own_flags else raw.setdefault("overrides", {})
        if isinstance(fields, dict):
            fields[name] = None if text == "null" else text
    fields = {name: field for one in below for name, field in one.model_fields.items()}
    fields |= kind.model_fields

    def unknown(key: str) -> str:
        name = key.rpartition(".")[2]
        places = " or ".join(place for place in ("overrides", "space") if place in fields)
        hint = f"; it belongs below {places}" if name in FIELDS else ""
        return f"unknown key {name}{hint or suggestion(name, fields)}"

    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(f"{path}: {refusal(error, fields, unknown)}") from None
