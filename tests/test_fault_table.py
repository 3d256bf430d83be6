"""The documented fault table matches the markers of the tests."""

from __future__ import annotations

from .fault_table import TESTS, fault_table


def test_the_page_has_the_current_table() -> None:
    page = TESTS.parent / "docs" / "notebook" / "faults.md"
    assert page.read_text("utf-8").endswith("\n\n" + fault_table()), (
        "update it: python -m tests.fault_table"
    )
