"""Where a recorder runs: an actor on the driver's node, or a thread of this process; both are asked alike."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain_gpt.format import Log
from raytrain_gpt.tracking.recorder import Recorder, RecorderSpec

CALLS_AT_ONCE = 10_000
"""Of the actor; each rank has a heartbeat that waits. With Ray's 1,000 of them an order would wait, too."""


class RecorderHandle(ABC):
    """Calls a recorder's methods; it takes one caller's calls in order."""

    @abstractmethod
    def send(self, method: str, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        """Call a method without waiting; returns a function that waits for its result."""

    def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method and wait for its result."""
        return self.send(method, *args, **kwargs)()

    @abstractmethod
    def end(self) -> None:
        """End the recorder; what was sent before and not waited for may be lost."""


class ActorRecorder(RecorderHandle):
    """A recorder in a process of its own on this node, where the files are; the handle may be sent anywhere.

    Every call and wait raises `RayActorError` once the recorder is dead.
    """

    def __init__(self, spec: RecorderSpec) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"num_cpus": 0, "max_concurrency": CALLS_AT_ONCE, "scheduling_strategy": here}
        actor: Any = ray.remote(**options)(Recorder)
        self._actor = actor.remote(spec)

    def send(self, method: str, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        return partial(ray.get, getattr(self._actor, method).remote(*args, **kwargs))

    def end(self) -> None:
        ray.kill(self._actor)


class ThreadRecorder(RecorderHandle):
    """A recorder in a thread of this process."""

    def __init__(self, spec: RecorderSpec) -> None:
        self._recorder = Recorder(spec)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="recorder", daemon=True)
        self._thread.start()

    def send(self, method: str, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        call = getattr(self._recorder, method)(*args, **kwargs)
        return asyncio.run_coroutine_threadsafe(call, self._loop).result

    def end(self) -> None:
        # Not by this thread's loop: a notebook's cells run inside one.
        done = self._loop.shutdown_default_executor()
        asyncio.run_coroutine_threadsafe(done, self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class ConsoleRecorder(RecorderHandle):
    """Stands for the recorder in the other ranks of a run without Ray, whose lines alone are of use."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def send(self, method: str, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        if method == "log":
            rank, line = args
            self._log(f"[rank {rank}] {line}")
        return lambda: None

    def end(self) -> None:
        pass
