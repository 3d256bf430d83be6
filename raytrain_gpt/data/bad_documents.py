"""Documents that cannot be read: counted, the first ones kept for a report, refused if too many.

What makes a document bad stands in the document alone: text that is not UTF-8, a line that is no JSON, a
field that is missing or holds no string. A file that is damaged as a whole is an error of its own.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from raytrain_gpt.errors import DataError
from raytrain_gpt.storage.web_files import without_query

BAD_FILE = "bad_documents.jsonl"
MAX_KEPT = 100
"""Bad documents that a report names."""


@dataclass(frozen=True)
class BadDocument:
    """Where a document is that cannot be read, and what is wrong with it."""

    path: str
    place: str
    why: str

    def __str__(self) -> str:
        return f"{self.path} at {self.place}: {self.why}"


class BadDocuments:
    """Takes the bad documents of one reading.

    Attributes:
        count: Of all of them.
        kept: The first MAX_KEPT.
    """

    def __init__(self, limit: int | None = 0) -> None:
        """Nothing is bad yet.

        Args:
            limit: One more is an error; None: any number is left out.
        """
        self.limit = limit
        self.count = 0
        self.kept: list[BadDocument] = []

    def add(self, path: str, place: str, why: str) -> None:
        """Leave a document out.

        Raises:
            DataError: these are more than the limit.
        """
        self._take(1, [BadDocument(without_query(path), place, " ".join(why.split()))])

    def merge(self, facts: dict[str, Any]) -> None:
        """Take those of another reading, as its `facts` has them.

        Raises:
            DataError: together these are more than the limit.
        """
        self._take(facts["count"], [BadDocument(**bad) for bad in facts["kept"]])

    def _take(self, count: int, kept: list[BadDocument]) -> None:
        self.count += count
        self.kept += kept[: MAX_KEPT - len(self.kept)]
        if self.limit is None or self.count <= self.limit:
            return
        example = (kept or self.kept)[0]
        if self.limit == 0:
            raise DataError(
                f"{example}; mend it, set --text_field, or leave out up to N such documents with "
                "--max_bad_documents N"
            )
        raise DataError(
            f"{self.count} documents cannot be read, more than max_bad_documents={self.limit}, such "
            f"as {example}; mend them, or set a larger --max_bad_documents"
        )

    def facts(self) -> dict[str, Any]:
        """Count and kept ones, as JSON takes them."""
        return {"count": self.count, "kept": [asdict(bad) for bad in self.kept]}

    def report(self) -> str:
        """A JSON line for each kept one."""
        return "".join(json.dumps(asdict(bad)) + "\n" for bad in self.kept)
