"""Scaling laws: forecasts of larger runs from small ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raytrain_gpt.scaling.law import fit_law as fit_law


def __getattr__(name: str) -> Any:
    """Import `fit_law` on first use: the command line starts without numpy."""
    if name == "fit_law":
        from raytrain_gpt.scaling.law import fit_law

        return fit_law
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
