"""Training without Ray's processes (`num_workers` 0), in the command's process, by Ray Train's local mode.

`torchrun`, or anything that sets its variables, may start one process per rank. Rank 0 does the driver's
work (lease, configuration, files, rollbacks) and sends the others the job of every attempt; they only
train. Order, checkpoints and files are the same as with Ray workers, so a run can switch between the two.

Dead processes are not restarted and hung ranks are not detected; run the same command to resume.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn, TypeVar

import ray.train
import ray.train.torch
import torch
import torch.distributed as dist

from raytrain_gpt.checkpoint.collectives import Collectives
from raytrain_gpt.cluster.all_nodes import storage_probe
from raytrain_gpt.cluster.capacity import Pause, fit_to_process
from raytrain_gpt.cluster.failures import root_cause
from raytrain_gpt.cluster.process_groups import rendezvous_on_host, use_interface_towards
from raytrain_gpt.cluster.signals import StopSignals
from raytrain_gpt.config.kinds import Registry
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.device import set_cuda_defaults
from raytrain_gpt.data.locations import read_data
from raytrain_gpt.errors import ConfigError, Interrupted, TrainingFailed, damage_as
from raytrain_gpt.events import Events, Line, Link
from raytrain_gpt.format import Log, count
from raytrain_gpt.runs.summary import RunSummary
from raytrain_gpt.storage.lease import Lease
from raytrain_gpt.storage.location import Location
from raytrain_gpt.train.run import Run
from raytrain_gpt.train.worker_group import RankJob, TrainLoop

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_WAIT_FOR_RANK_0_S = 7 * 24 * 3600.0
_TELL_AFTER_S = 10.0
_OUTSIDE = "192.0.2.1"
"""Address of no host, reached by the default route (RFC 5737)."""

T = TypeVar("T")


def train_locally(
    config: Config, signals: StopSignals, log: Log, train_loop: TrainLoop
) -> RunSummary:
    """Run a configuration with absolute paths in this process, or one of `torchrun`'s; see `launch.train`."""
    here = InProcess.of_environment()
    if config.cluster.use_gpu is False and here.world_size > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # else they use NCCL, which has no CPU tensors
    # Before Ray makes LOCAL_RANK's device current, and ranks wait for each other.
    fitted = fit_to_process(config, here.world_size, here.in_node, torch.cuda.device_count())
    if here.in_node < here.world_size:
        use_interface_towards(os.environ["MASTER_ADDR"], _OUTSIDE)

    alone = ExitStack()

    def run() -> RunSummary:
        alone.close()  # all ranks are there
        if here.in_node == here.world_size > 1:
            rendezvous_on_host()
        if here.rank:
            here.run_follower(train_loop, signals, log, fitted.registry)
        data = read_data(fitted)
        here.init_group()
        log(
            f"local mode: {count(here.world_size, 'process', 'processes')}, no Ray, no automatic "
            "restarts; run the same command again to resume"
        )
        try:
            shared = (here, signals, log, train_loop)
            return Run(fitted, here.world_size, data, *shared, asked=config.cluster).train()
        finally:
            here.release_followers()

    with alone:
        if here.world_size > 1:
            line = (
                f"rank {here.rank} waits for all {here.world_size} ranks (WORLD_SIZE) at "
                f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}; start them, or press Ctrl+C"
            )
            timer = threading.Timer(_TELL_AFTER_S, log, [line])
            timer.daemon = True
            timer.start()
            alone.callback(timer.cancel)
            # Python delays its handlers while torch waits.
            alone.enter_context(signals.default_handlers())
        return in_local_mode(run)


def in_local_mode(run: Callable[[], T]) -> T:
    """Call a function in Ray Train's local mode, which initializes the process group of `torchrun`.

    Without a group, the mode outlasts the call.
    """
    set_cuda_defaults()
    logging.getLogger("ray.train").setLevel(logging.ERROR)
    local = ray.train.ScalingConfig(num_workers=0)
    result: T = ray.train.torch.TorchTrainer(run, scaling_config=local).fit().return_value
    return result


@dataclass
class InProcess:
    """This process among those of one launch; rank 0 is a `Place`.

    Attributes:
        in_node: Processes on this machine.
        training: Whether followers may be inside an attempt, and so not waiting for a broadcast.
    """

    rank: int
    world_size: int
    in_node: int
    training: bool = field(default=False, init=False)
    _ranks: Collectives = field(default_factory=partial(Collectives, 0, 1), init=False)
    retries = False

    @classmethod
    def of_environment(cls) -> InProcess:
        """Read the variables of `torchrun`, if any is set; raises ConfigError if others are missing."""
        missing = [name for name in _NAMES if name not in os.environ]
        if missing and os.environ.get("WORLD_SIZE", "1") != "1":
            raise ConfigError(
                f"WORLD_SIZE={os.environ['WORLD_SIZE']} needs several processes, but "
                f"{' and '.join(missing)} is not set; set all of torchrun's variables, or unset WORLD_SIZE"
            )
        if missing:
            return cls(0, 1, 1)
        with damage_as(ConfigError, "torchrun's variables", "; set RANK and others to numbers"):
            return cls(*(int(os.environ[name]) for name in _NAMES[:3]))

    def init_group(self) -> None:
        """Create the group for rank 0's broadcasts; all ranks call it, in local mode."""
        self._ranks = Collectives(self.rank, self.world_size, _WAIT_FOR_RANK_0_S)

    def broadcast(self, job: RankJob | None) -> None:
        """Send the other ranks their job; None makes them exit."""
        self._ranks.all_gather_json(job, RankJob | None)

    def release_followers(self) -> None:
        """Have followers exit; if an error stopped rank 0 mid-attempt, the launcher ends them."""
        if not self.training:
            with contextlib.suppress(RuntimeError):  # a signal may have ended a rank already
                self.broadcast(None)

    def run_follower(
        self, train_loop: TrainLoop, signals: StopSignals, log: Log, registry: Registry
    ) -> NoReturn:
        """Train by the jobs that rank 0 broadcasts, with this rank's own registry, then exit."""
        with signals.default_handlers():
            self.init_group()
        while (job := self._received(signals, registry)) is not None:
            signals.defer()
            try:
                for event in train_loop(replace(job, link=Link(signals.stop))):
                    if isinstance(event, Line):
                        log(event.text)
            except (SystemExit, KeyboardInterrupt) as error:  # of the user's code, not of a signal
                raise TrainingFailed(f"rank {self.rank} failed ({root_cause(error)})") from error
        dist.destroy_process_group()
        sys.exit(Interrupted.exit_code if signals.stop.is_set() else 0)

    def _received(self, signals: StopSignals, registry: Registry) -> RankJob | None:
        with signals.default_handlers():
            return self._ranks.all_gather_json(None, RankJob | None, registry)[0]

    def check_storage(self, run_dir: Location, data: Sequence[Location]) -> None:
        with storage_probe(run_dir, run_dir.parent):
            pass

    def await_workers(self, config: Config, current: int, pause: Pause, log: Log) -> int:
        return current

    def events(self, job: RankJob, train_loop: TrainLoop, lease: Lease) -> Events:
        self.broadcast(job)
        self.training = True
        yield from train_loop(job)
        self.training = False
