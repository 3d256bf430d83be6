"""The catalog of a run's checkpoints: complete and hash-verified, or absent.

    checkpoints/step=00000250/         model.safetensors, optim-*.safetensors, tokenizer.json,
                                       code.py if the run has user code, import.json if its
                                       weights descend from imported ones,
                                       state.json, rows.jsonl and, last, hashes.json
    checkpoints/unfinished-…           being written or removed; never read
    checkpoints/broken-step=00000250/  damaged, or written in a loss spike, and set aside

On a file system a checkpoint is written under an unfinished name, with every file forced to disk;
`hashes.json` with all sizes and SHA-256 comes last, and one rename completes it. Object stores cannot rename:
there the files get their final names at once, and count only once `hashes.json` exists. The newest
checkpoint is the one with the largest step, whatever the clocks say. Ray's index is written but never read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from raytrain_gpt.checkpoint.checkpoint_state import STATE_VERSION, CheckpointState
from raytrain_gpt.columns import parse_rows
from raytrain_gpt.config.kinds import Registry
from raytrain_gpt.config.schema import Config, parse_config
from raytrain_gpt.data.order import BatchRanges
from raytrain_gpt.errors import CheckpointError, damage_as, is_full, reason
from raytrain_gpt.format import Log, shell
from raytrain_gpt.parsing import parse_json
from raytrain_gpt.redact import say
from raytrain_gpt.storage.location import Location, force_to_disk

CHECKPOINTS_DIR = "checkpoints"
STATE_FILE = "state.json"
HASHES_FILE = "hashes.json"
ROWS_FILE = "rows.jsonl"
CODE_FILE = "code.py"
SKIPPED_FILE = "skipped.json"
"""File of a run's directory with the global batches that rollbacks skipped."""
IMPORT_FILE = "import.json"
"""Configuration files of imported weights (name -> content), for their export."""
_NAME = re.compile(r"step=(\d{8}|[1-9]\d{8,})")
_UNFINISHED = re.compile(rf"unfinished-(removed-)?{_NAME.pattern}(-[\w-]+)?")
_NEEDED = {STATE_FILE, "model.safetensors"}
Which = Literal["newest", "best", "step", "before"]
# Files are downloaded to these names.
_FileName = Annotated[str, Field(pattern=r"^\w[\w.-]{0,99}$")]


@dataclass(frozen=True)
class FileEntry:
    """Size and SHA-256 (hex) of a file of a checkpoint."""

    size_bytes: Annotated[int, Field(ge=0, lt=2**53, alias="bytes")]
    sha256: str


class _NewerVersionError(CheckpointError):
    """Checkpoint of a later version: not damaged, so it must not be skipped."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint; `verify` checks its hashes.

    Attributes:
        size_bytes: Total of all listed files.
        file_names: Files that `hashes.json` lists; no other files are read.
    """

    path: Location
    state: CheckpointState
    size_bytes: int
    file_names: frozenset[str] = frozenset()

    @property
    def run_dir(self) -> Location:
        return self.path.parent.parent

    def config(self, registry: Registry) -> Config:
        """Return the configuration; fields that it lacks had the effect of their defaults."""
        return parse_config(self.state.config, str(self.path), registry)

    def verify(self) -> None:
        """Check every file's size and hash; CheckpointError names the first missing or changed file."""
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
        """Provide a local directory with the files, fetched from an object store and verified."""
        if unlisted := _NEEDED - self.file_names:
            raise CheckpointError(f"checkpoint {self.path}: {HASHES_FILE} lacks {min(unlisted)}")
        if self.path.is_local:
            yield self.path.path
            return
        with tempfile.TemporaryDirectory(prefix="raytrain-gpt-") as parent:
            directory = Path(parent, self.path.name)
            # Only listed files: a dead attempt of more ranks may have left others at the same step.
            for name in (HASHES_FILE, *read_hashes(self.path)):
                with contextlib.suppress(FileNotFoundError):
                    (self.path / name).download(directory / name)
            read_checkpoint(Location.of(directory)).verify()
            yield directory

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl since the previous checkpoint, or none if they are damaged."""
        with contextlib.suppress(OSError, CheckpointError):
            content = (self.path / ROWS_FILE).read_bytes()
            entry = read_hashes(self.path).get(ROWS_FILE)
            if entry and entry.sha256 == hashlib.sha256(content).hexdigest():
                return parse_rows(content)[0]
        return []


_STATE = TypeAdapter(CheckpointState)
_HASHES = TypeAdapter(dict[_FileName, FileEntry])


def read_hashes(directory: Location) -> dict[str, FileEntry]:
    """Read the entries of a checkpoint by file name; raises CheckpointError if they are unreadable."""
    with damage_as(CheckpointError, directory / HASHES_FILE):
        return _HASHES.validate_python(parse_json((directory / HASHES_FILE).read_bytes()))


def read_checkpoint(path: Location) -> Checkpoint:
    """Read a checkpoint's state; CheckpointError if it is incomplete, newer, or named after another step."""
    if not (path / HASHES_FILE).is_file():
        raise CheckpointError(f"checkpoint {path} is incomplete: it has no {HASHES_FILE}")
    hashes = read_hashes(path)
    with damage_as(CheckpointError, path / STATE_FILE):
        content = parse_json((path / STATE_FILE).read_bytes())
        if (version := int(content["state_version"])) > STATE_VERSION:
            raise _NewerVersionError(
                f"checkpoint {path} has state version {version}, but this raytrain-gpt reads up to "
                f"{STATE_VERSION}; upgrade raytrain-gpt"
            )
        if version <= 4 and "computed_by" in content:
            content["numerics_environment"] = content.pop("computed_by")
        state = _STATE.validate_python(content)
        if _NAME.fullmatch(path.name) and _step(path) != state.step:
            raise CheckpointError(
                f"checkpoint {path} was copied, renamed or linked: its {STATE_FILE} says step {state.step}; "
                f"name it step={state.step:08d}, or remove it"
            )
        size_bytes = sum(entry.size_bytes for entry in hashes.values())
        return Checkpoint(path, state, size_bytes, frozenset(hashes))


class Draft:
    """A checkpoint being written: any process adds files, one process commits.

    `mark` is the same on all ranks and different for every attempt, so that late writes of a dying attempt
    never get into the next attempt's checkpoint.
    """

    def __init__(self, directory: Location, step: int, mark: str) -> None:
        self._directory = directory
        self._final = directory / f"step={step:08d}"
        unfinished = directory / f"unfinished-{self._final.name}-{mark}"
        self._target = unfinished if directory.is_local else self._final

    def add(self, name: str, write: Callable[[Path], object]) -> FileEntry:
        """Write one file, forced to disk or into the store; raises CheckpointError if the disk is full."""
        try:
            if self._target.is_local:
                self._target.path.mkdir(parents=True, exist_ok=True)
                return _written(self._target.path / name, write)
            with tempfile.TemporaryDirectory(prefix="raytrain-gpt-") as local:
                file = Path(local, name)
                entry = _written(file, write)
                (self._target / name).upload(file)
                return entry
        except Exception as error:
            if not is_full(error):
                raise
            disk = self._directory.path if self._target.is_local else Path(tempfile.gettempdir())
            raise CheckpointError(
                f"no space left for checkpoint {self._final}: {shutil.disk_usage(disk).free} bytes are "
                f"free on {disk} ({reason(error)}); older checkpoints are intact: make room, or raise the "
                "quota or ulimit -f, and run the same command again"
            ) from None

    def commit(
        self, state: CheckpointState, entries: Mapping[str, FileEntry], texts: Mapping[str, str]
    ) -> Location:
        """Write small files (name -> text), the state and all hashes; returns the checkpoint's directory.

        `entries` are those of all files that any process added.
        """
        files = dict(entries)
        for name, text in {**texts, STATE_FILE: _json(dataclasses.asdict(state))}.items():
            files[name] = self._add_text(name, text)
        hashes = {n: {"bytes": e.size_bytes, "sha256": e.sha256} for n, e in sorted(files.items())}
        self._add_text(HASHES_FILE, _json(hashes))
        if self._target != self._final:
            self._target.path.rename(self._final.path)
            force_to_disk(self._directory.path)
        return self._final

    def _add_text(self, name: str, text: str) -> FileEntry:
        return self.add(name, lambda path: path.write_text(text, "utf-8"))

    def discard(self) -> None:
        """Remove all written files."""
        with contextlib.suppress(OSError):
            self._target.remove()


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
        """Start a checkpoint; see `Draft`."""
        return Draft(self._dir, step, mark)

    def complete(self) -> list[Checkpoint]:
        """List checkpoints that look complete, oldest step first; `pick` chooses one to load."""
        checkpoints = []
        for path in self._paths():
            with contextlib.suppress(CheckpointError):
                checkpoints.append(read_checkpoint(path))
        return checkpoints

    def pick(self, which: Which, log: Log, step: int = 0) -> Checkpoint | None:
        """Choose a checkpoint to load, whose hashes all match; None if the run has none.

        Args:
            which: `newest`; `best` by validation loss, or the newest if none was evaluated; that of a
                `step`; or the newest `before` a step.
            log: Logs damaged checkpoints, which are skipped.

        Raises:
            CheckpointError: all of them are damaged, or one was written by a later version.
        """
        paths = self._paths()[::-1]
        if which in ("step", "before"):
            paths = [p for p in paths if (_step(p) == step if which == "step" else _step(p) < step)]
        found = self._readable(paths, log)
        for checkpoint in _by_preference(found) if which == "best" else found:
            try:
                checkpoint.verify()
                return checkpoint
            except CheckpointError as error:
                log(f"skipped: {error}")
        if paths:
            raise CheckpointError(
                f"no intact checkpoint in {self._dir} ({len(paths)} damaged); restore one from a copy, "
                "or start again under a new run_name"
            )
        return None

    @staticmethod
    def _readable(paths: Iterable[Location], log: Log) -> Iterator[Checkpoint]:
        for path in paths:
            try:
                yield read_checkpoint(path)
            except _NewerVersionError:
                raise
            except CheckpointError as error:
                log(f"skipped: {error}")

    def _paths(self) -> list[Location]:
        """Return directories named like checkpoints, by step; in an object store only those with hashes."""
        paths = [self._dir / name for name in self._dir.names() if _NAME.fullmatch(name)]
        finished = [p for p in paths if self._dir.is_local or (p / HASHES_FILE).is_file()]
        return sorted(finished, key=_step)  # by name a step of nine digits would come first

    def clean(self, good_until: int) -> None:
        """Remove unfinished checkpoints, and set aside those above step `good_until`."""
        paths = self._paths()
        for name in self._dir.names():
            # In an object store unfinished checkpoints have their final names, but no hashes.
            unhashed = _NAME.fullmatch(name) and self._dir / name not in paths
            if unhashed or _UNFINISHED.fullmatch(name):
                (self._dir / name).remove()
        for path in paths:
            if _step(path) > good_until:
                self._retire(path, f"broken-{path.name}")

    def prune(self, keep: int) -> None:
        """Remove all checkpoints but the newest `keep` and the best."""
        complete = self.complete()
        best = best_by_loss(complete)
        for checkpoint in complete[:-keep]:
            if checkpoint is not best:
                self._retire(checkpoint.path, f"unfinished-removed-{checkpoint.path.name}").remove()

    def _retire(self, path: Location, name: str) -> Location:
        """Rename a retired checkpoint, which is atomic; returns the new location."""
        if not self._dir.is_local:
            (path / HASHES_FILE).remove()
            return path
        aside = self._dir / name
        aside.remove()
        path.path.rename(aside.path)
        return aside


def resume_step(checkpoint: Checkpoint | None) -> int:
    """Return the step of a checkpoint; 0 for None."""
    return checkpoint.state.step if checkpoint else 0


def read_skipped(run_dir: Location, resumed: Checkpoint | None) -> BatchRanges:
    """Merge the skipped ranges of a run's file and a checkpoint; raises CheckpointError for damage."""
    file = run_dir / SKIPPED_FILE
    with damage_as(CheckpointError, file):
        content = parse_json(file.read_bytes()) if file.is_file() else []
        skipped = set(TypeAdapter(BatchRanges).validate_python(content))
    if resumed:
        skipped.update(resumed.state.skipped_batches)
    return tuple(sorted(skipped))


def best_by_loss(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    """Return the checkpoint with the lowest validation loss, or None if none was evaluated.

    Losses over fewer or more tokens than the newest one's (`eval_tokens`) are not compared with it.
    """
    return next((c for c in _by_preference(checkpoints) if c.state.val_loss is not None), None)


def _by_preference(checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    """Sort by validation loss, then earlier step; others last, see `best_by_loss`, newest first."""
    by_step = sorted(checkpoints, key=lambda one: one.state.step)
    losses = [(one.state.val_loss, one) for one in by_step if one.state.val_loss is not None]
    comparable = [
        (loss, one) for loss, one in losses if _eval_tokens(one) == _eval_tokens(losses[-1][1])
    ]
    best = [one for _, one in sorted(comparable, key=lambda pair: pair[0])]
    return [*best, *(one for one in reversed(by_step) if one not in best)]


def _eval_tokens(checkpoint: Checkpoint) -> object:
    return checkpoint.state.config.get("eval", {}).get("eval_tokens")


def _step(path: Location) -> int:
    return int(path.name.removeprefix("step="))


def resolve_checkpoint(path: Location, log: Log = say) -> Checkpoint:
    """Open the checkpoint at a path, or a run's best one; raises CheckpointError if none is intact."""
    if (path / STATE_FILE).is_file() or path.name.startswith("step="):
        checkpoint = read_checkpoint(path)
        checkpoint.verify()
        return checkpoint
    if (best := Catalog(path).pick("best", log)) is not None:
        return best
    if path.name.endswith((".safetensors", ".bin")) or (path / "config.json").is_file():
        raise CheckpointError(
            f"{path} holds Hugging Face weights; import them first: "
            f"raytrain-gpt import {shell(path)} --out CHECKPOINT"
        )
    raise CheckpointError(
        f"{path} is neither a checkpoint nor a run with one; see: raytrain-gpt runs list"
    )
