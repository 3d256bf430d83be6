"""The user's code of a checkpoint: it must not change unnoticed.

Code may act in any way when it is executed, so every change but of comments and docstrings needs
`--accept_changed_code`. A checkpoint stores the text as `code.py`. Anyone may have written that file, so it
is never executed. Only files that the user names are, after a comparison where they must be the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raytrain_gpt.checkpoint.catalog import CODE_FILE, Checkpoint
from raytrain_gpt.config.code import Code
from raytrain_gpt.config.kinds import BUILT_IN
from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import CheckpointError, ConfigError
from raytrain_gpt.format import Log, shell
from raytrain_gpt.storage.location import Location

if TYPE_CHECKING:
    from raytrain_gpt.checkpoint.collectives import Collectives

_MAX_CODE_BYTES = 2**22


def code_hash(config: Config) -> str | None:
    """Return the SHA-256 of a configuration's code, or None."""
    return config.code.sha256 if config.code else None


def check_same_code(config: Config, ranks: Collectives) -> None:
    """Compare the code of all ranks, which call it together; raises ConfigError if it differs."""
    own = ranks.all_gather_json(code_hash(config), str | None)
    if len({*own}) > 1:
        other = next(rank for rank, sha256 in enumerate(own) if sha256 != own[0])
        raise ConfigError(
            f"rank {other} has code {_short(own[other])}, rank 0 has {_short(own[0])}; give all ranks the "
            "same file as --code"
        )


def replaced_code(config: Config, resumed: Checkpoint | None) -> tuple[str, ...]:
    """Return hashes of a run's earlier code, each replaced with `--accept_changed_code`."""
    if resumed is None:
        return ()
    before, earlier = resumed.state.code_sha256, resumed.state.replaced_code
    return (*earlier, before) if before and before != code_hash(config) else earlier


def check_unchanged(checkpoint: Checkpoint, used: Code | None, log: Log) -> None:
    """Compare the code with that of a checkpoint to continue; raises CheckpointError if it may not."""
    change, may_replace = compare(checkpoint.state.code_sha256, code_of(checkpoint), used)
    if not may_replace:
        before = f"if you trust it, pass --code {shell(checkpoint.path / CODE_FILE)}"
        back = before if checkpoint.state.code_sha256 else "leave out --code"
        raise CheckpointError(
            f"{checkpoint.path} has other code ({change}); {back}, or accept the change with "
            "--accept_changed_code"
        )
    if change:
        log(f"changed since that checkpoint: {change}")


def check_executable(checkpoint: Checkpoint, used: Code | None, log: Log) -> None:
    """Check, before it is executed, the user code that builds a checkpoint's model; see `check_unchanged`."""
    if not BUILT_IN.find("architecture", _architecture(checkpoint)):
        check_unchanged(checkpoint, used, log)


def compare(sha256: str | None, before: Code | None, used: Code | None) -> tuple[str, bool]:
    """Return how code differs from that of a SHA-256, if it does, and whether it may replace that.

    It may if it acts alike, or the user accepts any. The text before is unknown if it is empty.
    """
    if sha256 == (now := used.sha256 if used else None):
        return "", True
    lines = f", {used.changed_lines(before)}" if used and before else ""
    accepted = used is not None and used.may_differ
    acts_alike = (before and before.acts) == (used and used.acts)
    return f"code {_short(sha256)} -> {_short(now)}{lines}", accepted or acts_alike


def stored_code(directory: Location) -> Code | None:
    """Return the code beside a run, a campaign or a checkpoint; empty if it is too long."""
    file = directory / CODE_FILE
    if not file.is_file():
        return None
    content = file.read_bytes() if file.size_bytes() <= _MAX_CODE_BYTES else b""
    return Code(CODE_FILE, content.decode("utf-8", "replace"))


def code_of(checkpoint: Checkpoint) -> Code | None:
    """Return a checkpoint's code; empty if it cannot be read, None if it has none."""
    if (sha256 := checkpoint.state.code_sha256) is None:
        return None
    code = stored_code(checkpoint.path)
    return code if code and code.sha256 == sha256 else Code(CODE_FILE, "")


def code_flags(checkpoint: Checkpoint | None) -> tuple[str, ...]:
    """Return the flags that a checkpoint's commands need: its code, if its architecture comes from it."""
    if checkpoint is None or BUILT_IN.find("architecture", _architecture(checkpoint)):
        return ()
    return ("--code", str(checkpoint.path / CODE_FILE))


def _architecture(checkpoint: Checkpoint) -> str:
    return str(checkpoint.state.config.get("model", {}).get("architecture", "gpt2"))


def _short(sha256: str | None) -> str:
    return sha256[:12] if sha256 else "none"
