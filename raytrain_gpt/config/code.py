"""The user's own code: the text of one or more files, which travels with the configuration."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import linecache
import re
import sys
import traceback
import types
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from raytrain_gpt.errors import ConfigError, RaytrainGptError, UserError, damage_as

_NEXT_FILE = re.compile(r"^# raytrain-gpt: file (.+)\n", re.MULTILINE)
"""Line that precedes each file where the text holds several."""
_BESIDES = {"evaluation", "tracker"}
"""Decorators of kinds that do not affect the weights."""


@dataclass(frozen=True)
class Code:
    """Names and text of Python files, which are read, stored and sent without being executed.

    Attributes:
        may_differ: Whether a run may continue although its checkpoint has different code.
    """

    file_name: str
    text: str
    may_differ: bool = False

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the text, in hex."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @classmethod
    def read(cls, *paths: Path, may_differ: bool = False) -> Code:
        """Read files and join them; raises ConfigError if one is missing or not UTF-8."""
        texts = []
        for path in paths:
            with damage_as(ConfigError, f"code {path}"):
                texts.append(path.read_bytes().decode())
        if len(paths) > 1:
            pairs = zip(paths, texts, strict=True)
            texts = [f"# raytrain-gpt: file {path.name}\n{text}\n" for path, text in pairs]
        return cls(", ".join(path.name for path in paths), "".join(texts), may_differ)

    @property
    def files(self) -> list[tuple[str, str]]:
        """(name, text) of each file."""
        start, *others = _NEXT_FILE.split(self.text)
        first = [(self.file_name, start)] if start.strip() or not others else []
        return [*first, *zip(others[::2], others[1::2], strict=True)]

    @cached_property
    def decides(self) -> str:
        """Syntax that may affect the weights: all but evaluations, trackers and what only they use."""
        try:
            return "\n".join(filter(None, (_deciding(text) for _, text in self.files)))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return self.text

    def execute(self) -> None:
        """Execute each file as a module of its own; raises ConfigError if one is invalid or fails."""
        for number, (file_name, text) in enumerate(self.files):
            name = f"raytrain_gpt_code_{self.sha256[:8]}" + f"_{number}" * bool(number)
            module = types.ModuleType(name)
            module.__file__ = shown = f"{file_name}#{self.sha256[:8]}"
            # First, because dataclasses, pydantic and torch's compiler look up their module by name.
            sys.modules[name] = module
            linecache.cache[shown] = (len(text), None, text.splitlines(keepends=True), shown)
            try:
                with self.errors_as_line():
                    exec(compile(text, shown, "exec", dont_inherit=True), module.__dict__)
            except BaseException:
                del sys.modules[name]
                raise

    @contextlib.contextmanager
    def errors_as_line(self, where: str = "") -> Iterator[None]:
        """Turn an error in this code into a ConfigError with file and line after `where`."""
        try:
            yield
        except (Exception, SystemExit) as error:
            lines = [
                f"{frame.f_code.co_filename.rpartition('#')[0]}, line {line}"
                for frame, line in traceback.walk_tb(error.__traceback__)
                if frame.f_code.co_filename.endswith(
                    f"#{self.sha256[:8]}"
                )  # the file may have any name
            ]
            is_ours = isinstance(error, RaytrainGptError)
            if is_ours and not (lines and isinstance(error, UserError)):
                raise
            place = f"{where}{lines[-1] if lines else self.file_name}"
            what = str(error) if is_ours else f"{type(error).__name__}: {error}"
            raise ConfigError(" ".join(f"{place}: {what}".split())) from None


def _deciding(text: str) -> str:
    """Dump statements that have effects or declare weight-affecting kinds, and the definitions they use."""
    body = [one for statement in ast.parse(text).body for one in _one_by_one(statement)]
    names = [_names(one) for one in body]
    used = set[str]().union(*names)
    extend = {
        _defined(one): one.names[0].name
        for one in body
        if isinstance(one, ast.ImportFrom) and one.module == "raytrain_gpt.extend"
    }

    def acts(statement: ast.stmt) -> bool:
        if isinstance(statement, ast.Import):  # an unused import is there for its effect
            return _defined(statement) not in used
        decorators = getattr(statement, "decorator_list", [])
        besides = (
            isinstance(d, ast.Call) and extend.get(ast.unparse(d.func)) in _BESIDES
            for d in decorators
        )
        return _defined(statement) is None or not all(besides)

    definitions = defaultdict[str | None, list[int]](list)
    for number, one in enumerate(body):
        definitions[_defined(one)].append(number)
    kept, left = set[int](), [number for number, one in enumerate(body) if acts(one)]
    while left:
        kept.add(number := left.pop())
        for name in names[number]:
            left += definitions.pop(name, [])
    return "\n".join(ast.dump(body[number]) for number in sorted(kept))


def _one_by_one(statement: ast.stmt) -> list[ast.stmt]:
    """Split an import of several names; drop a docstring."""
    match statement:
        case ast.ImportFrom(module, names, level):
            return [ast.ImportFrom(module, [one], level) for one in names]
        case ast.Import(names):
            return [ast.Import([one]) for one in names]
        case ast.Expr(ast.Constant()):
            return []
    return [statement]


def _defined(statement: ast.stmt) -> str | None:
    """Return the name if a statement only defines one, or None if it may do more."""
    match statement:
        case ast.FunctionDef(name) | ast.ClassDef(name=name):
            return name
        case ast.Import([one]) | ast.ImportFrom(_, [one]):
            return (one.asname or one.name).partition(".")[0].replace("*", "") or None
        case ast.Assign([ast.Name(name)], value) if not any(
            isinstance(one, ast.Call) for one in ast.walk(value)
        ):
            return name
    return None


def _names(statement: ast.stmt) -> set[str]:
    return {one.id for one in ast.walk(statement) if isinstance(one, ast.Name)}
