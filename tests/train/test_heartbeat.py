"""A rank's connection to the recorder, with a recorder in this process instead of an actor."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions

from raytrain_gpt.tracking.recorder_handle import RecorderHandle
from raytrain_gpt.train import heartbeat
from raytrain_gpt.train.heartbeat import RankControl, RecorderClient

# Where a rank would kill its process, its heartbeat thread here ends with SystemExit.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

WAIT_S = 10.0


class FakeRecorder(RecorderHandle):
    """Recorder handle that records every call and replies to heartbeats with queued orders."""

    def __init__(self) -> None:
        self.calls: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue()
        self.orders: queue.Queue[list[str]] = queue.Queue()
        self.beats: list[tuple[Any, ...]] = []
        self.error: Exception | None = None
        self.num_in_order = 0

    def send(self, method: str, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        if method == "in_order":
            _, number, method, *args = args  # type: ignore[assignment]
            assert number == self.num_in_order
            self.num_in_order += 1
        if method != "beat":
            self.calls.put((method, tuple(args)))
            return lambda: None
        if self.error is not None:
            raise self.error
        self.beats.append(args)
        try:
            orders = self.orders.get(timeout=0.01)
        except queue.Empty:
            orders = []
        return lambda: orders

    def end(self) -> None:
        """Do nothing; there is no recorder process."""

    def called(self) -> list[tuple[str, tuple[Any, ...]]]:
        found = []
        while not self.calls.empty():
            found.append(self.calls.get())
        return found


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event that is set when the process would exit."""
    ended = threading.Event()

    def exit_(code: int) -> None:
        ended.set()
        raise SystemExit(code)  # ends the thread

    context = SimpleNamespace(get_node_id=lambda: "node-1")
    there = SimpleNamespace(get_runtime_context=lambda: context, exceptions=ray.exceptions)
    monkeypatch.setattr(heartbeat, "ray", there)
    monkeypatch.setattr(heartbeat.os, "_exit", exit_)
    monkeypatch.setattr(heartbeat, "SEND_EVERY_S", 0.02)
    return ended


@pytest.fixture
def connect(
    exits: threading.Event,
) -> Iterator[Callable[[int], tuple[RecorderClient, FakeRecorder]]]:
    made = []

    def make(rank: int) -> tuple[RecorderClient, FakeRecorder]:
        recorder = FakeRecorder()
        made.append((RecorderClient(recorder, rank, None), recorder))
        return made[-1]

    yield make
    for client, recorder in made:
        client.close()
        recorder.error = ConnectionError("closed")
    wait_until(no_heartbeats)


def no_heartbeats() -> bool:
    """Whether all heartbeat threads have ended; none may outlive the fake of Ray."""
    return not any(thread.name == "heartbeat" for thread in threading.enumerate())


Connect = Callable[[int], tuple[RecorderClient, FakeRecorder]]


def wait_until(condition: Callable[[], bool]) -> None:
    waiting = threading.Event()
    for _ in range(round(WAIT_S / 0.01)):
        if condition():
            return
        waiting.wait(0.01)
    raise AssertionError("the condition did not become true in time")


ROW = {"step": 5, "val/loss": 2.0}


def test_a_driver_in_this_process_decides_after_all_rows_are_written(
    exits: threading.Event,
) -> None:
    recorder, control = FakeRecorder(), RankControl()
    client = RecorderClient(recorder, 0, control)
    client.training_started()
    client.rows([ROW], force=True)
    seen: list[Any] = []
    control.evaluated = lambda row: seen.append((row, recorder.called()))
    assert client.await_scheduler(ROW) is True
    assert seen == [(ROW, [("training_started", ()), ("add_rows", ([ROW],))])]
    control.stop.set()
    assert client.await_scheduler(ROW) is False
    assert control.is_training
    client.close()
    assert not control.is_training
    assert no_heartbeats()


def test_heartbeats_tell_how_far_a_rank_has_come(connect: Connect) -> None:
    client, recorder = connect(3)
    for _ in range(5):
        client.progress()
    wait_until(lambda: bool(recorder.beats) and recorder.beats[-1][1] == 5)
    rank, progress, pid, node, seen = recorder.beats[-1]
    assert (rank, progress, pid, node, seen) == (3, 5, heartbeat.os.getpid(), "node-1", 0)


def test_orders_reach_the_rank_once(connect: Connect) -> None:
    client, recorder = connect(0)
    assert not client.stop.is_set()
    recorder.orders.put(["dump", "continue_run"])
    assert client.await_scheduler(ROW) is True
    recorder.orders.put(["stop"])
    assert client.stop.wait(WAIT_S)
    assert client.await_scheduler(ROW) is False
    wait_until(lambda: recorder.beats[-1][4] == 3)
    (name, (rank, stacks)), *evaluated = sorted(recorder.called())
    assert (name, rank) == ("add_stacks", 0)
    assert evaluated == [("evaluated", (ROW,))] * 2
    assert "MainThread" in stacks
    assert "test_heartbeat.py" in stacks


def test_rows_of_rank_0_go_out_in_order_and_not_too_often(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, recorder = connect(0)
    client.rows([{"step": 1}])
    monkeypatch.setattr(heartbeat, "SEND_EVERY_S", 1e9)
    client.rows([{"step": 2}])
    client.rows([{"step": 3}])
    client.event(3, "checkpoint", path="a")
    sent = [[row["step"] for row in args[0]] for name, args in recorder.called()]
    assert sent == [[1], [2, 3, 3]]
    client.rows([{"step": 4}])
    client.close()
    assert recorder.called() == [("add_rows", ([{"step": 4}],))]


def test_a_rank_whose_recorder_died_ends_itself(connect: Connect, exits: threading.Event) -> None:
    _, recorder = connect(0)
    recorder.error = ray.exceptions.ActorDiedError()
    assert exits.wait(WAIT_S)


def test_a_recorder_out_of_reach_is_waited_for_before_a_rank_ends_itself(
    connect: Connect, exits: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, recorder = connect(0)
    recorder.error = ConnectionError("the network")
    assert not exits.wait(0.1)
    recorder.error = None
    client.progress()
    wait_until(lambda: recorder.beats[-1][1] == 1)
    monkeypatch.setattr(heartbeat, "RECORDER_TIMEOUT_S", 0.05)
    recorder.error = ConnectionError("the network")
    assert exits.wait(WAIT_S)
