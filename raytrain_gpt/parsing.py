"""Parsing of JSON files, which may be damaged or malicious, and of the user's YAML."""

from __future__ import annotations

import json
from typing import Any

import yaml


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; raises ValueError if it is invalid or nests too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def parse_yaml(text: str) -> Any:
    """Parse YAML with PyYAML's safe loader; raises a ValueError of one line if it is invalid."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, ArithmeticError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from None
