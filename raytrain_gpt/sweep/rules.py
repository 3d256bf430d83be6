"""Restrictions on a sweep file."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from raytrain_gpt.config import kinds
from raytrain_gpt.config.schema import field_section
from raytrain_gpt.config.wording import MAX_SHOWN, nearest_multiples
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.format import count, own_scores, preview
from raytrain_gpt.sweep.space import (
    Choice,
    Domain,
    Expression,
    Grid,
    SampledDomain,
    Searched,
    expression_order,
)

_SAME_IN_ALL_TRIALS = ("eval", "cluster", "run", "tracking")
"""Sections for locations, resources and the measurement of the objective; settings of kinds may vary."""
_OTHER_LOSSES = ("data_path", "init_from", "document_mask")
"""Fields of other sections that make losses incomparable."""

OBJECTIVES = {
    "val/loss": ("validation loss", "nats per token"),
    "val/bits_per_byte": ("validation loss", "bits per byte"),
    "val/perplexity": ("validation perplexity", "per token"),
}
"""Built-in objective, to be minimized -> name and unit."""

_MAX_TRIALS = 1000
"""Most trials of a sweep, whose names have three digits."""


def check_objective(objective: str, mode: str | None) -> None:
    """Refuse what no evaluation measures, and a missing or wrong direction."""
    if objective in OBJECTIVES:
        if mode == "max":
            raise ConfigError(f"{objective} is minimized; remove objective_mode: max")
    elif not re.fullmatch(r"\w+/[\w.=-]+", objective) or not own_scores({objective: None}):
        raise ConfigError(
            f"objective={preview(objective, MAX_SHOWN)}: must be {', '.join(OBJECTIVES)}, or "
            "EVALUATION/KEY of your --code"
        )
    elif mode is None:
        raise ConfigError(f"set objective_mode to min or max, the better end of {objective}")


def check_space(space: Mapping[str, Domain], overrides: Mapping[str, Any], objective: str) -> None:
    """Refuse fields that cannot vary between trials, and an empty search."""
    for name, domain in space.items():
        if name in overrides:
            raise ConfigError(
                f"{name} has a value in overrides ({overrides[name]}) and a domain in the space; "
                "remove one of them"
            )
        if _is_same_in_all_trials(name, objective):
            raise ConfigError(f"{name} cannot vary between trials; move it from space to overrides")
        if name in ("global_batch_tokens", "seq_len") and not isinstance(domain, Grid | Choice):
            raise ConfigError(
                f"{name} has the domain {domain.kind}, whose values cannot all be checked before the "
                "first trial; use grid or choice"
            )
    _check_settings(space, overrides)
    if all(isinstance(domain, Expression) for domain in space.values()):
        raise ConfigError("the space has nothing to search; add a grid, choice or range")
    expression_order(space)


def _is_same_in_all_trials(name: str, objective: str) -> bool:
    if owners := kinds.owners(name):
        measures = ("evaluations", objective.partition("/")[0])
        return measures in [(owner.selector, owner.name) for owner in owners]
    return field_section(name) in _SAME_IN_ALL_TRIALS or name in _OTHER_LOSSES


def _check_settings(space: Mapping[str, Domain], overrides: Mapping[str, Any]) -> None:
    """Refuse settings that only some of the searched kinds have."""
    for name in (*overrides, *space):
        owners = kinds.owners(name)
        choices = space.get(owners[0].selector) if owners else None
        if not isinstance(choices, Searched):
            continue
        for kind in choices.extremes:
            if kind not in [owner.name for owner in owners]:
                raise ConfigError(
                    f"{name} does not apply to {owners[0].selector}={kind}, which the space also has; remove "
                    f"{name}, or sweep each {owners[0].selector} by itself"
                )


def check_num_trials(space: Mapping[str, Domain], searcher: str, num_trials: int | None) -> None:
    """Refuse too many trials, a number that is not a multiple of the grid's, and grids for Optuna."""
    points = math.prod(len(d.grid) for d in space.values() if isinstance(d, Grid))
    drawn = [name for name, domain in space.items() if isinstance(domain, SampledDomain)]
    grids = [name for name, domain in space.items() if isinstance(domain, Grid)]
    if max(points, num_trials or 0) > _MAX_TRIALS:
        raise ConfigError(
            f"{max(points, num_trials or 0):,} trials are more than {_MAX_TRIALS:,}; lower num_trials, or "
            "use fewer or shorter grids"
        )
    if searcher == "optuna" and grids:
        raise ConfigError(f"searcher optuna takes no grid ({', '.join(grids)}); use choice")
    if num_trials is None:
        if drawn:
            raise ConfigError(
                f"set num_trials: {', '.join(drawn)} can be drawn any number of times"
            )
    elif not drawn and num_trials != points:
        raise ConfigError(
            f"num_trials={num_trials}, but the grid has {count(points, 'point')} and nothing is drawn; "
            "remove num_trials"
        )
    elif num_trials % points:
        raise ConfigError(
            f"num_trials={num_trials} is not a multiple of the grid's {points} points; nearest: "
            f"{nearest_multiples(num_trials, points)}"
        )


def check_first_rung(tokens: int, report_every_tokens: int, budget_tokens: int) -> None:
    """Refuse comparisons at tokens where trials do not report, or report only at their end."""
    if tokens % report_every_tokens:
        raise ConfigError(
            f"grace_tokens={tokens} is not a multiple of report_every_tokens={report_every_tokens}; nearest: "
            f"{nearest_multiples(tokens, report_every_tokens)}"
        )
    if tokens >= budget_tokens:
        raise ConfigError(
            f"grace_tokens={tokens} is not below budget_tokens={budget_tokens}, so trials would only be "
            "compared at their end; set it lower, or scheduler: {kind: none}"
        )
