"""The user's code of a checkpoint: it must not change unnoticed.

Code may act in any way when it is executed, so every change but of comments and docstrings needs
`--accept_changed_code`. A checkpoint stores the text as `code.py`. Anyone may have written that file, so it
is never executed. Only files that the user names are, after a comparison where they must be the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raytrain_gpt.checkpoint.catalog import CODE_FILE, Checkpoint
from raytrain_gpt.config import kinds
from raytrain_gpt.config.code import Code
from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import CheckpointError, ConfigError
from raytrain_gpt.format import Log, shell

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
    before, state = resumed.state.code_sha256, resumed.state
    changed = before is not None and before != code_hash(config)
    return (*state.replaced_code, before) if changed and before else state.replaced_code


def check_unchanged(checkpoint: Checkpoint, used: Code | None, log: Log) -> None:
    """Compare the code with that of a checkpoint to continue; raises CheckpointError if it may not."""
    if not (change := change_of_code(checkpoint, used)):
        return
    if not may_replace(_stored(checkpoint), used):
        before = f"if you trust it, pass --code {shell(checkpoint.path / CODE_FILE)}"
        back = before if checkpoint.state.code_sha256 else "leave out --code"
        raise CheckpointError(
            f"{checkpoint.path} has other code ({change}); {back}, or accept the change with "
            "--accept_changed_code"
        )
    log(f"changed since that checkpoint: {change}")


def check_executable(checkpoint: Checkpoint, log: Log) -> None:
    """Check, before it is executed, the user code that builds a checkpoint's model; see `check_unchanged`."""
    if not kinds.is_built_in("architecture", _architecture(checkpoint)):
        check_unchanged(checkpoint, kinds.used_code(), log)


def change_of_code(checkpoint: Checkpoint, used: Code | None) -> str:
    """Describe a difference from a checkpoint's code; empty if there is none."""
    before = checkpoint.state.code_sha256
    if before == (used.sha256 if used else None):
        return ""
    return describe_change(before, _stored(checkpoint), used)


def describe_change(sha256: str | None, before: Code | None, used: Code | None) -> str:
    """Describe how code differs from that of a SHA-256, whose text is unknown if `before` is empty."""
    lines = f", {used.changed_lines(before)}" if used and before else ""
    return f"code {_short(sha256)} -> {_short(used.sha256 if used else None)}{lines}"


def may_replace(before: Code | None, used: Code | None) -> bool:
    """Whether code acts like the code before it, or the user accepts any."""
    accepted = used is not None and used.may_differ
    return accepted or (before and before.acts) == (used and used.acts)


def _stored(checkpoint: Checkpoint) -> Code | None:
    """Return a checkpoint's code; empty if it cannot be read, None if it has none."""
    if checkpoint.state.code_sha256 is None:
        return None
    file, text = checkpoint.path / CODE_FILE, ""
    if CODE_FILE in checkpoint.file_names and file.size_bytes() <= _MAX_CODE_BYTES:
        text = file.read_bytes().decode("utf-8", "replace")
    stored = Code(CODE_FILE, text)
    return stored if stored.sha256 == checkpoint.state.code_sha256 else Code(CODE_FILE, "")


def code_flags(checkpoint: Checkpoint | None) -> tuple[str, ...]:
    """Return the flags that a checkpoint's commands need: its code, if its architecture comes from it."""
    if checkpoint is None or kinds.is_built_in("architecture", _architecture(checkpoint)):
        return ()
    return ("--code", str(checkpoint.path / CODE_FILE))


def _architecture(checkpoint: Checkpoint) -> str:
    return str(checkpoint.state.config.get("model", {}).get("architecture", "gpt2"))


def _short(sha256: str | None) -> str:
    return sha256[:12] if sha256 else "none"
