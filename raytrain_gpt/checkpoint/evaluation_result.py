"""The result of an async evaluation: a file in the checkpoint's directory.

`evaluation.json` is written after the checkpoint is complete, so it is not among its hashes; instead it
holds the hash of the checkpoint that it belongs to. One left by another checkpoint of the same step, as
an object store may keep it after a rollback, is ignored.
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
    """The evaluation of a checkpoint, or why there is none.

    Attributes:
        row: Its row of metrics.jsonl; None: the evaluation was given up.
        samples: A line for each sample; empty: none were drawn.
        left_out: Why it was given up; None: it was not.
    """

    row: dict[str, Any] | None
    samples: str = ""
    left_out: str | None = None


def read_evaluation_result(directory: Location, checkpoint_hash: str) -> EvaluationResult | None:
    """The evaluation of the checkpoint with this hash; None where there is none or it is damaged."""
    try:
        content = parse_json((directory / EVALUATION_FILE).read_bytes())
        if content.pop("checkpoint_hash") != checkpoint_hash:
            return None
        found = TypeAdapter(EvaluationResult).validate_python(content)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    is_sound = found.row is None or (is_row(found.row) and "val/loss" in found.row)
    return found if is_sound else None


def write_evaluation_result(
    directory: Location, checkpoint_hash: str, evaluated: EvaluationResult
) -> None:
    """Put the evaluation of the checkpoint with this hash beside its files, whole or not at all.

    Raises:
        FileNotFoundError: the directory was removed; it is not made again.
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
