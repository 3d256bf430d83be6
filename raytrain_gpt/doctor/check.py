"""One result of the doctor: name, status and text, with the fix if it failed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from raytrain_gpt.errors import RaytrainGptError


@dataclass(frozen=True)
class Check:
    """Result of one check.

    Attributes:
        status: PASS; FAIL if a run would stop, hang, be wrong, slow or open to others; SKIP if not checked.
        text: Observation; with FAIL also the fix, with SKIP the reason.
    """

    name: str
    status: Literal["PASS", "FAIL", "SKIP"]
    text: str

    @property
    def line(self) -> str:
        return f"{self.status} {self.name}: {' '.join(self.text.split())}"


class Failed(RaytrainGptError):
    """A failed check; the message has the problem and the fix."""


class Skipped(RaytrainGptError):
    """A skipped check; the message has the reason."""


def checked(name: str, judge: Callable[[], str]) -> Check:
    """Make a check of a function that returns its text.

    `Skipped` skips the check and every other error of this package fails it, so the doctor can reuse the
    preflight checks of a run.
    """
    try:
        return Check(name, "PASS", judge())
    except Skipped as why:
        return Check(name, "SKIP", str(why))
    except RaytrainGptError as error:
        return Check(name, "FAIL", str(error))
