"""All errors of this package, as one tree.

    RaytrainGptError
    ├── UserError            the user's input is wrong: one line on stderr, exit code 2
    │   ├── ConfigError          a configuration value, key or combination
    │   ├── DataError            a source, shard, manifest or tokenizer
    │   ├── CheckpointError      a checkpoint or a run's directory
    │   └── ClusterError         resources, storage or network that the run needs
    ├── StorageError         an object store stayed out of reach: exit code 1
    ├── TrainingFailed       the run failed for another reason: exit code 1
    │   └── Diverged             an objective that is not finite, which is a trial's result
    └── Interrupted          Ctrl+C or SIGTERM, after saving: exit code 130

A message has the value, the limit and the way out, on one line.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from raytrain_gpt.redact import printable


class RaytrainGptError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code = 1

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: one line as on the command line, and the traceback of the cause if any."""
        cause = traceback.format_exception(self.__cause__) if self.__cause__ else []
        return printable(f"{''.join(cause)}{type(self).__name__}: {self}").splitlines()


class UserError(RaytrainGptError):
    """The input is wrong and the user can fix it."""

    exit_code = 2


class ConfigError(UserError):
    """A configuration value, key or combination of values is not possible."""


class DataError(UserError):
    """A source, shard, manifest or tokenizer is missing, damaged or does not match."""


class CheckpointError(UserError):
    """A checkpoint or a run's directory cannot be used as asked."""


class ClusterError(UserError):
    """The cluster lacks resources, storage or network that the run needs."""


class StorageError(RaytrainGptError):
    """An object store stayed out of reach for longer than retry_for_s."""


class TrainingFailed(RaytrainGptError):
    """The run ended with an error that is not the user's input."""


class Diverged(TrainingFailed):
    """A trial's objective is not finite: a result of the sweep, not a failure of it."""


class Interrupted(RaytrainGptError):
    """The run was stopped by a signal, after saving a checkpoint."""

    exit_code = 130


@contextlib.contextmanager
def damage_as(kind: type[UserError], file: object, advice: str = "") -> Iterator[None]:
    """Inside, whatever goes wrong while a file is read and interpreted is an error that names the file."""
    try:
        yield
    except OSError as error:
        raise kind(f"cannot read {file}: {reason(error)}{advice}") from None
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        kept = f"no {error}" if isinstance(error, KeyError) else reason(error)
        raise kind(f"{file} is damaged ({kept}){advice}") from None


@contextlib.contextmanager
def failure_as(
    kind: type[UserError], what: str, advice: str = "", *more: type[Exception]
) -> Iterator[None]:
    """Inside, an OSError, or one of `more`, is an error that says what failed, why, and the way out."""
    kinds: tuple[type[Exception], ...] = (OSError, *more)
    try:
        yield
    except kinds as error:
        raise kind(f"{what}: {reason(error)}{advice}") from None


def reason(error: Exception) -> str:
    """Why something failed, on one line: the system's words, else the message, else the error's type.

    Of several values that pydantic refuses, the first one.
    """
    if callable(refused := getattr(error, "errors", None)):
        first = refused()[0]
        where = "".join(f"{part}: " for part in first["loc"])
        return where + " ".join(problem([first]).split())
    said = getattr(error, "strerror", None) or str(error)
    return " ".join(said.split()) or type(error).__name__


_MUST_BE = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "a mapping of names to values",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "int_parsing_size": "an integer of fewer digits",
    "int_type": "an integer",
    "list_type": "a list",
    "model_attributes_type": "a mapping of names to values",
    "model_type": "a mapping of names to values",
    "path_type": "a path",
    "string_too_long": "at most {max_length} characters long",
    "string_type": "a string",
    "string_unicode": "a string that UTF-8 can encode",
    "too_short": "a list of {min_length} or more",
    "tuple_type": "a list",
    "union_tag_invalid": "a mapping whose {discriminator} is one of {expected_tags}",
    "union_tag_not_found": "a mapping with the key {discriminator}",
}
"""Type of a pydantic error -> words that its context completes, where pydantic's are about Python."""


def problem(errors: Iterable[Mapping[str, Any]]) -> str:
    """State what is wrong with one value, in plain words.

    Args:
        errors: Pydantic's errors for the value, one for each type that it may have.
    """
    said = list(dict.fromkeys(map(_problem, errors)))
    return ", or ".join([said[0], *(one.removeprefix("must be ") for one in said[1:])])


def _problem(error: Mapping[str, Any]) -> str:
    if words := _MUST_BE.get(error["type"]):
        return f"must be {words.format(**error.get('ctx', {}))}"
    said = str(error["msg"]).removeprefix("Value error, ")
    return said.replace("Input should be", "must be")
