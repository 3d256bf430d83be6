"""Setting names of nanoGPT and of transformers' Trainer are mapped to field names here."""

from __future__ import annotations

import re
from pathlib import Path

import raytrain_gpt
from raytrain_gpt.config.schema import FIELDS
from raytrain_gpt.config.wording import THEIR_NAMES, suggestion

PAGE = Path(raytrain_gpt.__file__).parents[1] / "docs" / "configuration.md"
NO_FLAGS = {"GPT2Config", "run_clm", "import", "py"}


def names(cells: str) -> set[str]:
    """Return the identifiers in backticks, without assigned values."""
    code = [text.partition("=")[0] for text in re.findall(r"`([^`]*)`", cells)]
    return {name for text in code for name in re.findall(r"\w+", text)} - NO_FLAGS


def rows() -> list[tuple[set[str], set[str]]]:
    """Return (their names, ours) of every row of the page's table."""
    _, _, table = PAGE.read_text("utf-8").partition("| nanoGPT |")
    lines = table.partition("\n\n")[0].splitlines()[2:]
    cells = [line.strip("|").rsplit("|", 1) for line in lines]
    return [(names(theirs), names(ours)) for theirs, ours in cells]


def test_every_name_of_the_pages_table_is_one_here_or_leads_to_one() -> None:
    assert len(rows()) > 10
    for theirs, ours in rows():
        for name in theirs - FIELDS.keys():
            found = set(THEIR_NAMES[name].split())
            assert found <= (ours or {"run_name"}), name  # no field: run the same command again


def test_every_name_leads_to_a_field() -> None:
    for name, ours in THEIR_NAMES.items():
        assert name not in FIELDS
        assert FIELDS.keys() >= {*ours.split()}
        assert suggestion(name, FIELDS) == f"; did you mean {' and '.join(ours.split())}?"
