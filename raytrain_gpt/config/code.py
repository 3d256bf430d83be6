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
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import unified_diff
from functools import cached_property
from pathlib import Path

from raytrain_gpt.errors import ConfigError, RaytrainGptError, UserError, damage_as
from raytrain_gpt.format import count, preview

_NEXT_FILE = re.compile(r"^# raytrain-gpt: file (.+)\n", re.MULTILINE)
"""Line that precedes each file where the text holds several."""


@dataclass(frozen=True)
class Code:
    """Names and text of Python files, which are read, stored and sent without being executed.

    Attributes:
        may_differ: Whether a run may continue although its checkpoint has different code, even without any.
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
    def acts(self) -> str:
        """All of the text that may have an effect: no comments, blank lines and docstrings."""
        try:
            return "\n".join(
                ast.dump(_WithoutStrings().visit(ast.parse(text))) for _, text in self.files
            )
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return self.text

    def __bool__(self) -> bool:
        return bool(self.text)

    def changed_lines(self, before: Code) -> str:
        """Describe the lines that differ from other code: `2 lines added, 1 removed, first "+import os"`."""
        texts = before.text.splitlines(), self.text.splitlines()
        lines = [one for one in [*unified_diff(*texts, n=0, lineterm="")][3:] if one[:2] != "@@"]
        added = sum(one.startswith("+") for one in lines)
        first = preview("".join(lines[:1]), 60)
        return f"{count(added, 'line')} added, {len(lines) - added} removed, first {first}"

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
            ours = f"#{self.sha256[:8]}"  # the file may have any name
            lines = [
                f"{frame.f_code.co_filename.removesuffix(ours)}, line {line}"
                for frame, line in traceback.walk_tb(error.__traceback__)
                if frame.f_code.co_filename.endswith(ours)
            ]
            is_ours = isinstance(error, RaytrainGptError)
            if is_ours and not (lines and isinstance(error, UserError)):
                raise
            place = f"{where}{lines[-1] if lines else self.file_name}"
            what = str(error) if is_ours else f"{type(error).__name__}: {error}"
            raise ConfigError(" ".join(f"{place}: {what}".split())) from None


class _WithoutStrings(ast.NodeTransformer):
    """Remove strings that are statements, such as docstrings."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        is_string = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_string else node
