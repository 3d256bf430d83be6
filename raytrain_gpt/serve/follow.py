"""A run that is followed: its best checkpoint that can be served, on all replicas.

Every look asks the replicas what they serve, since one that had to start again may serve another
checkpoint than the others. What could not be served is tried again after longer and longer pauses.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from raytrain_gpt.checkpoint.catalog import Catalog, Checkpoint, resolve_checkpoint
from raytrain_gpt.cluster.failures import root_cause, user_error_in
from raytrain_gpt.errors import CheckpointError
from raytrain_gpt.storage.location import Location

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 600.0

T = TypeVar("T")


def by_preference(checkpoints: list[Checkpoint]) -> list[Checkpoint]:
    """The lowest validation loss first; those without one come last, the newest of them first.

    Args:
        checkpoints: The oldest step first.
    """
    evaluated = [(c.val_loss, c.state.step, c) for c in checkpoints if c.val_loss is not None]
    ranked = [found[2] for found in sorted(evaluated, key=lambda found: found[:2])]
    return ranked + [c for c in reversed(checkpoints) if c.val_loss is None]


def first_usable(
    run_dir: Location, use: Callable[[Checkpoint], T], log: Callable[[str], None]
) -> T:
    """What is made of a run's best checkpoint that is not damaged, or of a checkpoint.

    Args:
        run_dir: A run, or a checkpoint.
        use: Reads a checkpoint, or raises.
        log: Gets a line for each that is damaged.

    Raises:
        CheckpointError: there is none, or all are damaged.
    """
    for checkpoint in by_preference(Catalog(run_dir).complete()):
        try:
            return use(checkpoint)
        except (CheckpointError, OSError) as error:
            log(f"skipped: {user_error_in(error) or root_cause(error)}")
    return use(resolve_checkpoint(run_dir))


class Replicas(Protocol):
    """All that run."""

    def served(self) -> list[str]:
        """Hash of the checkpoint that each serves."""

    def swap(self, checkpoint: Checkpoint) -> list[str | None]:
        """Have all serve a checkpoint; tells of each why it cannot, None if it does."""


@dataclass(frozen=True)
class _Refusal:
    """A checkpoint that could not be served.

    Attributes:
        pause_s: Until it is tried again.
        until: When that is, on the monotonic clock.
        damaged: The next one by preference is served meanwhile.
    """

    pause_s: float
    until: float
    damaged: bool


class Follower:
    """Hands a run's best checkpoint on to the replicas.

    Args:
        run_dir: Of the run.
        served: Hash of the checkpoint that was announced.
        replicas: That serve it.
        say: Gets a line for each change, and for each checkpoint that cannot be served.
        clock: Seconds.
    """

    def __init__(
        self,
        run_dir: Location,
        served: str,
        replicas: Replicas,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._catalogue = Catalog(run_dir)
        self._replicas, self._say, self._clock = replicas, say, clock
        self._announced = self._verified = served
        self._refusals: dict[str, _Refusal] = {}
        self._told = ""

    def look(self) -> None:
        """Have all replicas serve the best checkpoint; one that is damaged is passed over."""
        try:
            self._look()
        except Exception as error:  # whatever it is, the weights before go on
            reason = user_error_in(error) or root_cause(error)
            self._tell(f"no new checkpoint can be served now: {reason}")

    def _look(self) -> None:
        checkpoints = by_preference(self._catalogue.complete())
        served = set(self._replicas.served()) if checkpoints else set()
        for checkpoint in checkpoints:
            if served == {checkpoint.hash}:
                return self._announce(checkpoint)
            refusal = self._refusals.get(checkpoint.hash)
            waits = refusal is not None and self._clock() < refusal.until
            if not waits and self._is_good(checkpoint):
                return self._swap(checkpoint)
            if not self._refusals[checkpoint.hash].damaged:
                return None
        return None

    def _is_good(self, checkpoint: Checkpoint) -> bool:
        """Whether all its hashes fit; the files are read once."""
        if checkpoint.hash == self._verified:
            return True
        try:
            checkpoint.verify()
        except CheckpointError as error:
            self._refuse(checkpoint, damaged=True)
            self._tell(f"skipped: {error}")
            return False
        self._verified = checkpoint.hash
        return True

    def _swap(self, checkpoint: Checkpoint) -> None:
        self._refuse(checkpoint, damaged=False)  # also if the call fails
        replies = self._replicas.swap(checkpoint)
        problems = [reply for reply in replies if reply is not None]
        if problems:
            where = f"{len(problems)} of {len(replies)} replicas"
            return self._tell(f"skipped on {where}: {problems[0]}")
        return self._announce(checkpoint)

    def _refuse(self, checkpoint: Checkpoint, damaged: bool) -> None:
        before = self._refusals.get(checkpoint.hash)
        pause_s = min(2 * before.pause_s, LONGEST_PAUSE_S) if before else FIRST_PAUSE_S
        self._refusals[checkpoint.hash] = _Refusal(pause_s, self._clock() + pause_s, damaged)

    def _announce(self, checkpoint: Checkpoint) -> None:
        self._refusals.pop(checkpoint.hash, None)
        if checkpoint.hash != self._announced:
            self._tell(
                f"serving {described(checkpoint)}; requests before it end on the weights before"
            )
        self._announced = checkpoint.hash

    def _tell(self, line: str) -> None:
        """Once, however often it is found again."""
        if line != self._told:
            self._say(line)
        self._told = line


def described(checkpoint: Checkpoint) -> str:
    """A checkpoint for a console line."""
    loss = checkpoint.val_loss
    return f"{checkpoint.path}{'' if loss is None else f' (val loss {loss:.4f})'}"
