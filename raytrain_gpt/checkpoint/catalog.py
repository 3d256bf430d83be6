"""The catalog of a run's checkpoints: complete and hash-verified, or absent.

    checkpoints/step=00000250/         model.safetensors, optim-*.safetensors, tokenizer.json,
                                       state.json, rows.jsonl and, last, hashes.json;
                                       later evaluation.json, if it is evaluated asynchronously
    checkpoints/unfinished-…           being written or removed; never read
    checkpoints/broken-step=00000250/  found damaged, or written in a loss spike, and set aside
    checkpoints/misnamed-step=…        a copy or link of another step, set aside, never removed

On a file system a checkpoint is written under an unfinished name, every file is forced to disk,
`hashes.json` with the size and SHA-256 of all of them follows, and one rename gives it its name. An
object store cannot rename: there the files have their final names at once, and without the last one,
`hashes.json`, they are no checkpoint. The newest has the largest step, whatever clocks say. Ray keeps an
index of its own, which is written but never read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

from pydantic import TypeAdapter

from raytrain_gpt.checkpoint.checkpoint_state import STATE_VERSION, CheckpointState
from raytrain_gpt.checkpoint.evaluation_result import (
    EVALUATION_FILE,
    EvaluationResult,
    read_evaluation_result,
)
from raytrain_gpt.checkpoint.hashes import HASHES_FILE, FileEntry, read_hashes
from raytrain_gpt.checkpoint.rows import parse_rows
from raytrain_gpt.checkpoint.run_names import DEFAULT_STORAGE, near_run
from raytrain_gpt.errors import CheckpointError, damage_as
from raytrain_gpt.format import Log, count, shell
from raytrain_gpt.parsing import parse_json
from raytrain_gpt.storage.location import Location, force_to_disk

CHECKPOINTS_DIR = "checkpoints"
STATE_FILE = "state.json"
ROWS_FILE = "rows.jsonl"
_NAME = re.compile(r"step=(\d{8}|[1-9]\d{8,})")
_UNFINISHED = re.compile(rf"unfinished-(removed-)?{_NAME.pattern}(-[\w-]+)?")
_NEEDED = {STATE_FILE, "model.safetensors"}


class NewerVersionError(CheckpointError):
    """Written by a later version: not damaged, so it must not be skipped like a damaged one."""


class Misnamed(CheckpointError):
    """Its state has another step than its name; its files may be good."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint (its files' hashes are checked by `verify`).

    Attributes:
        size_bytes: All files that it was committed with, together.
        hash: SHA-256 over the sizes and hashes of these, in hex.
        file_names: Names of these files; what else is in the directory is not read.
        evaluated: Its async evaluation; None: there is none yet.
    """

    path: Location
    state: CheckpointState
    size_bytes: int
    hash: str = ""
    file_names: frozenset[str] = frozenset()
    evaluated: EvaluationResult | None = None

    @property
    def val_loss(self) -> float | None:
        """Validation loss, nats per token; None if it was not evaluated, or not finite."""
        row = self.evaluated_row
        return self.state.val_loss if row is None else row["val/loss"]

    @property
    def evaluated_row(self) -> dict[str, Any] | None:
        """The row of its async evaluation; None: there was none."""
        return self.evaluated.row if self.evaluated else None

    @property
    def waits_for_evaluation(self) -> bool:
        """Whether an async evaluation is due that has neither been done nor given up."""
        return self.evaluated is None and self.state.is_evaluated_async

    def verify(self) -> None:
        """Compare every file with its size and hash.

        Raises:
            CheckpointError: names the first file that is missing or differs.
        """
        for name, entry in read_hashes(self.path).items():
            file = self.path / name
            if not file.is_file():
                raise CheckpointError(f"checkpoint {self.path} lacks {name}")
            if (size := file.size_bytes()) != entry.size_bytes:
                raise CheckpointError(
                    f"checkpoint {self.path}: {name} has {size} bytes, expected {entry.size_bytes}"
                )
            if file.sha256() != entry.sha256:
                raise CheckpointError(f"checkpoint {self.path}: the content of {name} was changed")

    @contextlib.contextmanager
    def files(self) -> Iterator[Path]:
        """A local directory with the files; from an object store they are fetched and verified.

        Raises:
            CheckpointError: what was fetched is damaged, or the model is not the checkpoint's own.
        """
        if unlisted := _NEEDED - self.file_names:
            raise CheckpointError(f"checkpoint {self.path}: {HASHES_FILE} lacks {min(unlisted)}")
        if self.path.is_local:
            yield self.path.path
            return
        with tempfile.TemporaryDirectory(prefix="raytrain-gpt-") as parent:
            directory = Path(parent, self.path.name)
            # Only its own files: a dead attempt may have left others at the same step, of more ranks.
            for name in (HASHES_FILE, *read_hashes(self.path)):
                with contextlib.suppress(FileNotFoundError):
                    (self.path / name).download(directory / name)
            read_checkpoint(Location.of(directory)).verify()
            yield directory

    def rows(self) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl since the checkpoint before, unless damaged, and its evaluation's."""
        rows = [self.evaluated_row] if self.evaluated_row else []
        with contextlib.suppress(OSError, CheckpointError):
            content, entry = (
                (self.path / ROWS_FILE).read_bytes(),
                read_hashes(self.path).get(ROWS_FILE),
            )
            if entry and entry.sha256 == hashlib.sha256(content).hexdigest():
                rows = parse_rows(content)[0] + rows
        return rows

    def unlisted(self) -> list[str]:
        """Files on a disk that are not this checkpoint's, such as those of another one copied over it.

        In an object store a dead attempt may have left some at the same step.
        """
        names = set(self.path.names()) if self.path.is_local else set()
        return sorted(names - self.file_names - {HASHES_FILE, EVALUATION_FILE})


_STATE = TypeAdapter(CheckpointState)


def read_checkpoint(path: Location) -> Checkpoint:
    """A checkpoint directory's state and evaluation; its other files are not read yet.

    Raises:
        CheckpointError: it is no complete checkpoint, of a newer version, or named like one of another step.
    """
    if not (path / HASHES_FILE).is_file():
        raise CheckpointError(f"checkpoint {path} is incomplete: it has no {HASHES_FILE}")
    hashes = read_hashes(path)
    with damage_as(CheckpointError, path / STATE_FILE):
        content = parse_json((path / STATE_FILE).read_bytes())
        if (version := int(content["state_version"])) > STATE_VERSION:
            raise NewerVersionError(
                f"checkpoint {path} has state version {version}, this raytrain-gpt reads {STATE_VERSION}; "
                "upgrade raytrain-gpt"
            )
        if version <= 4 and "computed_by" in content:
            content["numerics_environment"] = content.pop("computed_by")
        state = _STATE.validate_python(content)
        if _NAME.fullmatch(path.name) and _step(path) != state.step:
            raise Misnamed(
                f"checkpoint {path} was copied, renamed or linked: its {STATE_FILE} says step {state.step}; "
                f"name it step={state.step:08d}, or remove it"
            )
        size_bytes = sum(entry.size_bytes for entry in hashes.values())
        listed = "".join(f"{n} {e.size_bytes} {e.sha256}\n" for n, e in sorted(hashes.items()))
        own_hash = hashlib.sha256(listed.encode()).hexdigest()
        # Only where there may be one: in an object store each look costs a request.
        evaluated = read_evaluation_result(path, own_hash) if state.is_evaluated_async else None
        return Checkpoint(path, state, size_bytes, own_hash, frozenset(hashes), evaluated)


class Draft:
    """A checkpoint being written: any process adds files, one of them commits.

    Args:
        mark: The same on all ranks, another one for every attempt, so that what a dying attempt still
            writes never gets into the next one's checkpoint.
    """

    def __init__(self, directory: Location, step: int, mark: str) -> None:
        self._directory = directory
        self._final = directory / f"step={step:08d}"
        unfinished = directory / f"unfinished-{self._final.name}-{mark}"
        self._place = unfinished if directory.is_local else self._final

    def add(self, name: str, write: Callable[[Path], object]) -> FileEntry:
        """Write one file, by `write` to a path, and force it to disk or into the object store.

        Raises:
            CheckpointError: the disk is full.
        """
        try:
            if self._place.is_local:
                self._place.path.mkdir(parents=True, exist_ok=True)
                return _written(self._place.path / name, write)
            with tempfile.TemporaryDirectory(prefix="raytrain-gpt-") as local:
                file = Path(local, name)
                entry = _written(file, write)
                (self._place / name).upload(file)
                return entry
        except Exception as error:
            # safetensors wraps the system's error: its number is only in the exception's text.
            full = (
                getattr(error, "errno", None) == errno.ENOSPC or "os error 28" in str(error).lower()
            )
            if not full:
                raise
            place = self._directory.path if self._place.is_local else Path(tempfile.gettempdir())
            raise CheckpointError(
                f"no space left for checkpoint {self._final}: {shutil.disk_usage(place).free} bytes are "
                f"free on {place}; older checkpoints are intact: make room and run the same "
                "command again"
            ) from None

    def commit(
        self, state: CheckpointState, entries: Mapping[str, FileEntry], texts: Mapping[str, str]
    ) -> Location:
        """Make it a checkpoint; returns its directory.

        Args:
            entries: Name -> size and hash of every file that any process added.
            texts: More small files, name -> content.

        Raises:
            CheckpointError: the disk is full.
        """
        files = dict(entries)
        for name, text in {**texts, STATE_FILE: _json(dataclasses.asdict(state))}.items():
            files[name] = self._add_text(name, text)
        hashes = {n: {"bytes": e.size_bytes, "sha256": e.sha256} for n, e in sorted(files.items())}
        self._add_text(HASHES_FILE, _json(hashes))
        if self._place != self._final:
            self._place.path.rename(self._final.path)
            force_to_disk(self._directory.path)
        return self._final

    def _add_text(self, name: str, text: str) -> FileEntry:
        return self.add(name, lambda path: path.write_text(text, "utf-8"))

    def discard(self) -> None:
        """Remove what was written."""
        with contextlib.suppress(OSError):
            self._place.remove()


def _written(file: Path, write: Callable[[Path], object]) -> FileEntry:
    write(file)
    force_to_disk(file)
    return FileEntry(file.stat().st_size, Location.of(file).sha256())


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1) + "\n"


class Catalog:
    """All checkpoints of one run."""

    def __init__(self, run_dir: Location) -> None:
        self._dir = run_dir / CHECKPOINTS_DIR

    def draft(self, step: int, mark: str) -> Draft:
        """A checkpoint to be written; see `Draft`."""
        return Draft(self._dir, step, mark)

    def complete(self, on_skip: Log | None = None) -> list[Checkpoint]:
        """Checkpoints that look complete, oldest step first; `on_skip` gets a line for each other one."""
        found = []
        for path in self._paths():
            try:
                found.append(read_checkpoint(path))
            except CheckpointError as error:
                if on_skip:
                    on_skip(f"skipped: {error}")
        return found

    def _paths(self) -> list[Location]:
        """Directories named like checkpoints, by step; in an object store only those with the last file."""
        paths = [self._dir / name for name in self._dir.names() if _NAME.fullmatch(name)]
        whole = [p for p in paths if self._dir.is_local or (p / HASHES_FILE).is_file()]
        return sorted(whole, key=_step)  # by name a step of nine digits would come first

    def newest_good(self, on_skip: Log, before_step: int | None = None) -> Checkpoint | None:
        """The newest checkpoint all of whose hashes fit, or None if the run has none at all.

        Args:
            on_skip: Gets one line for each newer checkpoint that is damaged, and for files that are not
                this one's.
            before_step: Only checkpoints of earlier steps; None: all.

        Raises:
            CheckpointError: all checkpoints are damaged, or one was written by a later version.
        """
        paths = [p for p in self._paths() if before_step is None or _step(p) < before_step]
        for path in reversed(paths):
            try:
                checkpoint = read_checkpoint(path)
                checkpoint.verify()
                if extra := checkpoint.unlisted():
                    names = ", ".join(name if name.isprintable() else repr(name) for name in extra)
                    on_skip(f"not read: {names} of {path}, which {HASHES_FILE} does not list")
                return checkpoint
            except NewerVersionError:
                raise
            except CheckpointError as error:
                on_skip(f"skipped: {error}")
        if paths:
            raise CheckpointError(
                f"no intact one among {count(len(paths), 'checkpoint')} in {self._dir}; "
                "restore one from a copy, or start again under a new run_name"
            )
        return None

    def best(self) -> Checkpoint | None:
        """The complete checkpoint with the lowest validation loss."""
        return best_by_loss(self.complete())

    def clean(self, good_until: int) -> None:
        """Remove what an interrupted writer left, and set aside checkpoints above `good_until`."""
        paths = self._paths()
        for name in self._dir.names():
            # In an object store an unfinished one has its final name, but is not among the paths.
            nameless = _NAME.fullmatch(name) and self._dir / name not in paths
            if nameless or _UNFINISHED.fullmatch(name):
                (self._dir / name).remove()
        for path in paths:
            if _step(path) > good_until:
                self._set_aside(path)

    def prune(self, keep: int) -> None:
        """Remove all but the newest `keep`, the best, and those that the run is yet to evaluate."""
        complete = self.complete()
        best = best_by_loss(complete)
        for checkpoint in complete[:-keep]:
            # A run resumed with eval_mode=inline never comes back to what waits.
            waits = checkpoint.waits_for_evaluation and complete[-1].state.evaluates_async
            if checkpoint is best or waits:
                continue
            self._take_out(checkpoint.path, f"unfinished-removed-{checkpoint.path.name}").remove()

    def _set_aside(self, path: Location) -> None:
        """Rename a checkpoint that is not used; a copy that the user made is never removed."""
        with contextlib.suppress(CheckpointError):
            try:
                read_checkpoint(path)
            except Misnamed:
                if self._dir.is_local:  # else the run's own one replaces it, hashes.json last
                    path.path.rename(path.path.with_name(f"misnamed-{path.name}-{token_hex(4)}"))
                return
        self._take_out(path, f"broken-{path.name}")

    def _take_out(self, path: Location, name: str) -> Location:
        """Make a checkpoint none by one operation; returns where its files are now."""
        if not self._dir.is_local:
            (path / HASHES_FILE).remove()
            return path
        aside = self._dir / name
        aside.remove()
        path.path.rename(aside.path)
        return aside


def resume_step(checkpoint: Checkpoint | None) -> int:
    """Updates that a run has done that goes on from a checkpoint; 0 without one."""
    return checkpoint.state.step if checkpoint else 0


def best_by_loss(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    """The one with the lowest validation loss; None if none was evaluated."""
    return next((c for c in by_preference(checkpoints) if c.val_loss is not None), None)


def by_preference(checkpoints: list[Checkpoint]) -> list[Checkpoint]:
    """The lowest validation loss first, the earlier step on a tie; then those without, newest first."""

    def rank(checkpoint: Checkpoint) -> tuple[bool, float, int]:
        loss, step = checkpoint.val_loss, checkpoint.state.step
        return loss is None, -step if loss is None else loss, step

    return sorted(checkpoints, key=rank)


def _step(path: Location) -> int:
    return int(path.name.removeprefix("step="))


def resolve_checkpoint(path: Location, on_skip: Log | None = None) -> Checkpoint:
    """The checkpoint at a path; in a run's directory the best, or the newest if none was evaluated.

    Args:
        on_skip: Gets a line for each damaged checkpoint of a run, in whose place the next best is used;
            None: the best one has to be good.

    Raises:
        CheckpointError: there is none, or it is damaged, or all of the run are.
    """
    if (path / STATE_FILE).is_file() or path.name.startswith("step="):
        checkpoint = read_checkpoint(path)
        checkpoint.verify()
        return checkpoint
    complete = by_preference(Catalog(path).complete(on_skip))
    for checkpoint in complete:
        try:
            checkpoint.verify()
            return checkpoint
        except (CheckpointError, OSError) as error:
            if on_skip is None:
                raise
            on_skip(f"skipped: {error}")
    if complete:
        raise CheckpointError(
            f"all checkpoints of {path} are damaged; restore one from a copy, or train again under a new "
            "run_name"
        )
    if path.name.endswith((".safetensors", ".bin")) or (path / "config.json").is_file():
        raise CheckpointError(
            f"{path} holds Hugging Face weights; import them first: "
            f"raytrain-gpt import {shell(path)} --out CHECKPOINT"
        )
    hint = near_run(path.name, path.parent, path.parent / DEFAULT_STORAGE)
    raise CheckpointError(
        f"{path} is neither a checkpoint nor a run with one{hint or '; see: raytrain-gpt runs list'}"
    )
