"""Sweeps: many runs over a search space, compared at equal token counts."""
