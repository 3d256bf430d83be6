"""One live writer: real processes that hold the lease, are killed or frozen, or start simultaneously."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from raytrain_gpt.errors import ClusterError, StorageError
from raytrain_gpt.storage import lease as lease_module
from raytrain_gpt.storage.lease import (
    LEASE_FILE,
    TIMES,
    Holder,
    Lease,
    LeaseTimes,
    hold_lease,
    live_holder,
)
from raytrain_gpt.storage.location import Location
from tests.conftest import raises_line
from tests.s3 import S3Server

FAST = LeaseTimes(heartbeat_s=0.05, expiry_s=0.2, settle_s=0.0)
BETWEEN_BEATS_S = 0.5
"""Long enough to freeze a process between taking the lease and its next write, in seconds."""
WATCHED_S = 6.0
"""Long enough for a beat, short enough for frequent reads (60 in this time), in seconds."""
WAIT_S = 30.0
"""Time limit of immediate events, so that a failing test ends, in seconds."""

HOLD = """
import json, socket, sys
from raytrain_gpt.storage.location import Location
from raytrain_gpt.errors import ClusterError
from raytrain_gpt.storage import lease
url, elsewhere, times = json.loads(sys.argv[1])
if elsewhere:
    lease.machine = lambda *_: "another machine"
    socket.gethostname = lambda: "elsewhere"
def say(line):
    print(line, flush=True)
try:
    with lease.hold_lease(Location.of(url), "run x", say, lease.LeaseTimes(**times)) as held:
        say("held")
        if elsewhere:
            held.lost.wait()
            say("lost")
        sys.stdin.readline()
except ClusterError as error:
    say(f"refused: {error}")
"""


class Process:
    """Process that takes a lease at its start, and releases it on `go_on`."""

    def __init__(self, location: Location, elsewhere: bool, **times: float) -> None:
        arguments = json.dumps([str(location), elsewhere, asdict(replace(FAST, **times))])
        self._process = subprocess.Popen(
            [sys.executable, "-c", HOLD, arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def stop(self) -> None:
        """Freeze the process, and wait until it is frozen."""
        self.send(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def kill(self, collect: bool = True) -> None:
        """Kill the process, and wait until it is dead; without `collect` it stays a zombie."""
        self.send(signal.SIGKILL)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        if collect:
            self._process.wait()

    def wait(self) -> None:
        """Wait until the process has exited normally."""
        assert self._process.wait(WAIT_S) == 0

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


Start = Callable[..., Process]
Refused = Callable[..., None]


@pytest.fixture
def start() -> Iterator[Start]:
    """Yield a function that starts a process and waits until it has the lease."""
    started: list[Process] = []

    def go(location: Location, *, elsewhere: bool = False, **times: float) -> Process:
        process = Process(location, elsewhere, **times)
        started.append(process)
        assert process.line() == "held"
        return process

    yield go
    for process in started:
        process.close()


@pytest.fixture
def location(tmp_path: Path) -> Location:
    """Return the lease file of a run that does not exist yet."""
    return Location.of(tmp_path / "x" / LEASE_FILE)


@pytest.fixture
def refused() -> Refused:
    """Return a function that checks that a lease is refused in one line with these words."""

    def check(location: Location, *words: str, **options: Any) -> None:
        with raises_line(ClusterError, *words), hold_lease(location, "run x", **options):
            pass

    return check


def elsewhere(**changes: Any) -> Holder:
    """Return a holder on a different machine, whose processes are invisible here."""
    changes |= {"host": "elsewhere", "machine": "another machine"}
    return Holder.this_process("another").model_copy(update=changes)


def dead() -> Holder:
    """Return a holder on this machine whose process is gone and whose pid was reused."""
    return Holder.this_process("another").model_copy(update={"process_started": 1})


def token_in(location: Location) -> str:
    holder = Holder.parse(location.read_text())
    assert holder is not None
    return holder.token


def test_every_beat_has_the_same_length() -> None:
    """An object replaced between the requests for its size and its content is not truncated."""
    holders = [elsewhere(beat=beat, beat_at=beat / 7) for beat in (1, 10, 1_000_000)]
    assert len({len(holder.to_text()) for holder in holders}) == 1


def test_a_lease_is_a_file_while_it_is_held(location: Location) -> None:
    assert live_holder(location) is None
    with hold_lease(location, "run x", times=FAST) as lease:
        assert live_holder(location) is not None
        lease.check()
        assert not lease.lost.is_set()
    assert not location.exists()
    assert live_holder(location) is None


@pytest.mark.parametrize("is_there", [False, True])
def test_an_error_leaves_nothing_that_was_not_there(location: Location, is_there: bool) -> None:
    if is_there:
        location.parent.mkdir()
    with pytest.raises(KeyError), hold_lease(location, "run x"):
        raise KeyError
    assert location.parent.exists() == is_there
    assert location.parent.names() == []


def test_a_held_lease_that_is_renamed_is_still_held(
    location: Location, start: Start, refused: Refused, tmp_path: Path
) -> None:
    start(location, expiry_s=WAIT_S)
    moved = location.parent.path.rename(tmp_path / "moved")
    (tmp_path / "link").symlink_to(moved)
    for path in (moved, tmp_path / "link"):
        refused(Location.of(path / LEASE_FILE), "run x is in use", times=FAST)


def test_a_process_of_this_host_is_refused_at_once(
    location: Location, start: Start, refused: Refused
) -> None:
    holder = start(location)
    words = ["run x is in use", f"process {holder.pid} on", " UTC); stop that process first"]
    refused(location, *words)
    assert f"process {holder.pid} on" in str(live_holder(location))
    holder.go_on()
    holder.wait()
    with hold_lease(location, "run x"):
        pass


def test_a_frozen_process_of_this_host_keeps_its_lease(
    location: Location, start: Start, refused: Refused
) -> None:
    holder = start(location, heartbeat_s=BETWEEN_BEATS_S)
    holder.stop()
    refused(location, f"process {holder.pid} on")


def test_the_same_process_is_refused(location: Location, refused: Refused) -> None:
    with hold_lease(location, "run x") as lease:
        refused(location, f"process {os.getpid()} on")
        assert not lease.lost.is_set()
        assert location.exists()


@pytest.mark.parametrize("collect", [True, False], ids=["gone", "zombie"])
def test_a_killed_process_needs_no_hand(location: Location, start: Start, collect: bool) -> None:
    holder = start(location)
    holder.kill(collect)
    assert location.exists()
    assert live_holder(location) is None
    lines: list[str] = []
    with hold_lease(location, "run x", lines.append):  # with an expiry of a minute
        assert f"process {os.getpid()} on" in str(live_holder(location))
    (line,) = lines
    assert line.startswith(f"run x was held by process {holder.pid} on")
    assert line.endswith("which is dead; taking over")


TEN = """
import json, multiprocessing, os, sys
from raytrain_gpt.storage.location import Location
from raytrain_gpt.errors import ClusterError
from raytrain_gpt.storage import lease
context = multiprocessing.get_context("fork")
begin, end, lines = context.Barrier(10), context.Event(), context.SimpleQueue()
def take():
    begin.wait()
    try:
        with lease.hold_lease(Location.of(sys.argv[1]), "run x", lambda line: None):
            lines.put((os.getpid(), "held"))
            end.wait()
    except ClusterError as error:
        lines.put((os.getpid(), str(error)))
processes = [context.Process(target=take) for _ in range(10)]
for process in processes:
    process.start()
print(json.dumps([lines.get() for _ in processes]))
end.set()
for process in processes:
    process.join()
"""
"""One interpreter that forks ten processes; starting each would take a third of a second."""


@pytest.mark.fault("two runs with one name", "second refused; stale lease taken")
def test_of_ten_processes_at_once_one_gets_it(location: Location) -> None:
    location.write_text(dead().to_text())
    done = subprocess.run(
        [sys.executable, "-c", TEN, str(location)],
        stdout=subprocess.PIPE,
        check=True,
        timeout=WAIT_S,
    )
    lines = dict(json.loads(done.stdout))
    (winner,) = (pid for pid, line in lines.items() if line == "held")
    refusals = [line for line in lines.values() if line != "held"]
    assert len(refusals) == 9
    assert all(f"run x is in use (process {winner} on" in line for line in refusals)


def test_a_process_elsewhere_that_beats_is_not_disturbed(
    location: Location, start: Start, refused: Refused
) -> None:
    holder = start(location, elsewhere=True)
    lines: list[str] = []
    words, times = (
        f"in use (process {holder.pid} on elsewhere since",
        LeaseTimes(expiry_s=WATCHED_S),
    )
    refused(location, words, log=lines.append, times=times)
    assert "taking over in 6 s unless it renews its lease" in lines[0]
    assert f"process {holder.pid} on elsewhere" in str(live_holder(location))


def test_a_frozen_process_elsewhere_is_replaced_and_notices(
    location: Location, start: Start
) -> None:
    holder = start(location, elsewhere=True, heartbeat_s=BETWEEN_BEATS_S)
    holder.stop()
    lines: list[str] = []
    began = time.monotonic()
    with hold_lease(location, "run x", lines.append, FAST) as lease:
        assert time.monotonic() - began >= FAST.expiry_s
        holder.send(signal.SIGCONT)
        assert holder.line() == "lost"
        holder.go_on()
        holder.wait()
        lease.check()
        assert f"process {os.getpid()} on" in str(live_holder(location))
    assert lines
    for line in lines:
        assert line.startswith(f"run x was held by process {holder.pid} on elsewhere since")


@pytest.mark.fault("clock skew", "ordered by step, never by time")
def test_clocks_do_not_matter(location: Location) -> None:
    location.write_text(elsewhere(beat_at=time.time() + 1e6).to_text())
    began = time.monotonic()
    with hold_lease(location, "run x", times=FAST):
        assert time.monotonic() - began >= FAST.expiry_s


def test_a_list_goes_by_the_time_of_the_last_beat(location: Location) -> None:
    location.write_text(elsewhere(beat_at=time.time() - TIMES.expiry_s / 2).to_text())
    assert " on elsewhere since" in str(live_holder(location))
    location.write_text(elsewhere(beat_at=time.time() - TIMES.expiry_s - 1).to_text())
    assert live_holder(location) is None


NO_PID = Holder.this_process("t").model_copy(update={"pid": -1}).to_text().encode()


@pytest.mark.parametrize("content", [b"", b"\xff\x00", NO_PID])
def test_a_damaged_lease_expires(location: Location, content: bytes) -> None:
    location.write_bytes(content)
    assert live_holder(location) is None
    lines: list[str] = []
    with hold_lease(location, "run x", lines.append, FAST):
        pass
    assert lines[0].startswith("run x was held by an unknown process; taking over in ")


@pytest.mark.parametrize("left", [elsewhere().to_text(), "{"], ids=["elsewhere", "damaged"])
def test_a_lease_that_changes_while_it_is_watched_is_in_use(
    location: Location, refused: Refused, left: str
) -> None:
    location.write_text(left)

    def move(_line: str) -> None:
        location.write_text(elsewhere(beat=1).to_text())

    refused(location, "in use (process", log=move, times=FAST)
    assert token_in(location) == "another"


def test_time_in_which_nobody_could_look_does_not_count(
    location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a storage outage, the holder's full expiry time restarts."""
    location.write_text(elsewhere().to_text())
    now, lines = [0.0], list[str]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    watch = lease_module.Lease(location, "run x", lines.append, lease_module.TIMES)
    for at, line in [(0, 60), (20, 40), (40, 20), (90, 60), (120, 30), (149, 1)]:
        now[0] = at
        assert not watch._is_free(location.read_text(), at)
        assert f"in {line} s" in lines[-1]
    now[0] = 150
    assert watch._is_free(location.read_text(), 150)


def replaced(location: Location) -> None:
    location.write_text(elsewhere().to_text())


def removed_with_its_directory(location: Location) -> None:
    location.parent.remove()


@pytest.mark.parametrize("change", [replaced, removed_with_its_directory])
def test_a_lost_lease_is_noticed_and_left_alone(
    location: Location, change: Callable[[Location], None]
) -> None:
    with hold_lease(location, "run x", pytest.fail, FAST) as lease:
        with lease_module._guarded(location):  # otherwise a beat may overwrite the change
            change(location)
        assert lease.lost.wait(WAIT_S)
        with raises_line(ClusterError, "lost the lease on run x: ", str(location)):
            lease.check()
    assert location.exists() == (change is replaced)
    assert location.parent.exists() == (change is not removed_with_its_directory)


def test_an_outage_is_not_a_loss(location: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    write, works = Location.write_text, threading.Event()
    failures = [StorageError("gone"), OSError("gone"), StorageError("gone")]

    def write_if_it_works(where: Location, text: str) -> None:
        if failures:
            raise failures.pop()
        write(where, text)
        works.set()

    monkeypatch.setattr(Location, "write_text", write_if_it_works)
    with hold_lease(location, "run x", times=FAST) as lease:
        assert works.wait(WAIT_S)
        lease.check()
    assert not location.exists()


def test_what_stops_the_beat_for_good_counts_as_a_loss(
    location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with hold_lease(location, "run x", times=FAST) as lease:
        monkeypatch.setattr(Location, "write_text", None)
        assert lease.lost.wait(WAIT_S)


def test_a_lease_that_cannot_be_removed_is_told_and_hides_no_error(
    location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Location) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Location, "remove", refuse)
    lines: list[str] = []
    with pytest.raises(KeyError), hold_lease(location, "run x", lines.append):
        raise KeyError
    assert len(lines) == 1
    assert f"cannot remove {location}" in lines[0]


def test_a_directory_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    (tmp_path / "file").touch()
    location = Location.of(tmp_path / "file" / "x" / LEASE_FILE)
    refused(location, f"cannot write {location}")

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "open", refuse)
    location, lines = Location.of(tmp_path / LEASE_FILE), list[str]()
    refused(location, str(location), "Read-only file system", log=lines.append)
    assert not lines


def test_a_lease_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with raises_line(ClusterError, f"cannot read {tmp_path}", "Is a directory"):
        live_holder(Location.of(tmp_path))


def outcome(
    location: Location, gone: threading.Event, log: Callable[[str], object], times: LeaseTimes
) -> str:
    """Return `held` or the refusal; a holder keeps the lease until `gone` is set."""
    try:
        with hold_lease(location, "run x", log, times):
            assert gone.wait(WAIT_S)
            return "held"
    except ClusterError as error:
        gone.set()
        return str(error)


def check_one_of_two(
    location: Location, log: Callable[[str], object] = len, times: LeaseTimes = FAST
) -> None:
    gone = threading.Event()
    with ThreadPoolExecutor(2) as threads:
        two = [threads.submit(outcome, location, gone, log, times) for _ in range(2)]
        held, refused = sorted((one.result() for one in two), key=len)
    assert held == "held"
    assert f"run x is in use (process {os.getpid()} on" in refused
    assert not location.exists()


def test_a_first_lease_needs_no_lock(location: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts without a common lock see no lease at the same moment; one of them gets it."""
    both = threading.Barrier(2)
    read = lease_module._read

    def read_together(where: Location) -> str | None:
        text = read(where)
        if text is None and threading.current_thread().name != "lease":
            both.wait(WAIT_S)
        return text

    monkeypatch.setattr(lease_module, "_lock", lambda _: False)
    monkeypatch.setattr(lease_module, "_read", read_together)
    check_one_of_two(location)


def test_who_waits_for_a_lock_whose_file_is_removed_makes_it_again(
    location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, has_it, goes = (threading.Event() for _ in range(3))
    location.parent.mkdir()
    monkeypatch.setattr(lease_module.time, "sleep", lambda _: waits.set())

    def wait_for_it() -> None:
        with lease_module._guarded(location, removed=True) as is_locked:
            assert is_locked
            has_it.set()
            assert goes.wait(WAIT_S)

    thread = threading.Thread(target=wait_for_it)
    with lease_module._guarded(location, removed=True) as is_locked:
        assert is_locked
        thread.start()
        assert waits.wait(WAIT_S)
        assert not has_it.is_set()
    assert has_it.wait(WAIT_S)
    monkeypatch.setattr(lease_module, "_LOCK_WAIT_S", 0.0)
    with lease_module._guarded(location) as is_locked:
        assert not is_locked
    goes.set()
    thread.join()
    assert location.parent.names() == []


@pytest.fixture
def object_lease(s3: S3Server, tmp_path: Path) -> Location:
    """Return a lease file in an object store, with a separate prefix."""
    s3.make_bucket("leases")
    return Location.of(f"s3://leases/{tmp_path.name}/{LEASE_FILE}")


def test_in_an_object_store_the_last_writer_of_two_gets_it(object_lease: Location) -> None:
    """Both see a dead holder and write; each then reads the file again and sees the last writer."""
    both = threading.Barrier(2)
    object_lease.write_text(dead().to_text())
    check_one_of_two(
        object_lease, lambda _: both.wait(WAIT_S), replace(FAST, settle_s=1.0, heartbeat_s=WAIT_S)
    )


def test_in_an_object_store_a_frozen_process_is_replaced_and_notices(
    object_lease: Location, start: Start
) -> None:
    there = start(object_lease, elsewhere=True, heartbeat_s=BETWEEN_BEATS_S)
    there.stop()
    with hold_lease(object_lease, "run x", times=FAST) as lease:
        there.send(signal.SIGCONT)
        assert there.line() == "lost"
        lease.check()


def test_an_outage_of_an_object_store_is_not_a_loss(s3: S3Server, object_lease: Location) -> None:
    with hold_lease(object_lease, "run x", times=FAST) as lease:
        before = object_lease.read_text()
        s3.stop()
        try:
            assert not lease.lost.wait(0.3)
        finally:
            s3.start()
        while object_lease.read_text() == before:
            lease.check()
    assert not object_lease.exists()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_beat_gives_up_where_nobody_answers(scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
    place = Location.of(f"{scheme}://runs/{LEASE_FILE}", endpoint=endpoint)
    with raises_line(StorageError, f"cannot read {place}", "retry_for_s=0.1"):
        Lease(place, "run x", print, LeaseTimes(heartbeat_s=0.1))._beat()


@pytest.mark.fault("run directory renamed or unmounted")
def test_a_directory_that_is_away_for_a_moment_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location, away = Location.of(tmp_path / "run" / LEASE_FILE), tmp_path / "away"
    beats = threading.Event()
    monkeypatch.setattr(Lease, "_beat", lambda _: beats.set())
    with hold_lease(location, "run x", pytest.fail, LeaseTimes(0.05, WAIT_S, 0)) as lease:
        location.parent.path.rename(away)
        monkeypatch.setattr(lease_module.time, "sleep", lambda _: away.rename(location.parent.path))
        lease.verify()
        assert beats.wait(WAIT_S)
    assert not location.exists()


def test_a_beat_while_the_directory_is_away_loses_nothing_and_makes_nothing(tmp_path: Path) -> None:
    location, away = Location.of(tmp_path / "run" / LEASE_FILE), tmp_path / "away"
    with hold_lease(location, "run x", pytest.fail, LeaseTimes(WAIT_S, WAIT_S, 0)) as lease:
        location.parent.path.rename(away)
        lease._beat()
        lease.check()
        assert not location.parent.exists()
        away.rename(location.parent.path)
        lease._beat()
        holder = Holder.parse(location.read_text())
        assert holder is not None
        assert holder.beat == 1
