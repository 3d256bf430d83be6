"""`train` on a cluster: connect, train, and shut down a cluster started for the command."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from raytrain_gpt.cluster.capacity import cpus_to_start, fit_to_cluster, idle_gpus
from raytrain_gpt.cluster.connection import connected
from raytrain_gpt.cluster.signals import StopSignals
from raytrain_gpt.config.schema import Config
from raytrain_gpt.data.locations import read_data
from raytrain_gpt.data.mixture import Mixture
from raytrain_gpt.format import Log
from raytrain_gpt.runs.summary import RunSummary
from raytrain_gpt.train import preflight
from raytrain_gpt.train.local_mode import train_locally
from raytrain_gpt.train.on_ray import OnRay
from raytrain_gpt.train.rank import train_rank
from raytrain_gpt.train.run import BEFORE_FIRST_STEP, Run
from raytrain_gpt.train.worker_group import TrainLoop


def train(config: Config, log: Log, train_loop: TrainLoop = train_rank) -> RunSummary:
    """Run a configuration to its end, resuming the run of that name.

    Args:
        config: May hold `auto` and relative paths; the demo's data is prepared if it is missing.
        train_loop: Events of every rank; tests inject faults here.

    Raises:
        UserError: the configuration, data, storage or cluster is unusable.
        StorageError: the storage was unreachable for longer than `retry_for_s`.
        Interrupted: Ctrl+C or SIGTERM, after saving a checkpoint.
        TrainingFailed: the run failed more than `max_failures` times without progress.
    """
    with StopSignals(BEFORE_FIRST_STEP) as signals:
        config = preflight.prepare_default_data(config, log)
        if config.cluster.num_workers == 0:
            return train_locally(config, signals, log, train_loop)
        with training_session(config, log) as (fitted, world_size, data):
            shared = (OnRay(), signals, log, train_loop)
            return Run(fitted, world_size, data, *shared, asked=config.cluster).train()


@contextlib.contextmanager
def training_session(config: Config, log: Log) -> Iterator[tuple[Config, int, Mixture]]:
    """Connect to a cluster and load the data; yields fitted configuration, world size and data.

    The paths of `config` are absolute. Raises a UserError if data or cluster is unusable.
    """
    data = read_data(config)
    with connected(cpus_to_start(config), log) as resources:
        fitted, world_size = fit_to_cluster(config, resources)
        if line := idle_gpus(config, fitted, resources):
            log(line)
        yield fitted, world_size, data
