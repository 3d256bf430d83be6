"""A sweep file: search space, budget and validation.

    base: {preset: quickstart}                       or {config: FILE}
    overrides: {num_layers: 2}                       fixed for all trials
    space: {peak_lr: {loguniform: [1e-4, 1e-2]}}     differs between them, see `space`
    budget_tokens: 1048576                           per trial
    report_every_tokens: 131072
    num_trials: 8

Trials are compared at equal token counts, so the file counts tokens; a trial's steps follow from its batch.
`trial_plan` derives the trials and checks each of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import yaml
from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from raytrain_gpt.columns import own_scores
from raytrain_gpt.config.kinds import BUILT_IN, Registered, Registry, Strict
from raytrain_gpt.config.load import load_config_file, load_preset, read_mapping
from raytrain_gpt.config.open_section import Name
from raytrain_gpt.config.schema import Config
from raytrain_gpt.config.wording import MAX_SHOWN, refusal, suggestion
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.format import preview
from raytrain_gpt.sweep.history import HISTORY_FILE
from raytrain_gpt.sweep.space import (
    Domain,
    Expression,
    Grid,
    SampledDomain,
    expression_order,
    field_value,
    parse_domain,
)

OBJECTIVES = ("val/loss", "val/bits_per_byte", "val/perplexity")
"""Built-in objectives, to be minimized."""
_SAME_IN_ALL_TRIALS = ("eval", "cluster", "run", "tracking")
"""Sections for locations, resources and the measurement of the objective; settings of kinds may vary."""
_OTHER_LOSSES = ("data_path", "init_from", "document_mask")
"""Fields of other sections that make losses incomparable."""

SWEEP_FILE = "sweep.yaml"
"""The resolved sweep in its directory."""


class Base(Registered):
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
            return load_preset(self.preset, self.registry)
        return load_config_file(Path(str(self.config)), self.registry)


class NoScheduler(Strict):
    """Scheduler that never stops a trial."""

    kind: Literal["none"] = "none"


class Asha(Strict):
    """Asynchronous successive halving (Li et al., 2020): the best 1/reduction_factor pass each rung.

    Rungs are grace_tokens · reduction_factor^k, so trials report at all of them if they do at the first.
    """

    kind: Literal["asha"]
    grace_tokens: int = Field(ge=1)
    """Tokens of the first rung; no trial is stopped earlier."""
    reduction_factor: int = Field(3, ge=2)
    """Fraction of trials that continues at each rung, as 1/N."""


class CampaignFile(Registered):
    """What the files of sweeps and studies have in common."""

    flags: ClassVar[tuple[str, ...]]
    """Fields of the file that can be set on the command line, as can all of the configuration."""
    set_by_file: ClassVar[dict[str, str]]
    """Field that the file sets in every run -> the reason, or what to do instead."""
    may_change: ClassVar[tuple[str, ...]]
    """Fields that may differ on `--resume`; base and overrides are compared by their configuration."""
    file: ClassVar[str]
    """Name of the resolved file."""
    history_file: ClassVar[str]
    runs_dir: ClassVar[str]
    """Directory of the runs, in that of the sweep or study."""
    parts: ClassVar[tuple[type[Strict], ...]]
    """Models of values in the file, whose fields error messages can name."""

    base: Base
    """Base configuration of all runs: {preset: NAME} or {config: FILE}."""
    overrides: dict[str, Any] = Field({})
    """Field -> its value in all runs."""

    @field_validator("overrides", "space", mode="before", check_fields=False)
    @classmethod
    def _known_fields(cls, raw: Any, info: ValidationInfo) -> Any:
        if not isinstance(raw, Mapping):
            raise ValueError(f"{info.field_name} has no fields below it: {preview(raw, MAX_SHOWN)}")
        for name in raw.keys() & cls.set_by_file.keys():
            raise ConfigError(
                f"{name} is set by the {cls.kind()}: {cls.set_by_file[name]}; remove it"
            )
        read = field_value if info.field_name == "overrides" else parse_domain
        registry = info.context or BUILT_IN
        return {name: read(str(name), value, registry) for name, value in raw.items()}

    @classmethod
    def load(cls, path: Path, flags: Mapping[str, Any], registry: Registry = BUILT_IN) -> Self:
        """Load a file; the default name of the sweep or study is the file's.

        `flags` has texts of fields of the file, or of the configuration for overrides; `null` is None.
        Raises a ConfigError if the file is missing, not YAML, or invalid.
        """
        raw = read_mapping(path, cls.kind(), cls.model_fields)
        raw = {key: value for key, value in raw.items() if value is not None}
        raw = {f"{cls.kind()}_name": path.stem, "overrides": {}, **raw}
        base = raw.get("base")
        if isinstance(base, dict) and isinstance(base.get("config"), str):
            raw["base"] = {**base, "config": str((path.parent / base["config"]).absolute())}
        for name, text in flags.items():
            fields = raw if name in cls.model_fields else raw["overrides"]
            fields[name] = None if text == "null" else text
        models: tuple[type[Strict], ...] = (*cls.parts, cls)
        known = {name: field for one in models for name, field in one.model_fields.items()}

        def unknown(key: str) -> str:
            name = key.rpartition(".")[2]
            is_field = name in registry.fields
            hint = "; it belongs below overrides" if is_field else suggestion(name, known)
            if name in known:
                hint = "; it does not belong here"
            return f"unknown key {name}{hint}"

        try:
            return cls.model_validate(raw, context=registry)
        except ValidationError as error:
            raise ConfigError(f"{path}: {refusal(error, known, unknown)}") from None

    @classmethod
    def kind(cls) -> str:
        """Return `sweep` or `study`."""
        return cls.__name__.lower()

    @property
    def name(self) -> str:
        """Value of `sweep_name` or `study_name`."""
        return str(getattr(self, f"{self.kind()}_name"))

    @property
    def title(self) -> str:
        return f"{self.kind()} {self.name}"

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


class Sweep(CampaignFile):
    flags = (
        *("sweep_name", "budget_tokens", "report_every_tokens", "num_trials"),
        *("max_concurrent_trials", "sweep_seed"),
    )
    set_by_file: ClassVar = {
        "max_steps": "set budget_tokens",
        "eval_every_steps": "set report_every_tokens",
        "checkpoint_every_steps": "set report_every_tokens",
        "run_name": "set sweep_name",
        "resume": "trials always resume, and `tune --resume` continues a sweep",
    }
    may_change = ("max_concurrent_trials", "base", "overrides")
    file, history_file, runs_dir = SWEEP_FILE, HISTORY_FILE, "trials"
    parts = (Asha, Base)

    sweep_name: Name = Field(max_length=190)
    """Name of the sweep and its directory; default: the file's name."""
    space: dict[str, Domain] = Field({})
    """Field -> domain of its values."""
    objective: str = "val/loss"
    """Metric to compare: val/loss, val/perplexity, val/bits_per_byte, or EVALUATION/KEY from --code."""
    objective_mode: Literal["min", "max"] | None = None
    """Whether lower (min) or higher (max) values are better; required for a key from --code."""
    budget_tokens: int = Field(ge=1)
    """Tokens of a trial that is not stopped early."""
    report_every_tokens: int = Field(ge=1)
    """Tokens between evaluations, at which trials save a checkpoint and are compared."""
    num_trials: int | None = Field(None, ge=1)
    """Number of trials; null: one for each point of the grid."""
    max_concurrent_trials: int | None = Field(None, ge=1)
    """Maximum number of concurrent trials; null: as many as fit."""
    sweep_seed: int = Field(0, ge=0)
    """Seed for drawing values; training has its own field, seed."""
    scheduler: Annotated[NoScheduler | Asha, Field(discriminator="kind")] = NoScheduler()
    """Rule for stopping trials early: {kind: none} or {kind: asha, …}."""
    searcher: Literal["random", "optuna"] = "random"
    """How values are chosen; random: grids and draws, fixed in advance; optuna: from earlier losses."""

    @model_validator(mode="after")
    def _fits_together(self) -> Sweep:
        if self.objective in OBJECTIVES:
            if self.objective_mode == "max":
                raise ConfigError(f"{self.objective} is minimized; remove objective_mode: max")
        elif self.objective_mode is None or not own_scores({self.objective: None}):
            raise ConfigError(
                f"objective={preview(self.objective, MAX_SHOWN)}: must be {', '.join(OBJECTIVES)}, or "
                "EVALUATION/KEY from --code; for the latter, set objective_mode to min or max"
            )
        self._check_space()
        self._check_num_trials()
        if isinstance(self.scheduler, Asha):
            grace, report = self.scheduler.grace_tokens, self.report_every_tokens
            if grace % report or grace >= self.budget_tokens:
                valid = range(report, self.budget_tokens, report)
                at = max(0, min(grace // report - 1, len(valid) - 2))
                nearest = ", ".join(map(str, valid[at : at + 2])) or "none"
                raise ConfigError(
                    f"grace_tokens={grace} is not a multiple of report_every_tokens={report} below "
                    f"budget_tokens={self.budget_tokens}; nearest: {nearest}"
                )
        return self

    def _check_space(self) -> None:
        """Refuse fields that cannot vary between trials."""
        for name in self.space:
            if name in self.overrides:
                raise ConfigError(
                    f"{name} has a value in overrides ({self.overrides[name]}) and a domain in the space; "
                    "remove one of them"
                )
            if owners := self.registry.owners(name):
                measures = ("evaluations", self.objective.partition("/")[0])
                is_same = measures in [(owner.selector, owner.name) for owner in owners]
            else:
                section, _ = self.registry.field(name)
                is_same = section in _SAME_IN_ALL_TRIALS or name in _OTHER_LOSSES
            if is_same:
                raise ConfigError(
                    f"{name} cannot vary between trials; move it from space to overrides"
                )
        expression_order(self.space)

    def _check_num_trials(self) -> None:
        """Refuse too many trials, a number that does not fit the grid, and grids for Optuna."""
        grids = {name: len(d.grid) for name, d in self.space.items() if isinstance(d, Grid)}
        drawn = [name for name, domain in self.space.items() if isinstance(domain, SampledDomain)]
        points = math.prod(grids.values())
        number = self.num_trials or points
        if self.searcher == "optuna" and grids:
            raise ConfigError(
                f"searcher optuna does not support grid ({', '.join(grids)}); use choice"
            )
        if self.num_trials is None and (drawn or self.searcher == "optuna"):
            raise ConfigError(
                f"set num_trials: {', '.join(drawn) or 'values'} can be drawn any number of times"
            )
        if number % points or (not drawn and number != points):
            raise ConfigError(
                f"num_trials={number} does not fit the grid's {points} points; set a multiple of them if "
                "values are drawn, else remove it"
            )

    @property
    def searched(self) -> list[str]:
        """Fields of the space that are not computed from others, in the file's order."""
        return [name for name, d in self.space.items() if not isinstance(d, Expression)]
