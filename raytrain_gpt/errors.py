"""The errors of this package.

    RaytrainGptError
    ├── UserError            the user's input is wrong: one line on stderr, exit code 2
    │   ├── ConfigError          a configuration value, key or combination
    │   ├── DataError            a source, shard, manifest or tokenizer
    │   ├── CheckpointError      a checkpoint or a run's directory
    │   └── ClusterError         resources, storage or network that the run needs
    ├── StorageError         an object store stayed unreachable: exit code 1
    ├── TrainingFailed       the run failed for another reason: exit code 1
    │   └── Diverged             weights or a trial's objective are not finite: a result of a sweep
    └── Interrupted          Ctrl+C or SIGTERM, after saving: exit code 130

A message has the value, the limit and the fix, on one line.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from raytrain_gpt.redact import printable


class RaytrainGptError(Exception):
    """Base of all errors that this package raises on purpose."""

    exit_code = 1

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows: the cause's traceback, if any, and one line for the error."""
        cause = traceback.format_exception(self.__cause__) if self.__cause__ else []
        return printable(f"{''.join(cause)}{type(self).__name__}: {self}").splitlines()


class UserError(RaytrainGptError):
    """Error in the user's input."""

    exit_code = 2


class ConfigError(UserError):
    """Invalid configuration value, key or combination of values."""


class DataError(UserError):
    """Missing, damaged or mismatched source, shard, manifest or tokenizer."""


class CheckpointError(UserError):
    """Checkpoint or run directory that cannot be used as asked."""


class ClusterError(UserError):
    """Missing resources, storage or network that the run needs."""


class StorageError(RaytrainGptError):
    """Object store that was unreachable for longer than retry_for_s."""


class TrainingFailed(RaytrainGptError):
    """Failure of a run that is not an error in the user's input."""


class Diverged(TrainingFailed):
    """Weights or a trial's objective that are not finite. A sweep records this as a result."""


class Interrupted(RaytrainGptError):
    """Stop of the run by a signal, after saving a checkpoint."""

    exit_code = 130


@contextlib.contextmanager
def damage_as(kind: type[UserError], file: object, advice: str = "") -> Iterator[None]:
    """Turn errors from reading and parsing a file into one that names the file."""
    try:
        yield
    except OSError as error:
        raise kind(f"cannot read {file}: {reason(error)}{advice}") from None
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        cause = f"no {error}" if isinstance(error, KeyError) else reason(error)
        raise kind(f"{file} is damaged ({cause}){advice}") from None


@contextlib.contextmanager
def failure_as(
    kind: type[UserError], what: str, advice: str = "", *more: type[Exception]
) -> Iterator[None]:
    """Turn an OSError, or one of `more`, into an error with operation, reason and fix."""
    kinds: tuple[type[Exception], ...] = (OSError, *more)
    try:
        yield
    except kinds as error:
        raise kind(f"{what}: {reason(error)}{advice}") from None


def reason(error: Exception) -> str:
    """Return the one-line reason of an error: the system's message, else its text, else its type.

    For pydantic's errors, the first refused value.
    """
    if callable(errors := getattr(error, "errors", None)):
        first = errors()[0]
        where = "".join(f"{key}: " for key in first["loc"])
        return where + " ".join(problem([first]).split())
    text = getattr(error, "strerror", None) or str(error)
    return " ".join(text.split()) or type(error).__name__


_MUST_BE = {
    **dict.fromkeys(("bool_parsing", "bool_type"), "true or false"),
    **dict.fromkeys(
        ("dict_type", "model_attributes_type", "model_type"), "a mapping of names to values"
    ),
    **dict.fromkeys(("float_parsing", "float_type"), "a number"),
    **dict.fromkeys(
        ("int_from_float", "int_parsing", "int_parsing_size", "int_type"), "an integer"
    ),
    **dict.fromkeys(("list_type", "tuple_type"), "a list"),
    "string_type": "a string",
}
"""Type of a pydantic error -> words, where pydantic's message speaks of Python."""


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FULL_WORDS = re.compile(
    rf"{'|'.join(map(os.strerror, _FULL))}|os error ({'|'.join(map(str, _FULL))})\b", re.IGNORECASE
)


def is_full(error: BaseException) -> bool:
    """Whether a disk, a quota or a limit of file sizes is full; Rust's libraries say so only in the text."""
    return getattr(error, "errno", None) in _FULL or _FULL_WORDS.search(str(error)) is not None


def problem(errors: Iterable[Mapping[str, Any]]) -> str:
    """Describe the error of one value in plain words.

    Args:
        errors: Pydantic's errors for the value, one for each type that it may have.
    """
    problems = list(dict.fromkeys(map(_problem, errors)))
    return ", or ".join([problems[0], *(one.removeprefix("must be ") for one in problems[1:])])


def _problem(error: Mapping[str, Any]) -> str:
    if words := _MUST_BE.get(error["type"]):
        return f"must be {words}"
    text = str(error["msg"]).removeprefix("Value error, ")
    return text.replace("Input should be", "must be")
