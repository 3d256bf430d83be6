"""Place where a run trains: a Ray cluster (`on_ray`), or this process (`local_mode`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from raytrain_gpt.cluster.capacity import Pause
from raytrain_gpt.config.schema import Config
from raytrain_gpt.format import Log
from raytrain_gpt.storage.lease import Lease
from raytrain_gpt.storage.location import Location
from raytrain_gpt.tracking.events import Events
from raytrain_gpt.train.worker_group import RankJob, TrainLoop

STOPPING = "stopping: saving a checkpoint first (press Ctrl+C twice more to stop without saving)"


class Place(Protocol):
    retries: bool
    """Whether a new attempt follows a failed one."""

    def check_storage(self, run_dir: Location, data: Sequence[Location]) -> None:
        """Check that all nodes share the directories; raises ClusterError."""

    def await_workers(self, config: Config, current: int, pause: Pause, log: Log) -> int:
        """Return the number of workers for the next attempt, once they fit."""

    def events(self, job: RankJob, train_loop: TrainLoop, lease: Lease) -> Events:
        """Train, and yield the events of rank 0 and the lines of all ranks.

        Setting `job.link.stop` makes the ranks save a checkpoint and exit.

        Raises:
            ClusterError: the lease is lost.
            BaseException: the ranks' error.
        """
