"""What the driver tells every worker of an attempt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raytrain_gpt.checkpoint.catalog import Checkpoint
from raytrain_gpt.config.resolved import RunPlan
from raytrain_gpt.ingest.ray_dataset import IngestSpec
from raytrain_gpt.storage.location import Location
from raytrain_gpt.tracking.run_files import Row


@dataclass(frozen=True)
class WorkerSpec:
    """What the driver tells every worker.

    Attributes:
        resumed: Checkpoint that the run goes on from; None: a new run.
        rows_before: The last rows of steps before, for judging whether the next ones are spikes.
        attempt: Number of this attempt; Ray knows the `fit()` by it.
        lease_token: The driver's; a worker makes no file final once another process holds the lease.
        choices: Ray's reference to HellaSwag; None: it is not scored here.
        is_trial: A sweep decides after every evaluation whether the run goes on.
        recorder: Handle of the recorder actor.
    """

    plan: RunPlan
    run_dir: Location
    ingest: IngestSpec
    resumed: Checkpoint | None
    rows_before: list[Row]
    attempt: int
    lease_token: str
    choices: Any
    is_trial: bool
    recorder: Any = None
