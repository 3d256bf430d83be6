"""One live writer for a directory on a local disk, a shared disk or an object store.

A lease is a small JSON file that names its holder. The holder increments its `beat` every `heartbeat_s`
and removes the file at the end. A lease that was left behind needs no manual cleanup:

1. The holder ran on this machine: the kernel knows whether it is alive. If it is, the newcomer is
   refused at once, otherwise it takes over at once.
2. The holder ran elsewhere, or the file is damaged or a copy: the newcomer watches the beat. If it moves, the
   newcomer is refused; after `expiry_s` without a move it takes over. Clocks are never compared.
3. Looking and taking are one step under a file lock. Where there is none (object stores, some shared
   directories), the newcomer waits `settle_s` and looks again: of two at the same moment, only the last
   one still finds its own token.

A holder that was frozen or cut off, and has been replaced, finds another token or no file at its next
beat and knows that the lease is lost.

The kernel's lock alone, held while the process lives, would not do: object stores have none, on a shared
directory it may outlive a dead machine or not reach other ones, and a forked child would keep it.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from raytrain_gpt.errors import ClusterError, RaytrainGptError, failure_as
from raytrain_gpt.format import Log
from raytrain_gpt.storage.guard import guarded
from raytrain_gpt.storage.location import Location

LEASE_FILE = ".lease"
_LEASE_BYTES = 1024
_POLLS_PER_EXPIRY, _LINES_PER_EXPIRY = 60, 6
_UNKNOWN = "an unknown process"

_held_here: set[str] = set()
"""Tokens of the leases that this process holds."""


@dataclass(frozen=True)
class LeaseTimes:
    """How fast a lease is kept and given up.

    Attributes:
        heartbeat_s: Between two beats.
        expiry_s: A beat that has not moved for this long counts as gone.
        settle_s: Before looking again where nothing locks: longer than the time between looking at an
            object store and writing to it, shorter than a beat.
    """

    heartbeat_s: float = 10.0
    expiry_s: float = 60.0
    settle_s: float = 2.0


TIMES = LeaseTimes()


class Holder(BaseModel):
    """The content of a lease file.

    Attributes:
        token: Random, new for every lease.
        host: Name of the machine, for people.
        machine: The boot and the process namespace in which `pid` is valid.
        process_started: When the process started, in the kernel's ticks, since pids are reused; None
            where the kernel does not say.
        directory: Inode of the directory of the lease, which a copy has another one of; None in an object
            store.
        since: When the lease was taken, for people.
        beat: Grows by one with every beat.
        beat_at: Unix time of the last beat; only lists of runs go by it.
    """

    model_config = ConfigDict(frozen=True)
    token: str
    host: str
    machine: str
    pid: int = Field(gt=0, lt=2**31)
    process_started: int | None
    directory: int | None = None
    since: str
    beat: int
    beat_at: float

    @classmethod
    def this_process(cls, token: str, directory: int | None = None) -> Holder:
        """The calling process, from now on."""
        return cls(
            token=token,
            host=socket.gethostname(),
            machine=_machine(),
            pid=os.getpid(),
            process_started=_state_and_start(os.getpid())[1],
            directory=directory,
            since=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            beat=0,
            beat_at=time.time(),
        )

    @classmethod
    def parse(cls, text: str) -> Holder | None:
        """The holder in a lease file; None if it is damaged."""
        try:
            return cls.model_validate_json(text)
        except ValidationError:
            return None

    def to_text(self) -> str:
        """The content of the lease file."""
        # Padded: an object store is asked for the size first, and a beat may come before the content.
        return self.model_dump_json().ljust(_LEASE_BYTES)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"

    def is_alive(self, directory: int | None) -> bool | None:
        """Whether the process runs; None if that cannot be seen from here, or does not count.

        Args:
            directory: In which the lease was found: if it is a copy, the process beats elsewhere.
        """
        if self.machine != _machine() or self.directory not in (None, directory):
            return None
        state, started = _state_and_start(self.pid)
        # Dead and not yet collected by its parent, or another process of the same number.
        if state in ("Z", "X") or started not in (None, self.process_started):
            return False
        if self.pid == os.getpid():
            # A lease that could not be removed because the storage was gone is no longer held.
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
    """Hold a lease, beating in a thread; the caller should look at `Lease.lost` now and then.

    Args:
        what: What the lease is for, for messages: `run NAME`.
        log: Receives a line when a holder that is gone is replaced, and while waiting for that.
        times: Other values than the default are for tests.

    Raises:
        ClusterError: somebody else holds it (the message names who, and since when), or it cannot be
            written.
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
    """Whether the lease still has this token; for processes that write on behalf of its holder.

    Waits up to `wait_s` for a local directory that is renamed or unmounted for a moment.
    """
    until = time.monotonic() + wait_s
    while _is_away(location) and time.monotonic() < until:
        time.sleep(wait_s / _POLLS_PER_EXPIRY)
    holder = _holder(location)
    return holder is not None and holder.token == token


def live_holder(location: Location) -> str | None:
    """Who seems to hold a lease; None if nobody does.

    For lists only: whether a holder on another machine is alive is judged by the clock.

    Raises:
        ClusterError: it cannot be read.
    """
    holder = _holder(location)
    if holder is None:
        return None
    alive = holder.is_alive(_inode(location))
    if alive is None:
        alive = time.time() - holder.beat_at <= TIMES.expiry_s
    return str(holder) if alive else None


class Lease:
    """A lease that is being taken or held; made by `hold_lease`.

    Attributes:
        lost: Set once somebody else has taken the lease over, or removed it.
    """

    def __init__(self, location: Location, what: str, log: Log, times: LeaseTimes) -> None:
        self.token = uuid.uuid4().hex
        self.lost = threading.Event()
        self._location, self._what, self._log, self._times = location, what, log, times
        self._has_put = self._makes_directory = False
        self._seen_at = time.monotonic()
        # A beat or removal that is retried for minutes could overwrite whoever took over meanwhile.
        self._impatient = replace(
            location, retry_for_s=min(location.retry_for_s, times.heartbeat_s)
        )

    def check(self) -> None:
        """Raise a ClusterError if the lease has been lost."""
        if self.lost.is_set():
            raise ClusterError(
                f"{self._what} was taken over while this process was frozen or cut off from "
                f"{self._location} for {self._times.expiry_s:g} s or more, or that file was removed; this "
                "process stops writing. Leave the other one alone, or stop it and start again"
            )

    def verify(self) -> None:
        """Like `check`, but look now instead of at the next beat; waits as `still_held`."""
        if not still_held(self._location, self.token, self._times.expiry_s):
            self.lost.set()
        self.check()

    def acquire(self) -> None:
        """Take the lease, waiting for a holder elsewhere that may be gone; raises as `hold_lease`."""
        watch = _Watch(self._location, self._what, self._log, self._times.expiry_s)
        with _storage_errors("write", self._location, self._what):
            self._makes_directory = not self._location.parent.exists()
            while not self._try(watch):
                time.sleep(self._times.expiry_s / _POLLS_PER_EXPIRY)
            holder = _holder(self._location)
        if holder is None or holder.token != self.token:
            raise _in_use(self._what, holder)

    def _try(self, watch: _Watch) -> bool:
        """Look at the lease, and take it if it is free; False: look again soon."""
        self._location.parent.mkdir()
        with _guarded(self._location) as is_locked:
            looked_at = time.monotonic()
            text = _read(self._location)
            if text is not None and not watch.is_free(text, looked_at):
                return False
            if not self._put(is_first=text is None):
                return False
        # Whoever waited for a holder elsewhere may have waited together with a third machine.
        if not is_locked or watch.began_at is not None:
            time.sleep(self._times.settle_s)
        return True

    def _put(self, is_first: bool) -> bool:
        """Write the lease; the first one on a disk only if there is still none."""
        self._has_put = True
        text = Holder.this_process(self.token, _inode(self._location)).to_text()
        if not (is_first and self._location.is_local):
            self._location.write_text(text)
            return True
        try:
            # Only one of two machines can create the file, even where locks do not reach the other.
            with self._location.path.open("x", encoding="utf-8") as file:
                file.write(text)
        except (FileExistsError, FileNotFoundError):
            return False  # another process took it, or removed the directory that it had made
        return True

    def beat_until(self, done: threading.Event) -> None:
        """Beat until `done` is set or the lease is lost."""
        try:
            while not done.wait(self._times.heartbeat_s) and not self.lost.is_set():
                # While the storage is unreachable, it is so for others too: the next beat tries again.
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
        """Remove the file if it is ours; what cannot be removed now expires by itself."""
        if not self._has_put:
            return
        try:
            with _guarded(self._location, removed=True):
                if is_ours := still_held(self._impatient, self.token, wait_s=0):
                    self._impatient.remove()
            if is_ours and self._makes_directory:
                self._location.parent.remove_if_empty()
        except (OSError, RaytrainGptError):
            self._log(
                f"could not remove {self._location}; {self._what} is free when this process has "
                f"ended, and {self._times.expiry_s:g} s later for other machines"
            )


class _Watch:
    """Decides whether a lease is free, over several looks at it.

    Attributes:
        began_at: When watching a holder elsewhere began; None if there was no need.
    """

    def __init__(self, location: Location, what: str, log: Log, expiry_s: float) -> None:
        self.began_at: float | None = None
        self._location = location
        self._what, self._log, self._expiry_s = what, log, expiry_s
        self._first_text = ""
        self._last_look_at = 0.0
        self._next_line_s = math.inf

    def is_free(self, text: str, looked_at: float) -> bool:
        """Whether the holder is gone; False: look again.

        Args:
            text: The content of the lease file.
            looked_at: Monotonic time just before it was read.

        Raises:
            ClusterError: the holder is alive.
        """
        holder = Holder.parse(text)
        alive = None if holder is None else holder.is_alive(_inode(self._location))
        if alive is False:
            self._log(f"{self._what} was held by {holder}, which is gone; taking over")
            return True
        if alive or (self.began_at is not None and text != self._first_text):
            raise _in_use(self._what, holder)
        # After an outage of the storage, or a sleep of this machine, the holder gets its full time again.
        if self.began_at is None or looked_at - self._last_look_at > self._expiry_s / 2:
            self.began_at, self._first_text = time.monotonic(), text
            self._next_line_s = math.inf
        self._last_look_at = time.monotonic()
        left_s = self.began_at + self._expiry_s - looked_at
        if 0 < left_s <= self._next_line_s:
            self._next_line_s = left_s - self._expiry_s / _LINES_PER_EXPIRY
            self._log(
                f"{self._what} was held by {holder or _UNKNOWN}; taking over in {left_s:.0f} s "
                "unless it shows signs of life"
            )
        return left_s <= 0


def _in_use(what: str, holder: Holder | None) -> ClusterError:
    return ClusterError(
        f"{what} is in use ({holder or _UNKNOWN}); stop that one first, or use another name"
    )


def _read(location: Location) -> str | None:
    """The text, damaged or not; None if there is no file."""
    try:
        return location.read_bytes().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return None


def _holder(location: Location) -> Holder | None:
    """The holder; None if the file is missing or damaged."""
    with _storage_errors("read", location, "a lease"):
        return Holder.parse(_read(location) or "")


def _is_away(location: Location) -> bool:
    return location.is_local and not location.parent.exists()


def _guarded(location: Location, removed: bool = False) -> AbstractContextManager[bool]:
    """Keep others out while a lease is read and written; yields whether that was possible."""
    if not location.is_local:
        return nullcontext(False)
    return guarded(location.path.with_name(f"{location.name}.guard"), removed)


def _storage_errors(verb: str, location: Location, what: str) -> AbstractContextManager[None]:
    """Inside, an OSError becomes one line."""
    advice = f"; give access to {location.parent}, or use another directory"
    return failure_as(ClusterError, f"cannot {verb} {location} for {what}", advice)


def _inode(location: Location) -> int | None:
    """The inode of a lease's directory; None in an object store, or if the directory is missing."""
    with suppress(OSError):
        return location.path.parent.stat().st_ino if location.is_local else None
    return None


def _machine() -> str:
    """What tells this boot of the kernel, and this process namespace (containers have one), apart."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def _state_and_start(pid: int) -> tuple[str | None, int | None]:
    """A process's state letter and start in ticks since boot, from proc(5); None where unknown."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace")
    except OSError:
        return None, None
    fields = text.rpartition(")")[2].split()  # the name, in brackets, may contain any character
    return fields[0], int(fields[19])
