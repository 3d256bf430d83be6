"""The catalogue of a run's checkpoints: complete and hash-verified, or absent.

    checkpoints/step=00000250/         model.safetensors, optim-*.safetensors, tokenizer.json,
                                       state.json, rows.jsonl and, last, hashes.json
    checkpoints/unfinished-…           being written or removed; never read
    checkpoints/broken-step=00000250/  found damaged and set aside by the run that went on without it

A checkpoint is written under an unfinished name, every file is forced to disk, `hashes.json` with the
size and SHA-256 of all of them follows, and one rename gives it its name. The newest is the one with
the largest step: clocks play no part. Ray keeps an index of its own; it is told, and never asked.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raytrain_gpt.data.shards import file_sha256
from raytrain_gpt.errors import CheckpointError

CHECKPOINTS_DIR = "checkpoints"
HASHES_FILE = "hashes.json"
STATE_FILE = "state.json"
ROWS_FILE = "rows.jsonl"
STATE_VERSION = 1
_NAME = re.compile(r"step=\d{8,}")


class NewerVersion(CheckpointError):
    """Written by a later version: not damaged, so never to be passed over."""


@dataclass(frozen=True)
class CheckpointState:
    """The content of `state.json`.

    Attributes:
        step: Updates done.
        next_batch: Position: the global batch that the next update reads.
        order_hash: Rolling hash of what was delivered so far.
        val_loss: Validation loss at this step, nats per token; None if it was not evaluated.
        tokens_seen: Tokens trained on.
        config: The resolved configuration, section -> leaf -> value.
        manifest_hash: Of the dataset.
        vocab_hash: Of the tokenizer.
        vocab_size: Of the tokenizer.
        order_version: Of the order's algorithm.
        num_workers: World size that wrote it.
    """

    step: int
    next_batch: int
    order_hash: str
    val_loss: float | None
    tokens_seen: int
    config: dict[str, Any]
    manifest_hash: str
    vocab_hash: str
    vocab_size: int
    order_version: int
    num_workers: int
    state_version: int = STATE_VERSION


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint (its files' hashes are checked by `verify`)."""

    path: Path
    state: CheckpointState
    size_bytes: int

    def verify(self) -> None:
        """Compare every file with its size and hash.

        Raises:
            CheckpointError: names the first file that is missing or differs.
        """
        for name, (expected_bytes, sha256) in _read_hashes(self.path).items():
            file = self.path / name
            if not file.is_file():
                raise CheckpointError(f"checkpoint {self.path} lacks {name}")
            if (size := file.stat().st_size) != expected_bytes:
                raise CheckpointError(
                    f"checkpoint {self.path}: {name} has {size} bytes, expected {expected_bytes}"
                )
            if file_sha256(file) != sha256:
                raise CheckpointError(f"checkpoint {self.path}: the content of {name} was changed")

    def rows(self) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl since the checkpoint before; none where they are damaged."""
        try:
            text = (self.path / ROWS_FILE).read_text("utf-8")
            return [json.loads(line) for line in text.splitlines()]
        except (OSError, ValueError):
            return []


def read_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint directory's state; its files are not read yet.

    Raises:
        CheckpointError: it is no complete checkpoint, or of a newer version.
    """
    if not (path / HASHES_FILE).exists():
        raise CheckpointError(f"checkpoint {path} is incomplete: it has no {HASHES_FILE}")
    hashes = _read_hashes(path)
    content = _read_json(path / STATE_FILE)
    try:
        if content["state_version"] > STATE_VERSION:
            raise NewerVersion(
                f"checkpoint {path} has state version {content['state_version']}, this raytrain-gpt "
                f"reads {STATE_VERSION}; upgrade raytrain-gpt"
            )
        size = sum(expected_bytes for expected_bytes, _ in hashes.values())
        return Checkpoint(path, CheckpointState(**content), size)
    except (TypeError, KeyError) as error:
        raise CheckpointError(f"checkpoint {path}: {STATE_FILE} is damaged ({error})") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged")
    return content


def _read_hashes(path: Path) -> dict[str, tuple[int, str]]:
    """File name -> (bytes, SHA-256 in hex)."""
    try:
        entries = _read_json(path / HASHES_FILE).items()
        return {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in entries}
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path}: {HASHES_FILE} is damaged ({error})") from None


class Catalogue:
    """All checkpoints of one run."""

    def __init__(self, run_dir: Path) -> None:
        self._dir = run_dir / CHECKPOINTS_DIR

    def complete(self) -> list[Checkpoint]:
        """Checkpoints that look complete, oldest step first."""
        found = []
        for path in self._paths():
            try:
                found.append(read_checkpoint(path))
            except CheckpointError:
                continue
        return found

    def _paths(self) -> list[Path]:
        return sorted(p for p in self._dir.glob("step=*") if _NAME.fullmatch(p.name))

    def newest_good(self, on_skip: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint all of whose hashes fit, or None if the run has none at all.

        Args:
            on_skip: Gets one line for each newer one that does not.

        Raises:
            CheckpointError: there are checkpoints, and none is good or one is of a later version.
        """
        paths = self._paths()
        for path in reversed(paths):
            try:
                checkpoint = read_checkpoint(path)
                checkpoint.verify()
                return checkpoint
            except NewerVersion:
                raise
            except CheckpointError as error:
                on_skip(f"skipped: {error}")
        if paths:
            raise CheckpointError(
                f"none of the {len(paths)} checkpoints in {self._dir} is good; restore one from a "
                "copy, or start again under a new run_name"
            )
        return None

    def best(self) -> Checkpoint | None:
        """The complete checkpoint with the lowest validation loss."""
        evaluated = [c for c in self.complete() if c.state.val_loss is not None]
        return min(evaluated, key=lambda c: (c.state.val_loss or 0.0, c.state.step), default=None)

    def clean(self, good_until: int) -> None:
        """Remove what an interrupted writer left, and set aside what lies above a good step."""
        for path in self._dir.glob("unfinished-*"):
            shutil.rmtree(path)
        for path in self._paths():
            if int(path.name.removeprefix("step=")) > good_until:
                aside = self._dir / f"broken-{path.name}"
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)

    def write(self, state: CheckpointState, fill: Callable[[Path], None]) -> Path:
        """Write a checkpoint: complete, or nothing at all.

        Args:
            state: Goes into `state.json`.
            fill: Writes the other files into a directory.

        Raises:
            CheckpointError: the disk is full; nothing of it stays.
        """
        path = self._dir / f"step={state.step:08d}"
        unfinished = self._dir / f"unfinished-{path.name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            unfinished.mkdir(parents=True)
            fill(unfinished)
            (unfinished / STATE_FILE).write_text(json.dumps(vars(state), indent=1) + "\n", "utf-8")
            hashes = {file.name: _synced_entry(file) for file in sorted(unfinished.iterdir())}
            (unfinished / HASHES_FILE).write_text(json.dumps(hashes, indent=1) + "\n", "utf-8")
            _synced_entry(unfinished / HASHES_FILE)
            unfinished.rename(path)
            _sync_directory(self._dir)
        except Exception as error:
            written = sum(f.stat().st_size for f in unfinished.glob("*"))
            shutil.rmtree(unfinished, ignore_errors=True)
            if _is_disk_full(error):
                raise CheckpointError(
                    f"no space left for checkpoint {path}: {written} bytes of it fitted, "
                    f"{shutil.disk_usage(self._dir).free} are free; older checkpoints are intact: "
                    "make room and run the same command again"
                ) from None
            raise
        return path

    def prune(self, keep: int) -> None:
        """Remove all but the newest `keep` and the best."""
        best = self.best()
        for checkpoint in self.complete()[:-keep]:
            if best is None or checkpoint.path != best.path:
                removed = self._dir / f"unfinished-removed-{checkpoint.path.name}"
                checkpoint.path.rename(removed)
                shutil.rmtree(removed)


def _is_disk_full(error: Exception) -> bool:
    # safetensors puts the system's error into its own exception's text.
    return getattr(error, "errno", None) == errno.ENOSPC or "os error 28" in str(error).lower()


def _synced_entry(file: Path) -> Mapping[str, Any]:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
    return {"bytes": file.stat().st_size, "sha256": file_sha256(file)}


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def resolve_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint that a path means: itself, or of a run's directory the best, else newest.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    if (path / STATE_FILE).exists() or path.name.startswith("step="):
        checkpoint = read_checkpoint(path)
    else:
        catalogue = Catalogue(path)
        complete = catalogue.complete()
        if not complete:
            raise CheckpointError(
                f"{path} is neither a checkpoint nor a run with one; see: raytrain-gpt runs list"
            )
        checkpoint = catalogue.best() or complete[-1]
    checkpoint.verify()
    return checkpoint
