"""Why something failed, as messages say it."""

from __future__ import annotations

import pytest

from raytrain_gpt.errors import reason


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
