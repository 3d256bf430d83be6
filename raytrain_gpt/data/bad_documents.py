"""Documents that cannot be read: counted, the first ones kept for a report, an error if too many.

A document is bad by itself: text that is not UTF-8, a line that is not JSON, a field that is missing or
not a string. A file that is damaged as a whole is always an error.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from raytrain_gpt.errors import DataError
from raytrain_gpt.storage.location import Location

BAD_FILE = "bad_documents.jsonl"
MAX_KEPT = 100
"""Bad documents that are listed in the report."""


@dataclass(frozen=True)
class BadDocument:
    """A document that cannot be read, where it is in its file (a byte or row), and why."""

    path: str
    place: str
    why: str

    def __str__(self) -> str:
        return f"{self.path} at {self.place}: {self.why}"


class BadDocuments:
    """Collects the bad documents of a pass over the text; more than `limit` are an error, None: no limit."""

    def __init__(self, limit: int | None = 0) -> None:
        self.limit = limit
        self.count = 0
        self.kept: list[BadDocument] = []

    def add(self, path: Location, place: str, why: str) -> None:
        """Record a document that is left out.

        Raises:
            DataError: there are more than the limit.
        """
        self._add(1, [BadDocument(str(path), place, " ".join(why.split()))])

    def merge(self, facts: dict[str, Any]) -> None:
        """Add the `facts` of another pass.

        Raises:
            DataError: together there are more than the limit.
        """
        self._add(facts["count"], [BadDocument(**bad) for bad in facts["kept"]])

    def _add(self, count: int, kept: list[BadDocument]) -> None:
        self.count += count
        self.kept += kept[: MAX_KEPT - len(self.kept)]
        if self.limit is None or self.count <= self.limit:
            return
        example = (kept or self.kept)[0]
        if self.limit == 0:
            raise DataError(
                f"{example}; fix it, set --text_field, or skip up to N such documents with "
                "--max_bad_documents N"
            )
        raise DataError(
            f"{self.count} documents cannot be read, more than max_bad_documents={self.limit}, such "
            f"as {example}; fix them, or set a larger --max_bad_documents"
        )

    def facts(self) -> dict[str, Any]:
        """The count and the first ones, in types that JSON has."""
        return {"count": self.count, "kept": [asdict(bad) for bad in self.kept]}

    def report(self) -> str:
        """A JSON line for each of the first ones."""
        return "".join(json.dumps(asdict(bad)) + "\n" for bad in self.kept)
