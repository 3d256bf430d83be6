"""Result of an async evaluation: `evaluation.json` in the checkpoint's directory.

It is written after the checkpoint is complete, so `hashes.json` does not list it; instead it stores the
checkpoint's hash. A stale file of the same step, which an object store may keep after a rollback, is ignored.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter

from raytrain_gpt.checkpoint.rows import is_row
from raytrain_gpt.parsing import parse_json
from raytrain_gpt.storage.location import Location, force_to_disk

EVALUATION_FILE = "evaluation.json"


@dataclass(frozen=True)
class EvaluationResult:
    """The evaluation of a checkpoint, or why it was skipped.

    Attributes:
        row: Row of metrics.jsonl, or None if skipped.
        samples: One line per sample.
        left_out: Why the evaluation was skipped, or None.
    """

    row: dict[str, Any] | None
    samples: str = ""
    left_out: str | None = None


def read_evaluation_result(directory: Location, checkpoint_hash: str) -> EvaluationResult | None:
    """Read the evaluation of the checkpoint with this hash, or None if missing or damaged."""
    try:
        content = parse_json((directory / EVALUATION_FILE).read_bytes())
        if content.pop("checkpoint_hash") != checkpoint_hash:
            return None
        result = TypeAdapter(EvaluationResult).validate_python(content)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    is_valid = result.row is None or (is_row(result.row) and "val/loss" in result.row)
    return result if is_valid else None


def write_evaluation_result(
    directory: Location, checkpoint_hash: str, evaluated: EvaluationResult
) -> None:
    """Atomically write the evaluation of the checkpoint with this hash.

    Raises:
        FileNotFoundError: the directory was removed; it is not recreated.
    """
    content = {"checkpoint_hash": checkpoint_hash, **asdict(evaluated)}
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    if not directory.is_local:
        (directory / EVALUATION_FILE).write_text(text)
        return
    # Location.write_text would create the directory again if it was removed.
    unfinished = directory.path / f"{EVALUATION_FILE}.unfinished"
    unfinished.write_text(text, "utf-8")
    force_to_disk(unfinished)
    unfinished.replace(directory.path / EVALUATION_FILE)
