"""One finding of the doctor: a line with a name, what was seen and, if it is wrong, what to do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, ParamSpec

from raytrain_gpt.errors import RaytrainGptError

P = ParamSpec("P")


@dataclass(frozen=True)
class Check:
    """What was found about one thing.

    Attributes:
        status: PASS; FAIL: a run would stop, hang, be wrong, slow or open to others; SKIP: not looked at.
        text: What was seen; for FAIL also what to do; for SKIP why.
    """

    name: str
    status: Literal["PASS", "FAIL", "SKIP"]
    text: str

    @property
    def line(self) -> str:
        """As it is printed."""
        return f"{self.status} {self.name}: {' '.join(self.text.split())}"


class Failed(RaytrainGptError):
    """What is wrong, and what to do."""


class Skipped(RaytrainGptError):
    """Why something was not looked at."""


def named_check(name: str) -> Callable[[Callable[P, str]], Callable[P, Check]]:
    """Make a function that returns what it saw return a `Check`.

    An error that this package raises on purpose fails the check with its text: so the checks that a run
    makes before it starts are the doctor's, too. `Skipped` skips it.
    """

    def decorate(look: Callable[P, str]) -> Callable[P, Check]:
        @functools.wraps(look)
        def found(*args: P.args, **kwargs: P.kwargs) -> Check:
            try:
                return Check(name, "PASS", look(*args, **kwargs))
            except Skipped as why:
                return Check(name, "SKIP", str(why))
            except RaytrainGptError as error:
                return Check(name, "FAIL", str(error))

        return found

    return decorate
