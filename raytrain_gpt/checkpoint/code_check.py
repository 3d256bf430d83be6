"""The user's code of a checkpoint: what affects the weights must not change unnoticed.

A checkpoint stores the text as `code.py`. Anyone may have written that file, so it is never executed.
Only files that the user names are executed, after a comparison where they must be the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raytrain_gpt.checkpoint.catalog import CODE_FILE, Checkpoint
from raytrain_gpt.config import kinds
from raytrain_gpt.config.code import Code
from raytrain_gpt.config.schema import Config, parse_config
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


def check_unchanged(config: Config, checkpoint: Checkpoint, log: Log) -> None:
    """Compare the code with that of a checkpoint to continue.

    Raises:
        CheckpointError: it differs, and a kind that affects the weights comes from it.
    """
    if not (change := change_of_code(checkpoint, config.code)):
        return
    trained = parse_config(checkpoint.state.config, str(checkpoint.path))
    own = [f"{selector} {name}" for one in (trained, config) for selector, name in _own_math(one)]
    if own and not _decides_alike(checkpoint, config.code):
        raise CheckpointError(
            f"{checkpoint.path} cannot continue with changed code {change}, as {own[0]} comes from it; pass "
            f"--code {shell(checkpoint.path / CODE_FILE)}, or accept the change with --accept_changed_code"
        )
    log(f"changed since that checkpoint: code {change}")


def change_of_code(checkpoint: Checkpoint, used: Code | None) -> str:
    """Describe a difference from a checkpoint's code; empty if there is none."""
    before, now = checkpoint.state.code_sha256, used.sha256 if used else None
    return "" if before == now else f"{_short(before)} -> {_short(now)}"


def _decides_alike(checkpoint: Checkpoint, used: Code | None) -> bool:
    """Whether the user accepts any code, or the checkpoint's differs only in what never affects weights."""
    if used is None or used.may_differ:
        return used is not None
    file = checkpoint.path / CODE_FILE
    if CODE_FILE not in checkpoint.file_names or file.size_bytes() > _MAX_CODE_BYTES:
        return False
    stored = Code(CODE_FILE, file.read_bytes().decode("utf-8", "replace"))
    return stored.sha256 == checkpoint.state.code_sha256 and stored.decides == used.decides


def _own_math(config: Config) -> list[tuple[kinds.Selector, str]]:
    """Return the kinds that affect the weights and are not built in."""
    return [
        (selector, name)
        for section in config.open_sections()
        for selector, name in section.chosen_names()
        if selector in kinds.DECIDES_WEIGHTS and not kinds.is_built_in(selector, name)
    ]


def check_executable(checkpoint: Checkpoint, log: Log) -> None:
    """Check that the user code may build a checkpoint's model, before it is executed.

    Raises:
        CheckpointError: the architecture is not built in, and no code or other code was given.
    """
    name, used = _architecture(checkpoint), kinds.used_code()
    change = change_of_code(checkpoint, used)
    if kinds.is_built_in("architecture", name) or not change:
        return
    if _decides_alike(checkpoint, used):
        log(f"changed since that checkpoint: code {change}")
        return
    stored = _short(checkpoint.state.code_sha256)
    given = f", not {_short(used.sha256)} of {used.file_name}" if used else ""
    accept = ", or accept yours with --accept_changed_code" if used else ""
    raise CheckpointError(
        f"{checkpoint.path} has architecture {name} from code {stored}{given}; if you trust it, pass "
        f"--code {shell(checkpoint.path / CODE_FILE)}{accept}"
    )


def code_flags(checkpoint: Checkpoint | None) -> tuple[str, ...]:
    """Return the flags that a checkpoint's commands need: its code, if its architecture comes from it."""
    if checkpoint is None or kinds.is_built_in("architecture", _architecture(checkpoint)):
        return ()
    return ("--code", str(checkpoint.path / CODE_FILE))


def _architecture(checkpoint: Checkpoint) -> str:
    return str(checkpoint.state.config.get("model", {}).get("architecture", "gpt2"))


def _short(sha256: str | None) -> str:
    return sha256[:12] if sha256 else "none"
