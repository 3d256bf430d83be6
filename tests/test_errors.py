"""Reasons of failures in error messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_gpt.errors import DataError, damage_as, reason
from tests.conftest import raises_line


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError(2, "No such file", "a.txt"), "No such file"),
        (OSError("AWS Error\n  on several lines"), "AWS Error on several lines"),
        (ValueError(" damaged\tpage "), "damaged page"),
        (TimeoutError(), "TimeoutError"),
    ],
    ids=repr,
)
def test_a_reason_is_one_line_and_never_empty(error: Exception, said: str) -> None:
    assert reason(error) == said


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError(2, "No such file"), "cannot read a.json: No such file; make it anew"),
        (KeyError("step"), "a.json is damaged (no 'step'); make it anew"),
        (ValueError("not JSON"), "a.json is damaged (not JSON); make it anew"),
        (OverflowError("too large"), "a.json is damaged (too large); make it anew"),
    ],
    ids=repr,
)
def test_whatever_is_wrong_with_a_file_names_it(error: Exception, said: str) -> None:
    with raises_line(DataError, said), damage_as(DataError, Path("a.json"), "; make it anew"):
        raise error
