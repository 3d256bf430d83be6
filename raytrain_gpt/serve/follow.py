"""Follow a run: serve its best usable checkpoint on all replicas.

Every poll queries the replicas, because a restarted one may serve a different checkpoint. A checkpoint that
could not be served is retried with doubling pauses.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raytrain_gpt.checkpoint.catalog import Catalog, Checkpoint, by_preference
from raytrain_gpt.cluster.failures import root_cause, user_error_in
from raytrain_gpt.errors import CheckpointError
from raytrain_gpt.format import Log
from raytrain_gpt.storage.location import Location

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 600.0


@dataclass(frozen=True)
class _Failure:
    """A checkpoint that could not be served; `retry_at` is on the follower's clock."""

    pause_s: float
    retry_at: float
    damaged: bool


class Follower:
    """Loop that keeps all replicas on a run's best checkpoint.

    Args:
        served: Hash of the checkpoint that was announced.
        call: Calls a method of `Replica` by name on all replicas; returns their replies.
        say: Receives each change, and each checkpoint that cannot be served.
        clock: Seconds.
    """

    def __init__(
        self,
        run_dir: Location,
        served: str,
        call: Callable[..., list[Any]],
        say: Log,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._catalog = Catalog(run_dir)
        self._call, self._say, self._clock = call, say, clock
        self._announced = self._verified = served
        self._failures: dict[str, _Failure] = {}
        self._told = ""

    def look(self) -> None:
        """Load the best undamaged checkpoint into all replicas, if they do not serve it yet."""
        try:
            self._look()
        except Exception as error:  # the replicas keep serving the old checkpoint
            reason = user_error_in(error) or root_cause(error)
            self._tell(f"cannot serve a new checkpoint now: {reason}")

    def _look(self) -> None:
        checkpoints = by_preference(self._catalog.complete())
        if not checkpoints:
            return None
        served = set(self._call("served"))
        for checkpoint in checkpoints:
            if served == {checkpoint.hash}:
                return self._announce(checkpoint)
            failure = self._failures.get(checkpoint.hash)
            waits = failure is not None and self._clock() < failure.retry_at
            if not waits and self._is_intact(checkpoint):
                return self._load(checkpoint)
            # Only a damaged checkpoint is replaced by the next best; one that failed to load may just
            # have hit a replica without memory.
            if not self._failures[checkpoint.hash].damaged:
                return None
        return None

    def _is_intact(self, checkpoint: Checkpoint) -> bool:
        """Return whether all hashes match; the last verified checkpoint is not read again."""
        if checkpoint.hash == self._verified:
            return True
        try:
            checkpoint.verify()
        except CheckpointError as error:
            self._note_failure(checkpoint, damaged=True)
            self._tell(f"skipped: {error}")
            return False
        self._verified = checkpoint.hash
        return True

    def _load(self, checkpoint: Checkpoint) -> None:
        self._note_failure(checkpoint, damaged=False)  # before the call, which may raise
        replies = self._call("load", str(checkpoint.path), checkpoint.hash)
        problems = [reply for reply in replies if reply is not None]
        if problems:
            where = f"{len(problems)} of {len(replies)} replicas"
            return self._tell(f"skipped on {where}: {problems[0]}")
        return self._announce(checkpoint)

    def _note_failure(self, checkpoint: Checkpoint, damaged: bool) -> None:
        before = self._failures.get(checkpoint.hash)
        pause_s = min(2 * before.pause_s, LONGEST_PAUSE_S) if before else FIRST_PAUSE_S
        self._failures[checkpoint.hash] = _Failure(pause_s, self._clock() + pause_s, damaged)

    def _announce(self, checkpoint: Checkpoint) -> None:
        self._failures.pop(checkpoint.hash, None)
        if checkpoint.hash != self._announced:
            self._tell(
                f"serving {describe_checkpoint(checkpoint)}; earlier requests finish on the old weights"
            )
        self._announced = checkpoint.hash

    def _tell(self, line: str) -> None:
        """Print a text, but not twice in a row."""
        if line != self._told:
            self._say(line)
        self._told = line


def describe_checkpoint(checkpoint: Checkpoint) -> str:
    loss = checkpoint.val_loss
    return f"{checkpoint.path}{'' if loss is None else f' (val loss {loss:.4f})'}"
