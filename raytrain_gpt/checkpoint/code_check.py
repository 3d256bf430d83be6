"""The user's code of a checkpoint: it decides the weights, so it must not change unnoticed.

A checkpoint stores the text as `code.py`. Anyone may have written that file, so it is never executed
from there. Only the file that a user names is; where it must be the same, their hashes are compared first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raytrain_gpt.checkpoint.catalog import CODE_FILE, Checkpoint
from raytrain_gpt.config import kinds
from raytrain_gpt.config.schema import Config, parse_config
from raytrain_gpt.errors import CheckpointError, ConfigError
from raytrain_gpt.format import Log, shell

if TYPE_CHECKING:
    from raytrain_gpt.checkpoint.collectives import Collectives


def code_hash(config: Config) -> str | None:
    """SHA-256 of a configuration's code, or None."""
    return config.code.sha256 if config.code else None


def check_same_code(config: Config, ranks: Collectives) -> None:
    """Compare the code of all ranks, which call it together; those of `torchrun` each read a file.

    Raises:
        ConfigError: they differ.
    """
    own = ranks.all_gather_json(code_hash(config), str | None)
    if len({*own}) > 1:
        other = next(rank for rank, sha256 in enumerate(own) if sha256 != own[0])
        raise ConfigError(
            f"rank {other} has code {_short(own[other])}, rank 0 has {_short(own[0])}; give all of them the "
            "same file as --code"
        )


def replaced_code(config: Config, resumed: Checkpoint | None) -> tuple[str, ...]:
    """Hashes of the code that a run had before, each replaced with `--accept_changed_code`."""
    if resumed is None:
        return ()
    before, state = resumed.state.code_sha256, resumed.state
    changed = before is not None and before != code_hash(config)
    return (*state.replaced_code, before) if changed and before else state.replaced_code


def check_unchanged(config: Config, checkpoint: Checkpoint, log: Log) -> None:
    """Compare the code with that of a checkpoint to continue.

    Raises:
        CheckpointError: it differs, and a kind that decides the weights comes from it.
    """
    before, now = checkpoint.state.code_sha256, code_hash(config)
    if before == now:
        return
    change = f"{_short(before)} -> {_short(now)}"
    trained = parse_config(checkpoint.state.config, str(checkpoint.path))
    own = [f"{selector} {name}" for one in (trained, config) for selector, name in _own_math(one)]
    if own and not (config.code and config.code.may_differ):
        raise CheckpointError(
            f"{checkpoint.path} cannot continue with changed code {change}, as {own[0]} comes from it; pass "
            f"--code {shell(checkpoint.path / CODE_FILE)}, or accept the change with --accept_changed_code"
        )
    log(f"changed since that checkpoint: code {change}")


def _own_math(config: Config) -> list[tuple[kinds.Selector, str]]:
    """Kinds that decide the weights and are not built in."""
    return [
        (selector, name)
        for section in config.open_sections()
        for selector, name in section.chosen_names()
        if selector in kinds.DECIDES_WEIGHTS and not kinds.is_built_in(selector, name)
    ]


def check_executable(checkpoint: Checkpoint) -> None:
    """Check that the used code may build a checkpoint's model, before it is executed.

    Raises:
        CheckpointError: the architecture is not built in, and no code or a different one was given.
    """
    name = _architecture(checkpoint)
    used, stored = kinds.used_code(), checkpoint.state.code_sha256
    if kinds.is_built_in("architecture", name) or (used and used.sha256 == stored):
        return
    given = f", not {_short(used.sha256)} of {used.file_name}" if used else ""
    raise CheckpointError(
        f"{checkpoint.path} has architecture {name} from code {_short(stored)}{given}; if you trust it, pass "
        f"--code {shell(checkpoint.path / CODE_FILE)}"
    )


def code_flags(checkpoint: Checkpoint | None) -> tuple[str, ...]:
    """Flags that commands on a checkpoint need: its code, if its architecture comes from it."""
    if checkpoint is None or kinds.is_built_in("architecture", _architecture(checkpoint)):
        return ()
    return ("--code", str(checkpoint.path / CODE_FILE))


def _architecture(checkpoint: Checkpoint) -> str:
    return str(checkpoint.state.config.get("model", {}).get("architecture", "gpt2"))


def _short(sha256: str | None) -> str:
    return sha256[:12] if sha256 else "none"
