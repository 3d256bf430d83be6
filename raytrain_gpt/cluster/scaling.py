"""The number of workers while nodes come and go: wait for enough, and detect room for more.

Ray's elastic mode is off: it resizes without saving, to worker counts that do not divide the batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from raytrain_gpt.cluster.capacity import Resources, largest_world_size
from raytrain_gpt.config.resolved import workers_of
from raytrain_gpt.config.schema import Config
from raytrain_gpt.format import Log, count

WAIT_LINE_EVERY_S = 60.0
POLL_S = 1.0

Pause = Callable[[float], None]
"""Waits for some seconds; raises on a stop signal."""


class ScaleUp:
    """Detects that more workers have been available for long enough to restart with them.

    A restart costs several steps' time and autoscalers add nodes one by one; hence the wait.
    """

    def __init__(self, config: Config, world_size: int) -> None:
        self._config, self._world_size = config, world_size
        self._since: float | None = None
        self._is_due = world_size < workers_of(config).num_workers

    def is_due(self, resources: Callable[[], Resources], now: float) -> bool:
        """Whether to restart; true at most once. Calls `resources` only below `num_workers`."""
        if not self._is_due:
            return False
        possible = largest_world_size(self._config, resources())
        if possible is None or possible <= self._world_size:
            self._since = None
            return False
        self._since = now if self._since is None else self._since
        self._is_due = now - self._since < self._config.cluster.resize_after_s
        return not self._is_due


def wait_for_workers(
    config: Config,
    current: int,
    resources: Callable[[], Resources],
    pause: Pause,
    log: Log,
) -> int:
    """Return the largest number of workers that fits; waits while it is below `min_workers`.

    Logs a number that differs from `current`.
    """
    c = workers_of(config)
    said_at = -math.inf
    while True:
        available = resources()
        world_size = largest_world_size(config, available)
        if world_size is not None:
            if world_size != current or math.isfinite(said_at):
                log(f"{world_size} of {count(c.num_workers, 'worker')}")
            return world_size
        if time.monotonic() - said_at >= WAIT_LINE_EVERY_S:
            said_at = time.monotonic()
            log(
                f"waiting for nodes: the run needs {count(c.least_workers, 'worker')}, the cluster has "
                f"{count(available.cpus, 'CPU', form='g')} and {count(available.gpus, 'GPU')}"
            )
        pause(POLL_S)
