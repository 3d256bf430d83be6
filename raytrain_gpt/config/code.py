"""The user's own code: the text of one file, which travels with the configuration."""

from __future__ import annotations

import contextlib
import hashlib
import linecache
import sys
import traceback
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from raytrain_gpt.errors import ConfigError, RaytrainGptError, UserError, damage_as


@dataclass(frozen=True)
class Code:
    """A file's name and text; reading, storing and sending it never executes it.

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
    def read(cls, path: Path, may_differ: bool = False) -> Code:
        """Read a file; raises ConfigError if it is missing or not UTF-8."""
        with damage_as(ConfigError, f"code {path}"):
            return cls(path.name, path.read_bytes().decode(), may_differ)

    @property
    def _shown(self) -> str:
        """Name of the file in tracebacks."""
        return f"{self.file_name}#{self.sha256[:8]}"

    def execute(self) -> None:
        """Execute it as a module of its own.

        Raises:
            ConfigError: it is not valid, or raises an error.
        """
        name = f"raytrain_gpt_code_{self.sha256[:8]}"
        module = types.ModuleType(name)
        module.__file__ = shown = self._shown
        # Before it runs, since dataclasses, pydantic and torch's compiler look their module up by name.
        sys.modules[name] = module
        linecache.cache[shown] = (len(self.text), None, self.text.splitlines(keepends=True), shown)
        try:
            with self.errors_as_line():
                exec(compile(self.text, shown, "exec", dont_inherit=True), module.__dict__)
        except BaseException:
            del sys.modules[name]
            raise

    @contextlib.contextmanager
    def errors_as_line(self, where: str = "") -> Iterator[None]:
        """Turn an error of this code into a ConfigError with file and line after `where`."""
        try:
            yield
        except (Exception, SystemExit) as error:
            lines = [
                line
                for frame, line in traceback.walk_tb(error.__traceback__)
                if frame.f_code.co_filename.endswith(f"#{self.sha256[:8]}")  # under any name
            ]
            is_ours = isinstance(error, RaytrainGptError)
            if is_ours and not (lines and isinstance(error, UserError)):
                raise
            place = f"{where}{self.file_name}" + "".join(f", line {line}" for line in lines[-1:])
            what = str(error) if is_ours else f"{type(error).__name__}: {error}"
            raise ConfigError(" ".join(f"{place}: {what}".split())) from None
