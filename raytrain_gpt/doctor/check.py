"""One finding of the doctor: a line with a name, what was seen and, where it is wrong, what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["PASS", "FAIL", "SKIP"]


@dataclass(frozen=True)
class Check:
    """How one thing was found.

    Attributes:
        name: Of the thing.
        status: PASS; FAIL: a run would stop, hang, be wrong, slow or open to others; SKIP: not looked at.
        text: What was seen; of FAIL also what to do; of SKIP why.
    """

    name: str
    status: Status
    text: str

    @property
    def line(self) -> str:
        """As it is printed."""
        return f"{self.status} {self.name}: {' '.join(self.text.split())}"


def passed(name: str, seen: str) -> Check:
    """It is as it must be."""
    return Check(name, "PASS", seen)


def failed(name: str, wrong: str) -> Check:
    """It is not, and what to do."""
    return Check(name, "FAIL", wrong)


def skipped(name: str, why: str) -> Check:
    """It was not looked at."""
    return Check(name, "SKIP", why)
