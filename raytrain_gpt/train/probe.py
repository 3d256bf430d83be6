"""Four steps of a configuration by a real run, in a hidden directory of its storage that is then removed.

Workers, data, steps and the checkpoint are those of `train`. Trackers, samples, retries and the report are
off, and its lines are not printed.
"""

from __future__ import annotations

import contextlib
import uuid
from statistics import median

import ray.train.torch
import torch
import torch.distributed as dist

from raytrain_gpt.cluster.failures import root_cause
from raytrain_gpt.cluster.signals import STOPPING, StopSignals
from raytrain_gpt.columns import Row
from raytrain_gpt.config.schema import Config
from raytrain_gpt.data.locations import location
from raytrain_gpt.data.mixture import Mixture
from raytrain_gpt.errors import ClusterError, Interrupted, TrainingFailed, failure_as
from raytrain_gpt.events import Events
from raytrain_gpt.format import Log
from raytrain_gpt.trackers.run_files import read_rows
from raytrain_gpt.train.memory_fit import fit_memory
from raytrain_gpt.train.on_ray import OnRay
from raytrain_gpt.train.rank import train_rank
from raytrain_gpt.train.run import Run
from raytrain_gpt.train.worker_group import RankJob, TrainLoop

NUM_STEPS = 4
_FIELDS = {
    "run_name": "probe", "branch_from": None, "resume": "auto", "max_steps": NUM_STEPS, "log_every_steps": 1,
    "checkpoint_every_steps": NUM_STEPS, "eval_every_steps": NUM_STEPS, "profile_steps": 0, "num_samples": 0,
    "hellaswag_path": None, "evaluations": (), "trackers": (), "mlflow_uri": None, "tensorboard": False,
    "ray_metrics": False, "max_failures": 0, "max_preemptions": 0,
}  # fmt: skip
_HANG_TIMEOUT_S = 120.0
_CONTROLLER_GRACE_S = 10.0
_MAX_CPU_MICRO_BATCHES = 4
"""Micro-batches of a step on CPUs, where all of a large batch would take hours."""
_SUMMED_BYTES = 100_000_000
_CHECK_GPUS = (
    "; check that nvidia-smi works on every node, that torch is a CUDA build, and that Ray's --num-gpus does "
    "not exceed the node's GPUs"
)
_CHECK_NETWORK = (
    "; let all nodes reach each other on all ports, and if a node has several interfaces, set "
    "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
)


def summing_rank(job: RankJob) -> Events:
    """Train a rank, after an all-reduce of 100 MB with known sums; raises ClusterError if any is wrong."""
    if job.plan.world_size > 1 and (wrong := _wrong_sums(job.plan.config.cluster.num_gpus > 0)):
        raise ClusterError(
            f"{wrong} of {_SUMMED_BYTES // 4} sums over all ranks are wrong; a device, its driver or a "
            "network card is broken: remove nodes one by one to find it"
        )
    yield from train_rank(job)


def _wrong_sums(use_gpu: bool) -> int:
    device = ray.train.torch.get_device() if use_gpu else torch.device("cpu")
    ranks = dist.get_world_size()
    # Small integers, whose float32 sums are exact in any order.
    pattern = torch.arange(_SUMMED_BYTES // 4, device=device) % 251
    values = (pattern + dist.get_rank()).float()
    dist.all_reduce(values)
    return int((values != pattern * ranks + ranks * (ranks - 1) // 2).sum())


def probe_run(
    config: Config,
    world_size: int,
    data: Mixture,
    signals: StopSignals,
    log: Log,
    train_loop: TrainLoop = summing_rank,
) -> tuple[Row, float]:
    """Train four steps on the connected cluster; return the row of their start, and the seconds of a step.

    On CPUs a step has a few micro-batches, and its time is scaled. Signals are deferred afterward.

    Raises:
        UserError, TrainingFailed: like `launch.train`, with what to check.
        KeyboardInterrupt: for `signals`, after a signal.
    """
    storage = location(config, config.run.storage_path)
    hidden = storage / f".probe-{uuid.uuid4().hex}"
    limit_s = min(config.cluster.hang_timeout_s or _HANG_TIMEOUT_S, _HANG_TIMEOUT_S)
    fields = {
        "storage_path": str(hidden),
        "eval_tokens": config.data.seq_len,
        "hang_timeout_s": limit_s,
    }

    def say(text: str) -> None:
        if text == STOPPING:
            log(f"stopping after this step (press Ctrl+C twice more to leave {hidden} behind)")

    short, share = config.updated({**_FIELDS, **fields}), 1.0
    if not config.cluster.use_gpu:
        plan = fit_memory(short, world_size, data.vocab_size, say)
        share = min(1.0, _MAX_CPU_MICRO_BATCHES / plan.micro_batches_per_step)
        tokens = round(share * config.train.global_batch_tokens)
        short = plan.config.updated({"global_batch_tokens": tokens})
    place = OnRay(_CONTROLLER_GRACE_S)
    above = (storage.path, *storage.path.parents) if storage.is_local else ()
    created = [path for path in above if not path.exists()]
    try:
        # As a trial it writes no report.
        run = Run(short, world_size, data, place, signals, say, train_loop, trial_tags={})
        run.train().checkpoint.verify()
        rows = read_rows(run.sync.work_dir)
    except Interrupted:
        raise KeyboardInterrupt from None
    except TrainingFailed as error:
        if error.__cause__ is None:
            raise
        advice = _CHECK_GPUS if config.cluster.use_gpu else ""
        advice += _CHECK_NETWORK if world_size > 1 else ""
        raise TrainingFailed(f"{root_cause(error.__cause__)}{advice}") from None
    finally:
        signals.defer()
        with failure_as(ClusterError, f"cannot remove {hidden}"):
            hidden.remove()
        for path in created:
            with contextlib.suppress(OSError):  # others may have written there
                path.rmdir()
    start = next(row for row in rows if row.get("event") == "start")
    step_s = [row["perf/step_time_s"] for row in rows if "train/loss" in row]
    return start, median(step_s[1:]) / share  # the first compiles, and fills caches
