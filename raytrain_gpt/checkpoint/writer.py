"""Checkpoints written in the background of training.

1. `begin` copies this rank's shard of the state into host memory and returns.
2. A thread of every rank writes and hashes its shard, forced to disk or into the object store.
3. The ranks exchange sizes and hashes; rank 0 commits and removes old checkpoints.
4. `collect` returns the outcome, the same on all ranks.

One checkpoint is in flight at a time, so that host memory holds one copy of the state.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch import nn

from raytrain_gpt import errors
from raytrain_gpt.checkpoint.catalog import Catalog, Draft, FileEntry
from raytrain_gpt.checkpoint.checkpoint_state import CheckpointState
from raytrain_gpt.checkpoint.collectives import Collectives
from raytrain_gpt.core.optim import Optimizer
from raytrain_gpt.core.state import HostSnapshot
from raytrain_gpt.errors import ClusterError, RaytrainGptError
from raytrain_gpt.storage.location import Location

_WAIT_S = 1.0
T = TypeVar("T")


@dataclass(frozen=True)
class WrittenCheckpoint:
    """A written checkpoint; `write_s` is its background time in seconds."""

    path: Location
    state: CheckpointState
    write_s: float


class CheckpointWriter:
    """Writer of a run's checkpoints; all ranks call each method at the same step.

    Args:
        mark: The attempt's mark, the same on all ranks; see `Draft`.
        may_write: Raises `ClusterError` if this process has lost the run's lease; called before writing and
            again before the commit.
    """

    def __init__(
        self,
        catalog: Catalog,
        mark: str,
        ranks: Collectives,
        model: nn.Module,
        optimizer: Optimizer,
        keep: int,
        may_write: Callable[[], None] = lambda: None,
    ) -> None:
        self._catalog, self._mark, self._keep, self._may_write = catalog, mark, keep, may_write
        self._ranks = ranks.background
        self._copy = HostSnapshot(model, optimizer, ranks.rank, ranks.world_size)
        self._thread: threading.Thread | None = None
        self._outcome: WrittenCheckpoint | Exception | None = None

    @property
    def writing(self) -> bool:
        """Whether this rank's thread is still running."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, state: CheckpointState, texts: dict[str, str], prune: bool = True) -> None:
        """Copy the state and start writing it with small files (name -> text), then `prune` older ones.

        The previous checkpoint must have been collected.
        """
        assert self._thread is None, "collect the checkpoint in flight first"
        self._copy.refresh()

        def run() -> None:
            self._outcome = _outcome_of(lambda: self._write(state, texts, prune))

        self._thread = threading.Thread(target=run, name="saver", daemon=True)
        self._thread.start()

    def collect(self, while_waiting: Callable[[], None] = lambda: None) -> WrittenCheckpoint | None:
        """Wait for the checkpoint in flight, if any; `while_waiting` is called about once a second.

        Raises a CheckpointError if the disk is full, a StorageError if the storage stayed unreachable.
        """
        if self._thread is None:
            return None
        while self._thread.is_alive():
            self._thread.join(_WAIT_S)
            while_waiting()
        self._thread = None
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, WrittenCheckpoint):
            return outcome
        raise outcome or RuntimeError("the checkpoint's thread ended without an outcome")

    def _write(
        self, state: CheckpointState, texts: dict[str, str], prune: bool
    ) -> WrittenCheckpoint:
        started = time.perf_counter()
        draft = self._catalog.draft(state.step, self._mark)
        # A failed rank joins all exchanges, because the other ranks wait for it.
        own = _outcome_of(lambda: self._add_files(draft))
        outcomes = self._exchanged(own, dict[str, FileEntry])
        failure = next((files for files in outcomes if isinstance(files, Exception)), None)

        def commit() -> Location:
            if failure is not None:
                raise failure
            self._may_write()
            entries = {name: entry for files in outcomes for name, entry in files.items()}
            return draft.commit(state, entries, texts)

        outcome = _outcome_of(commit) if self._ranks.rank == 0 else None
        # Without the lease the files may belong to another process by now.
        if isinstance(outcome, Exception) and not isinstance(outcome, ClusterError):
            draft.discard()
        outcome = self._exchanged(outcome, Location | None)[0]
        if not isinstance(outcome, Location):
            raise outcome
        if prune and self._ranks.rank == 0:
            # The checkpoint is committed; the next one retries failed removals.
            with contextlib.suppress(OSError, RaytrainGptError):
                self._catalog.prune(self._keep)
        return WrittenCheckpoint(outcome, state, time.perf_counter() - started)

    def _exchanged(self, outcome: Any, kind: Any) -> list[Any]:
        """Exchange outcomes; returns every rank's outcome or exception."""
        failed = isinstance(outcome, Exception)
        sent = _Failure(type(outcome).__name__, str(outcome)) if failed else outcome
        received = self._ranks.all_gather_json(sent, kind | _Failure)
        received[self._ranks.rank] = outcome  # with its traceback
        return [each.error() if isinstance(each, _Failure) else each for each in received]

    def _add_files(self, draft: Draft) -> dict[str, FileEntry]:
        self._may_write()
        return {
            file: draft.add(file, partial(self._copy.write, file)) for file in self._copy.files()
        }


@dataclass(frozen=True)
class _Failure:
    """A serializable exception: type name and text."""

    type_name: str
    text: str

    def error(self) -> Exception:
        """Rebuild an exception of `errors`, or return a RuntimeError that names the type."""
        kind = getattr(errors, self.type_name, None)
        if isinstance(kind, type) and issubclass(kind, RaytrainGptError):
            return kind(self.text)
        return RuntimeError(f"{self.type_name}: {self.text}")


def _outcome_of(operation: Callable[[], T]) -> T | Exception:
    try:
        return operation()
    except Exception as error:
        return error
