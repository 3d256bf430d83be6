"""A study file: base configuration, target, and the ladder of small runs that forecast it.

    base: {preset: quickstart}
    overrides: {global_batch_tokens: 1024}           fixed for all runs
    target: {compute: 4.0e+13}                       in FLOPs
    peak_lrs: [3.0e-3, 1.0e-2, 3.0e-2]               tried at the two smallest sizes

Designs that cannot determine a law are refused when the file is read; `plan` derives the runs.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from raytrain_gpt.config.kinds import Strict
from raytrain_gpt.config.open_section import Name
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.sweep.spec import Base, CampaignFile

_DECAY = "runs decay linearly to 0 over their last fifth, so that short ones branch from long ones"
_ENDS = "runs are evaluated at their end, and saved where others branch from them"
LEAST = {"sizes": (5, 8), "tokens_per_parameter": (4, 8), "peak_lrs": (3, 2)}
"""Field -> minimum number of values, and minimum ratio of the last to the first. Synthetic studies of 3 sizes
× 3 lengths never covered the truth at ten times the compute; nine in ten of 5 × 4 did."""

Positive = Annotated[float, Field(gt=0, lt=1e30)]


class Target(Strict):
    """Budget of the run to forecast."""

    compute: Positive
    """FLOPs, 6·N·D."""


class Study(CampaignFile):
    flags = ("study_name", "max_concurrent_runs")
    set_by_file: ClassVar = {
        **dict.fromkeys(("min_lr", "schedule", "decay_fraction", "branch_from"), _DECAY),
        **dict.fromkeys(("eval_every_steps", "checkpoint_every_steps", "keep_checkpoints"), _ENDS),
        "peak_lr": "set peak_lrs",
        "max_steps": "set tokens_per_parameter",
        "run_name": "set study_name",
        "init_from": "runs start from random weights",
        "resume": "use --resume",
    }
    may_change = ("max_concurrent_runs", "base", "overrides", "target", "peak_lrs")
    file, history_file, runs_dir = "study.yaml", "runs.jsonl", "runs"
    parts = (Base, Target)

    study_name: Name = Field(max_length=190)
    """Name of the study and its directory; default: the file's name."""
    target: Target
    """Run to forecast: {compute: FLOPS}."""
    peak_lrs: tuple[Positive, ...]
    """Peak learning rates to try at the two smallest sizes, three or more."""
    sizes: tuple[Annotated[float, Field(ge=1000, lt=1e13)], ...] | None = None
    """Parameters of five or more models; null: the size for a tenth of the target's compute, down to 1/16."""
    tokens_per_parameter: tuple[Annotated[int, Field(ge=5, lt=10_000)], ...] = (5, 10, 20, 40)
    """Lengths of the runs: four or more multiples of the first; below 5, no power law fits."""
    max_concurrent_runs: int | None = Field(None, ge=1)
    """Maximum number of concurrent runs; null: as many as fit."""

    @model_validator(mode="after")
    def _determines_a_law(self) -> Study:
        for name, (number, ratio) in LEAST.items():
            values = getattr(self, name)
            if values is None:
                continue
            if (
                len(values) < number
                or [*values] != sorted(values)
                or values[-1] < ratio * values[0]
            ):
                raise ConfigError(
                    f"{name} is {', '.join(f'{v:g}' for v in values)}; a law needs {number} or more rising "
                    f"values that span a factor of {ratio}"
                )
        shortest = self.tokens_per_parameter[0]
        if odd := [length for length in self.tokens_per_parameter if length % shortest]:
            raise ConfigError(
                f"tokens_per_parameter has {odd[0]}; use multiples of the first, {shortest}, so that runs "
                "can branch from one another"
            )
        return self
