"""One live writer for a directory, on local disks, shared directories and object stores.

A lease is a small JSON file that says who holds it. The holder counts its `beat` up every
`HEARTBEAT_S` and removes the file at the end. Whoever finds one that was left behind needs no hand:

1. The holder was a process of this host: the kernel knows whether it lives. If so, the new one is
   refused at once, else it takes over at once.
2. It was elsewhere, or the file is damaged: the beat is watched. If it moves, the new one is refused;
   after `EXPIRY_S` without a move it takes over. Two hosts' clocks are never compared.
3. Looking and taking are one step under a lock of the operating system. Where there is none (object
   stores, some shared directories), the new one waits `SETTLE_S` and looks again: of two at the same
   moment only the last one still finds its own token.

A holder that was taken for dead, but was only frozen or cut off, finds another token or no file at
its next beat, and knows that the lease is lost.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO

from raytrain_gpt.errors import ClusterError, RaytrainGptError
from raytrain_gpt.storage.location import Location

LEASE_FILE = ".lease"
HEARTBEAT_S = 10.0
EXPIRY_S = 60.0
SETTLE_S = 2.0
"""Longer than the time between looking at an object store and writing to it, shorter than a beat."""

_POLLS_PER_EXPIRY, _LINES_PER_EXPIRY = 60, 6
_GUARD_WAIT_S, _GUARD_PAUSE_S = 10.0, 0.02

_UNKNOWN = "an unknown process"

Log = Callable[[str], None]
_held_here: set[str] = set()
"""Tokens of the leases that this process holds."""


@dataclass(frozen=True)
class Holder:
    """What a lease file says.

    Attributes:
        token: Drawn anew for every lease.
        host: Name of the machine, for people.
        boot_id: The kernel's, drawn at every boot; empty where there is none.
        pid_namespace: Within which `pid` means something: containers have their own.
        pid: Of the process.
        process_started: When the process started, in the kernel's ticks, since pids are used again;
            None where the kernel does not say.
        since: When the lease was taken, for people.
        beat: Goes up by one every `HEARTBEAT_S`.
        beat_at: Unix time of the last beat, for lists of runs only.
    """

    token: str
    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    process_started: int | None
    since: str
    beat: int
    beat_at: float

    @classmethod
    def this_process(cls, token: str) -> Holder:
        """The calling process, from now on."""
        return cls(
            token=token,
            host=socket.gethostname(),
            boot_id=_boot_id(),
            pid_namespace=_pid_namespace(),
            pid=os.getpid(),
            process_started=_state_and_start(os.getpid())[1],
            since=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            beat=0,
            beat_at=time.time(),
        )

    @classmethod
    def parse(cls, text: str) -> Holder | None:
        """The holder in a lease file; None if it is damaged."""
        try:
            found = json.loads(text)
            started = found["process_started"]
            return cls(
                token=str(found["token"]),
                host=str(found["host"]),
                boot_id=str(found["boot_id"]),
                pid_namespace=str(found["pid_namespace"]),
                pid=int(found["pid"]),
                process_started=None if started is None else int(started),
                since=str(found["since"]),
                beat=int(found["beat"]),
                beat_at=float(found["beat_at"]),
            )
        except (ValueError, KeyError, TypeError):
            return None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"

    def to_json(self) -> str:
        """The text of the lease file."""
        return json.dumps(asdict(self))

    def is_alive(self) -> bool | None:
        """Whether the process runs; None for one that cannot be seen from here."""
        here = (_boot_id() or socket.gethostname(), _pid_namespace())
        if (self.boot_id or self.host, self.pid_namespace) != here:
            return None
        state, started = _state_and_start(self.pid)
        if state in ("Z", "X"):  # dead, and only not yet collected by its parent
            return False
        if None not in (started, self.process_started) and started != self.process_started:
            return False
        if self.pid == os.getpid():
            # A lease that could not be removed, because the storage was gone, is held no more.
            return self.token in _held_here
        try:
            os.kill(self.pid, 0)
        except PermissionError:  # another user's
            return True
        except (ProcessLookupError, OverflowError):
            return False
        return True


@contextmanager
def held_lease(
    location: Location,
    what: str,
    log: Log | None = None,
    *,
    heartbeat_s: float = HEARTBEAT_S,
    expiry_s: float = EXPIRY_S,
    settle_s: float = SETTLE_S,
) -> Iterator[Lease]:
    """Hold a lease, beating in a thread; what it is for should look at `Lease.lost` now and then.

    Args:
        location: The lease file.
        what: What it stands for, for messages: `run NAME`.
        log: Gets a line when a holder that is gone is replaced, and while it waits for that.
        heartbeat_s: Between beats.
        expiry_s: A beat that does not move for so long counts as gone.
        settle_s: Where nothing locks, how long it waits to see whether somebody wrote after it.

    Raises:
        ClusterError: somebody else holds it, says who and since when; or it cannot be written.
        StorageError: the object store is out of reach.
    """
    lease = Lease(location, what, log or _no_log, heartbeat_s, expiry_s, settle_s)
    done = threading.Event()
    # A daemon, so that an error which leaves the context unentered cannot keep the process.
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


def still_held(location: Location, token: str) -> bool:
    """Whether a lease is still the one of a token; asked by who writes for its holder elsewhere."""
    with _storage_errors("read", location, "a lease"):
        text = _read(location)
    holder = Holder.parse(text) if text else None
    return holder is not None and holder.token == token


def live_holder(location: Location) -> str | None:
    """Who seems to hold a lease, None if nobody: for lists, since elsewhere a clock decides.

    Args:
        location: The lease file.

    Raises:
        ClusterError: it cannot be read.
    """
    with _storage_errors("read", location, "a lease"):
        text = _read(location)
    holder = Holder.parse(text) if text else None
    if holder is None:
        return None
    alive = holder.is_alive()
    if alive is None:
        alive = time.time() - holder.beat_at <= EXPIRY_S
    return str(holder) if alive else None


class Lease:
    """A lease that is being taken or held; made by `held_lease`.

    Attributes:
        token: What is this lease's alone.
        lost: Set once somebody else has taken the lease over, or removed it.
    """

    def __init__(
        self,
        location: Location,
        what: str,
        log: Log,
        heartbeat_s: float,
        expiry_s: float,
        settle_s: float,
    ) -> None:
        self.lost = threading.Event()
        self._location = location
        self._what = what
        self._log = log
        self._heartbeat_s = heartbeat_s
        self._expiry_s = expiry_s
        self._settle_s = settle_s
        self.token = uuid.uuid4().hex
        self._has_put = False
        # A beat or removal that is tried again for minutes could overwrite who took over meanwhile.
        self._impatient = replace(location, retry_for_s=min(location.retry_for_s, heartbeat_s))

    def check(self) -> None:
        """Do nothing while the lease is held.

        Raises:
            ClusterError: it is lost.
        """
        if self.lost.is_set():
            raise ClusterError(
                f"{self._what} was taken over while this process was frozen or cut off from "
                f"{self._location} for {self._expiry_s:g} s or more, or that file was removed; this "
                "process writes no more. Leave the other one alone, or stop it and start again"
            )

    def verify(self) -> None:
        """Look now, not at the next beat.

        Raises:
            ClusterError: it is lost.
        """
        if not still_held(self._location, self.token):
            self.lost.set()
        self.check()

    def acquire(self) -> None:
        """Take the lease, waiting for a holder elsewhere that may be gone.

        Raises:
            ClusterError: somebody else holds it; or it cannot be written.
            StorageError: the object store is out of reach.
        """
        watch = _Watch(self._what, self._log, self._expiry_s)
        with _storage_errors("write", self._location, self._what):
            self._location.parent.mkdir()
            while not self._try(watch):
                time.sleep(self._expiry_s / _POLLS_PER_EXPIRY)
            text = _read(self._location)
        holder = Holder.parse(text) if text else None
        if holder is None or holder.token != self.token:
            raise _in_use(self._what, holder)

    def _try(self, watch: _Watch) -> bool:
        """Look at the lease, and take it if it is free; False: look again soon."""
        with _guarded(self._location) as alone:
            looked_at = time.monotonic()
            text = _read(self._location)
            if text is not None and not watch.is_free(text, looked_at):
                return False
            if not self._put(is_first=text is None):
                return False
        # Who waited for a holder elsewhere may have waited together with a third host.
        if not alone or watch.began_at is not None:
            time.sleep(self._settle_s)
        return True

    def _put(self, is_first: bool) -> bool:
        """Write the lease; a first one on a disk only if there still is none."""
        self._has_put = True
        text = Holder.this_process(self.token).to_json()
        if not (is_first and self._location.is_local):
            self._location.write_text(text)
            return True
        try:
            # Only one of two hosts can do this, even where their locks do not meet.
            with self._location.path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            return False
        return True

    def beat_until(self, done: threading.Event) -> None:
        """Beat until `done` is set or the lease is lost."""
        try:
            while not done.wait(self._heartbeat_s) and not self.lost.is_set():
                # The storage is out of reach, for others too: the next beat tries again.
                with suppress(OSError, RaytrainGptError):
                    self._beat()
        finally:
            if not done.is_set():
                self.lost.set()

    def _beat(self) -> None:
        with _guarded(self._location):
            holder = self._ours()
            if holder is None:
                self.lost.set()
                return
            moved = replace(holder, beat=holder.beat + 1, beat_at=time.time())
            self._impatient.write_text(moved.to_json())

    def release(self) -> None:
        """Remove the file if it is ours; what cannot be removed now expires by itself."""
        if not self._has_put:
            return
        try:
            with _guarded(self._location):
                if self._ours() is not None:
                    self._impatient.remove()
        except (OSError, RaytrainGptError):
            self._log(
                f"could not remove {self._location}; {self._what} is free when this process has "
                f"ended, and {self._expiry_s:g} s later for other machines"
            )

    def _ours(self) -> Holder | None:
        """What the file says, None if it is gone or not of this lease."""
        text = _read(self._impatient)
        holder = Holder.parse(text) if text else None
        return holder if holder is not None and holder.token == self.token else None


class _Watch:
    """Decides whether a lease is free, over several looks at it.

    Attributes:
        began_at: When watching a holder elsewhere began, None if there was no need.
    """

    def __init__(self, what: str, log: Log, expiry_s: float) -> None:
        self.began_at: float | None = None
        self._what = what
        self._log = log
        self._expiry_s = expiry_s
        self._first: object = None
        self._last_look_at = 0.0
        self._next_line_s = math.inf

    def is_free(self, text: str, looked_at: float) -> bool:
        """Whether the holder is gone; False: look again.

        Args:
            text: Of the lease file.
            looked_at: Monotonic time just before it was read.

        Raises:
            ClusterError: the holder is alive.
        """
        holder = Holder.parse(text)
        alive = None if holder is None else holder.is_alive()
        if alive is False:
            self._log(f"{self._what} was held by {holder}, which is gone; taking over")
            return True
        seen = text if holder is None else (holder.token, holder.beat)
        if alive or (self.began_at is not None and seen != self._first):
            raise _in_use(self._what, holder)
        # After an outage of the storage, or a sleep of this host, the holder gets its time again.
        if self.began_at is None or looked_at - self._last_look_at > self._expiry_s / 2:
            self.began_at, self._first = time.monotonic(), seen
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


@contextmanager
def _storage_errors(verb: str, location: Location, what: str) -> Iterator[None]:
    """Turn an OSError into one line."""
    try:
        yield
    except OSError as error:
        why = error.strerror or " ".join(str(error).split())
        raise ClusterError(
            f"cannot {verb} {location} for {what}: {why}; give access to {location.parent}, or use "
            "another directory"
        ) from None


@contextmanager
def _guarded(location: Location) -> Iterator[bool]:
    """Keep others out while a lease is read and written; yields whether that was possible."""
    file = _opened(location.path.with_name(f"{location.name}.guard")) if location.is_local else None
    if file is None:
        yield False
        return
    with file:
        locked = _locked(file)
        try:
            yield locked
        finally:
            if locked:  # closing is not enough where a forked child has the file open, too
                fcntl.flock(file, fcntl.LOCK_UN)


def _opened(guard: Path) -> IO[str] | None:
    """The guard's file, made if need be; None if its directory is gone, which stays so."""
    try:
        return guard.open("a", encoding="utf-8")
    except FileNotFoundError:
        return None


def _locked(file: IO[str]) -> bool:
    """Lock a file, unless it cannot be locked or somebody was frozen while holding it."""
    give_up_at = time.monotonic() + _GUARD_WAIT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            is_held = error.errno in (errno.EAGAIN, errno.EACCES)
            if not is_held or time.monotonic() > give_up_at:
                return False
        time.sleep(_GUARD_PAUSE_S)


def _no_log(_line: str) -> None:
    pass


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _state_and_start(pid: int) -> tuple[str | None, int | None]:
    """A process's state letter and start in ticks since boot, from proc(5); None where unknown."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace")
    except OSError:
        return None, None
    fields = text.rpartition(")")[2].split()  # the name, in brackets, may have any character
    return fields[0], int(fields[19])
