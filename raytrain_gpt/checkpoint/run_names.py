"""Names of runs and checkpoints that a user may have meant."""

from __future__ import annotations

import contextlib
import difflib

from raytrain_gpt.config.sections import RunSection
from raytrain_gpt.errors import RaytrainGptError
from raytrain_gpt.storage.location import Location

DEFAULT_STORAGE: str = RunSection.model_fields["storage_path"].default
_MARKS = ("config.yaml", "checkpoints", "state.json")
"""A run or checkpoint has at least one of these entries."""


def near_run(name: str, *storages: Location) -> str:
    """Suggest the run or checkpoint with the most similar name, or return an empty string."""
    for storage in storages:
        with contextlib.suppress(OSError, RaytrainGptError):  # one that may not be listed
            for similar in difflib.get_close_matches(name, storage.names(), n=5):
                if any((storage / similar / mark).exists() for mark in _MARKS):
                    return f"; did you mean {similar}?"
    return ""
