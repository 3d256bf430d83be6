"""Unreadable documents: counted, sampled for a report, an error above a limit.

A bad document is not UTF-8, not JSON, lacks a string in its text field, or is not encoded by the tokenizer.
A damaged file is always an error.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from raytrain_gpt.errors import DataError
from raytrain_gpt.storage.location import Location

BAD_FILE = "bad_documents.jsonl"
MAX_KEPT = 100


@dataclass(frozen=True)
class _BadDocument:
    """An unreadable document, its position in its file, and the reason."""

    path: str
    place: str
    why: str

    def __str__(self) -> str:
        return f"{self.path} at {self.place}: {self.why}"


class BadDocuments:
    """Bad documents of one pass over the text; more than `limit` raise, unless it is None."""

    def __init__(self, limit: int | None = 0) -> None:
        self.limit = limit
        self.count = 0
        self.kept: list[_BadDocument] = []

    def add(self, path: Location, place: str, why: str) -> None:
        """Record a skipped document; raises a DataError above the limit."""
        self._add(1, [_BadDocument(str(path), place, " ".join(why.split()))])

    def merge(self, facts: dict[str, Any]) -> None:
        """Add the `facts` of another pass; raises a DataError if the sum is above the limit."""
        self._add(facts["count"], [_BadDocument(**bad) for bad in facts["kept"]])

    def _add(self, count: int, kept: list[_BadDocument]) -> None:
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
            f"as {example}; fix them or raise --max_bad_documents"
        )

    def facts(self) -> dict[str, Any]:
        """Return the count and the first ones, as JSON types."""
        return {"count": self.count, "kept": [asdict(bad) for bad in self.kept]}

    def report(self) -> str:
        return "".join(json.dumps(asdict(bad)) + "\n" for bad in self.kept)
