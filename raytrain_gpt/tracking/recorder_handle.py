"""Handles of a recorder: in an actor on the driver's node, or in a thread of this process."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain_gpt.tracking.recorder import Recorder, RecorderSpec

_CALLS_AT_ONCE = 10_000
"""Concurrent calls of the actor, one waiting heartbeat per rank; Ray's 1,000 could block commands."""


class RecorderHandle(ABC):
    """Caller of a recorder's methods."""

    @abstractmethod
    def send(self, method: str, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        """Call a method; return a function that waits for its result."""

    def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.send(method, *args, **kwargs)()

    @abstractmethod
    def end(self) -> None:
        """End the recorder; calls that were not awaited may be lost."""


class ActorRecorder(RecorderHandle):
    """A recorder in a separate process on this node, which has the files; the handle can be sent anywhere.

    Every call and wait raises `RayActorError` once the recorder is dead.
    """

    def __init__(self, spec: RecorderSpec) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"num_cpus": 0, "max_concurrency": _CALLS_AT_ONCE, "scheduling_strategy": here}
        self._actor: Any = ray.remote(**options)(Recorder).remote(spec)

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
