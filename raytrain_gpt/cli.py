"""The command line: `raytrain-gpt COMMAND …`.

Every configuration field is a flag of the same name. A user error is one line on stderr with exit code 2;
Ctrl+C and SIGTERM exit with 130, all other failures with 1. Commands import their modules when they run,
so that help and error messages are immediate.
"""

from __future__ import annotations

import argparse
import atexit
import errno
import os
import re
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from raytrain_gpt.errors import Interrupted, RaytrainGptError, UserError, reason
from raytrain_gpt.redact import printable, redacted_output, show
from raytrain_gpt.version import VERSION

if TYPE_CHECKING:
    from raytrain_gpt.config.kinds import Registry

_NO_USABLE_PATH = {
    errno.EACCES, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EPERM, errno.EROFS
}  # fmt: skip
"""Errors blamed on a user's path wherever they occur; a missing file (ENOENT) may be our bug."""

LEAVE_AFTER_S = 10.0
"""Seconds that a finished command waits for threads of the user's code."""

CODE_DECLARES_FLAGS = ("estimate", "train", "tune", "scale", "doctor")
CODE_OF_CHECKPOINT = ("eval", "sample", "export")
"""Commands with `--code`; these compare the code with the checkpoint's before executing it, except
`eval --evaluations`, whose flags the code declares."""


class _Parser(argparse.ArgumentParser):
    """Parser with one-line errors that suggest the nearest name."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see: {self.prog} --help")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            from raytrain_gpt.config.wording import suggestion

            name, choices = str(action.metavar).lower(), list(action.choices)
            raise UserError(
                f"unknown {name} {value}{suggestion(value, choices)} (available: {', '.join(choices)})"
            )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            from raytrain_gpt.config.wording import suggestion

            flag = unknown[0].split("=")[0]
            flags = [f.lstrip("-") for action in self._actions for f in action.option_strings]
            hint = suggestion(flag.lstrip("-"), flags) if flag.startswith("--") else ""
            raise UserError(
                f"unknown argument {flag} of {self.prog}{hint or f'; see: {self.prog} --help'}"
            )
        return parsed, unknown


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code; without `argv`, the process does nothing else."""
    if argv is None and sys.flags.optimize > 1:  # Ray and our help need docstrings, also in workers
        os.environ["PYTHONOPTIMIZE"] = "1"
        os.execv(sys.executable, [sys.executable, *(a for a in sys.orig_argv[1:] if a != "-OO")])
    while argv is None and os.open(os.devnull, os.O_RDWR) <= 2:
        pass  # a closed stream's number would go to a file of ours, and libraries' output with it
    try:
        with redacted_output():
            _run(argv)
    except SystemExit as end:
        if argv is None:
            _leave_soon(end.code if isinstance(end.code, int) else 1)
        raise


def _run(argv: Sequence[str] | None) -> NoReturn:
    try:
        arguments = _underscored(sys.argv[1:] if argv is None else argv)
        args = _parser(_registry(arguments)).parse_args(arguments)
        args.command(args)
    except RaytrainGptError as error:
        kind = "error: " if error.exit_code != Interrupted.exit_code else ""
        if error.__cause__ is not None:
            _complain("".join(traceback.format_exception(error.__cause__)).rstrip())
        _complain(f"{kind}{' '.join(map(str.strip, str(error).splitlines()))}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        _complain("interrupted")
        sys.exit(130)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _NO_USABLE_PATH:
            what = f"{error.filename or 'a path'}: {reason(error)}"
            _complain(f"error: cannot use {what}; give access to it, or use another path")
            sys.exit(UserError.exit_code)
        _complain(traceback.format_exc().rstrip())
        sys.exit(1)
    sys.exit(0)


def _leave_soon(code: int) -> None:
    """Exit after LEAVE_AFTER_S at most, although Python would wait for threads without limit."""

    def leave() -> None:
        waits = [one for one in threading.enumerate() if not one.daemon]
        names = ", ".join(one.name for one in waits if one is not threading.main_thread())
        _complain(f"exited while {names} still ran; end your threads, or start with daemon=True")
        atexit._run_exitfuncs()
        os._exit(code)

    timer = threading.Timer(LEAVE_AFTER_S, leave)
    timer.daemon = True
    timer.start()
    atexit.register(timer.cancel)  # called before functions registered earlier


def _complain(text: str) -> None:
    show(sys.stderr, f"{printable(text)}\n")


def _underscored(argv: Sequence[str]) -> list[str]:
    """Write all flags with underscores, up to `--`; what follows belongs to another program."""
    stop = argv.index("--") if "--" in argv else len(argv)
    flags = [
        re.sub(r"(?<=^--)[^=]+", lambda name: name[0].replace("-", "_"), argument)
        for argument in argv[:stop]
    ]
    return [*flags, *argv[stop:]]


def _registry(argv: Sequence[str]) -> Registry:
    """Read the file of `--code` before flags are parsed, as it declares more; may raise ConfigError."""
    from raytrain_gpt.config.kinds import BUILT_IN, Registry

    if not argv or argv[0] not in (*CODE_DECLARES_FLAGS, *CODE_OF_CHECKPOINT):
        return BUILT_IN
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--code", nargs="?", action="append", default=[])
    parser.add_argument("--evaluations", nargs="?")
    parser.add_argument("--accept_changed_code", action="store_true")
    try:
        given, _ = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UserError(f"{error}") from None
    if None in given.code or not (given.code or given.accept_changed_code):
        return BUILT_IN
    from raytrain_gpt.data.locations import read_code  # slow to import

    registry = Registry(read_code(given.code, given.accept_changed_code))
    if argv[0] in CODE_DECLARES_FLAGS or given.evaluations is not None:
        registry.user_kinds()
    return registry


def _parser(registry: Registry) -> argparse.ArgumentParser:
    from raytrain_gpt.commands import cluster, data, inference, train  # imports for half a second

    parser = _Parser(
        prog="raytrain-gpt",
        allow_abbrev=False,
        description="Pretrain GPT-2-class language models on Ray: from text to a trained model.",
    )
    parser.add_argument("--version", action="version", version=f"raytrain-gpt {VERSION}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (
        data.prepare, data.data, train.estimate, train.train, train.tune, train.scale, train.runs,
        inference.evaluate, inference.sample, inference.export, inference.import_,
        cluster.doctor, cluster.node,
    ):  # fmt: skip
        command.add_parser(commands, registry)
    return parser


if __name__ == "__main__":
    main()
