"""One live writer for a directory on a local disk, a shared disk or an object store.

A lease is a small JSON file that names its holder. The holder increments its `beat` every `heartbeat_s`
and removes the file at the end. A stale lease is cleaned up automatically:

1. Holder on this machine: the kernel reports whether it is alive, so the newcomer is refused or takes
   over at once.
2. Holder elsewhere, or a damaged file: the newcomer watches the beat. If it moves, the
   newcomer is refused; after `expiry_s` without a move it takes over. Clocks are never compared.
3. Reading and taking are one step under a file lock. Without locks (object stores, some shared
   directories), the newcomer waits `settle_s` and reads again: of two simultaneous newcomers, only the
   last still sees its own token.

A holder that was frozen or cut off, and then replaced, finds another token or no file at its next
beat: the lease is lost.

A kernel lock held for the life of the process is not enough: object stores have none, on a shared
directory it may outlive a dead machine or be invisible to others, and a forked child would hold it.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from raytrain_gpt.errors import ClusterError, RaytrainGptError, failure_as
from raytrain_gpt.format import Log
from raytrain_gpt.storage.location import Location

LEASE_FILE = ".lease"
_LEASE_BYTES = 1024
_POLLS_PER_EXPIRY, _LINES_PER_EXPIRY = 60, 6
_LOCK_WAIT_S, _LOCK_PAUSE_S = 10.0, 0.02
_UNKNOWN = "an unknown process"

_held_here: set[str] = set()
"""Tokens of this process's leases."""


@dataclass(frozen=True)
class LeaseTimes:
    """Times of a lease.

    Attributes:
        heartbeat_s: Time between two beats.
        expiry_s: Time without a beat until the holder counts as dead.
        settle_s: Time before the second read where nothing locks: longer than reading and writing an object,
            shorter than a beat.
    """

    heartbeat_s: float = 10.0
    expiry_s: float = 60.0
    settle_s: float = 2.0


TIMES = LeaseTimes()


class Holder(BaseModel):
    """Content of a lease file.

    Attributes:
        token: Random, new for every lease.
        machine: Boot and process namespace in which `pid` is valid.
        process_started: Start time in kernel ticks, since pids are reused; None if unavailable.
        since: Time when the lease was taken, for messages.
        beat: Counter of beats.
        beat_at: Unix time of the last beat; used only in lists of runs.
    """

    model_config = ConfigDict(frozen=True)
    token: str
    host: str
    machine: str
    pid: int = Field(gt=0, lt=2**31)
    process_started: int | None
    since: str
    beat: int
    beat_at: float

    @classmethod
    def this_process(cls, token: str) -> Holder:
        return cls(
            token=token,
            host=socket.gethostname(),
            machine=machine("pid"),
            pid=os.getpid(),
            process_started=_state_and_start(os.getpid())[1],
            since=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            beat=0,
            beat_at=time.time(),
        )

    @classmethod
    def parse(cls, text: str) -> Holder | None:
        """Parse a lease file; None if it is damaged."""
        try:
            return cls.model_validate_json(text)
        except ValidationError:
            return None

    def to_text(self) -> str:
        # Padded: a reader of an object store gets the size first, and a beat may follow before the content.
        return self.model_dump_json().ljust(_LEASE_BYTES)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"

    def is_alive(self) -> bool | None:
        """Whether the process runs; None if it is on another machine."""
        if self.machine != machine("pid"):
            return None
        state, started = _state_and_start(self.pid)
        # A zombie, or another process with a reused pid.
        if state in ("Z", "X") or started not in (None, self.process_started):
            return False
        if self.pid == os.getpid():
            # A lease that could not be removed during an outage is no longer held.
            return self.token in _held_here
        try:
            os.kill(self.pid, 0)
        except PermissionError:  # another user's process
            return True
        except ProcessLookupError:
            return False
        return True


@contextmanager
def hold_lease(
    location: Location, what: str, log: Log | None = None, times: LeaseTimes = TIMES
) -> Iterator[Lease]:
    """Hold a lease, beating in a thread; the caller must check `Lease.lost` regularly.

    Args:
        what: Its purpose, for messages: `run NAME`.
        log: Logs the wait for a dead holder and its replacement.

    Raises:
        ClusterError: a live process holds it (named in the message), or it cannot be written.
        StorageError: the object store is unreachable.
    """
    lease = Lease(location, what, log or (lambda _line: None), times)
    done = threading.Event()
    # A daemon, so that an error before the yield cannot keep the process alive.
    heart = threading.Thread(target=lease.beat_until, args=(done,), name="lease", daemon=True)
    try:
        _held_here.add(lease.token)
        lease.acquire()
        heart.start()
        yield lease
    finally:
        _held_here.discard(lease.token)
        done.set()
        if heart.is_alive():
            heart.join()
        lease.release()


def still_held(location: Location, token: str, wait_s: float = TIMES.expiry_s) -> bool:
    """Whether the lease still has this token, for processes that write on behalf of its holder.

    Waits up to `wait_s` for a local directory that is briefly renamed or unmounted.
    """
    until = time.monotonic() + wait_s
    while _is_away(location) and time.monotonic() < until:
        time.sleep(wait_s / _POLLS_PER_EXPIRY)
    holder = _holder(location)
    return holder is not None and holder.token == token


def live_holder(location: Location) -> str | None:
    """Describe a lease's live holder, or None; raises ClusterError if it cannot be read.

    For lists only, because clocks decide about a holder on another machine.
    """
    if (holder := _holder(location)) is None:
        return None
    alive = holder.is_alive()
    if alive is None:
        alive = time.time() - holder.beat_at <= TIMES.expiry_s
    return str(holder) if alive else None


class Lease:
    """A lease, made by `hold_lease`; `lost` is set once it was taken over or removed."""

    def __init__(self, location: Location, what: str, log: Log, times: LeaseTimes) -> None:
        self.token = uuid.uuid4().hex
        self.lost = threading.Event()
        self._location, self._what, self._log, self._times = location, what, log, times
        self._has_put = self._makes_directory = False
        self._seen_at = time.monotonic()
        self._watched_since: float | None = None  # a remote holder that may be dead
        self._first_text, self._last_read_at, self._next_line_s = "", 0.0, math.inf
        # A beat or removal retried for minutes could overwrite a successor's lease.
        self._impatient = replace(
            location, retry_for_s=min(location.retry_for_s, times.heartbeat_s)
        )

    def check(self) -> None:
        if self.lost.is_set():
            raise ClusterError(
                f"lost the lease on {self._what}: {self._location} was not renewed for "
                f"{self._times.expiry_s:g} s, or was removed. This process stops writing; if another one "
                "is using it, let it finish or stop it first"
            )

    def verify(self) -> None:
        """Read the lease to check it now; waits like `still_held`."""
        if not still_held(self._location, self.token, self._times.expiry_s):
            self.lost.set()
        self.check()

    def acquire(self) -> None:
        """Take the lease, waiting for a remote holder that may be dead; raises like `hold_lease`."""
        with _storage_errors("write", self._location, self._what):
            self._makes_directory = not self._location.parent.exists()
            while not self._try():
                time.sleep(self._times.expiry_s / _POLLS_PER_EXPIRY)
            holder = _holder(self._location)
        if holder is None or holder.token != self.token:
            raise _in_use(self._what, holder)

    def _try(self) -> bool:
        """Read the lease, and take it if it is free; False if it must be read again."""
        self._location.parent.mkdir()
        with _guarded(self._location) as is_locked:
            read_at = time.monotonic()
            text = _read(self._location)
            if text is not None and not self._is_free(text, read_at):
                return False
            if not self._put(is_first=text is None):
                return False
        # A third machine may have waited for the same remote holder.
        if not is_locked or self._watched_since is not None:
            time.sleep(self._times.settle_s)
        return True

    def _is_free(self, text: str, read_at: float) -> bool:
        """Decide over several reads whether the holder is dead; raises ClusterError if it is alive.

        `read_at` is the monotonic time just before `text`, the lease file, was read.
        """
        holder, expiry_s = Holder.parse(text), self._times.expiry_s
        alive = None if holder is None else holder.is_alive()
        if alive is False:
            self._log(f"{self._what} was held by {holder}, which is dead; taking over")
            return True
        if alive or (self._watched_since is not None and text != self._first_text):
            raise _in_use(self._what, holder)
        # After a storage outage, or a sleep of this machine, the holder's full time restarts.
        if self._watched_since is None or read_at - self._last_read_at > expiry_s / 2:
            self._watched_since, self._first_text = time.monotonic(), text
            self._next_line_s = math.inf
        self._last_read_at = time.monotonic()
        left_s = self._watched_since + expiry_s - read_at
        if 0 < left_s <= self._next_line_s:
            self._next_line_s = left_s - expiry_s / _LINES_PER_EXPIRY
            self._log(
                f"{self._what} was held by {holder or _UNKNOWN}; taking over in {left_s:.0f} s "
                "unless it renews its lease"
            )
        return left_s <= 0

    def _put(self, is_first: bool) -> bool:
        """Write the lease; on a disk, the first one only if the file still does not exist."""
        self._has_put = True
        text = Holder.this_process(self.token).to_text()
        if not (is_first and self._location.is_local):
            self._location.write_text(text)
            return True
        try:
            # Only one of two machines can create the file, even without a shared lock.
            with self._location.path.open("x", encoding="utf-8") as file:
                file.write(text)
        except (FileExistsError, FileNotFoundError):
            return False  # another process took it, or removed the directory it had created
        return True

    def beat_until(self, done: threading.Event) -> None:
        try:
            while not done.wait(self._times.heartbeat_s) and not self.lost.is_set():
                # An outage also stops other processes; the next beat retries.
                with suppress(OSError, RaytrainGptError), _guarded(self._location):
                    self._beat()
        finally:
            if not done.is_set():
                self.lost.set()

    def _beat(self) -> None:
        if _is_away(self._location) and time.monotonic() - self._seen_at < self._times.expiry_s:
            return
        holder = _holder(self._impatient)
        if holder is None or holder.token != self.token:
            self.lost.set()
            return
        self._seen_at = time.monotonic()
        moved = holder.model_copy(update={"beat": holder.beat + 1, "beat_at": time.time()})
        self._impatient.write_text(moved.to_text())

    def release(self) -> None:
        """Remove the file if it is ours; if that fails, it expires."""
        if not self._has_put:
            return
        try:
            with _guarded(self._location, removed=True):
                if is_ours := still_held(self._impatient, self.token, wait_s=0):
                    self._impatient.remove()
            if is_ours and self._makes_directory and self._location.is_local:
                with suppress(OSError):  # it is not empty
                    self._location.parent.path.rmdir()
        except (OSError, RaytrainGptError):
            self._log(
                f"cannot remove {self._location}; {self._what} is free once this process has exited, and "
                f"{self._times.expiry_s:g} s later for other machines"
            )


def _in_use(what: str, holder: Holder | None) -> ClusterError:
    return ClusterError(
        f"{what} is in use ({holder or _UNKNOWN}); stop that process first, or use another name"
    )


def _read(location: Location) -> str | None:
    """Read the file, damaged or not; None if it is missing."""
    try:
        return location.read_bytes().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return None


def _holder(location: Location) -> Holder | None:
    with _storage_errors("read", location, "a lease"):
        return Holder.parse(_read(location) or "")


def _is_away(location: Location) -> bool:
    return location.is_local and not location.parent.exists()


@contextmanager
def _guarded(location: Location, removed: bool = False) -> Iterator[bool]:
    """Lock a lease file by a file next to it; yields False without locks or without its directory.

    The file is deleted afterwards if `removed`, so a lock counts only while its file is still in place.
    """
    path = location.path.with_name(f"{location.name}.guard") if location.is_local else None
    while path is not None:
        try:
            guard = path.open("a", encoding="utf-8")
        except FileNotFoundError:
            break
        with guard:
            if not _lock(guard):
                break
            try:
                if not _is_at(guard, path):  # its last holder removed it
                    continue
                yield True
                if removed:
                    path.unlink(missing_ok=True)
                return
            finally:
                # Closing is not enough if a forked child also has the file open.
                fcntl.flock(guard, fcntl.LOCK_UN)
    yield False


def _lock(file: IO[str]) -> bool:
    """Lock a file; False if locks are unsupported or a frozen process holds it."""
    give_up_at = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            is_held = error.errno in (errno.EAGAIN, errno.EACCES)
            if not is_held or time.monotonic() > give_up_at:
                return False
        time.sleep(_LOCK_PAUSE_S)


def _is_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _storage_errors(verb: str, location: Location, what: str) -> AbstractContextManager[None]:
    advice = f"; give access to {location.parent}, or use another directory"
    return failure_as(ClusterError, f"cannot {verb} {location} for {what}", advice)


def machine(*namespaces: str) -> str:
    """Identify this kernel boot and its namespaces, such as `pid`; containers may share only some of them."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        links = (Path(f"/proc/self/ns/{kind}").readlink() for kind in namespaces)
        return " ".join([boot, *map(str, links)])
    except OSError:
        return socket.gethostname()


def _state_and_start(pid: int) -> tuple[str | None, int | None]:
    """Return state letter and start in ticks since boot, from proc(5); None where unavailable."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace")
    except OSError:
        return None, None
    fields = text.rpartition(")")[2].split()  # the name, in brackets, may contain any character
    return fields[0], int(fields[19])
