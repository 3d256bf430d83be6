"""Tokens/s from a few real steps on the cluster that `train` would use."""

from __future__ import annotations

from raytrain_gpt.cluster.signals import StopSignals
from raytrain_gpt.config.resolved import RunPlan
from raytrain_gpt.config.schema import Config
from raytrain_gpt.doctor.bench import forecast
from raytrain_gpt.doctor.rank_probe import ask_ranks
from raytrain_gpt.errors import TrainingFailed
from raytrain_gpt.format import Log
from raytrain_gpt.ingest.ray_dataset import IngestSpec
from raytrain_gpt.train import preflight
from raytrain_gpt.train.launch import cluster_for
from raytrain_gpt.train.memory_fit import fit_memory


def probe_speed(config: Config, log: Log) -> tuple[RunPlan, float, str]:
    """Time steps of a configuration's own loop on its own data; nothing trained is kept.

    Returns:
        The plan that was timed, tokens/s over all workers, and the name of rank 0's device.

    Raises:
        UserError: the configuration, data or cluster cannot be used.
        TrainingFailed: the steps did not finish, for example for lack of memory.
        Interrupted: Ctrl+C or SIGTERM.
    """
    stopped = StopSignals("interrupted; nothing is left behind")
    with stopped, cluster_for(config, log) as (fitted, world_size, data):
        plan = fit_memory(fitted, world_size, data.vocab_size, log)
        ingest = IngestSpec(fitted, data, world_size)
        preflight.check_data(ingest)
        preflight.check_compile(fitted)
        log(f"timing steps on {world_size} workers")
        group = ask_ranks(fitted, world_size, ingest, plan)
    if group.bench is None or group.devices is None:
        raise TrainingFailed(
            f"no step was timed: {group.error}; lower micro_batch_sequences if memory is short, or see: "
            "raytrain-gpt doctor"
        )
    tokens_per_s = forecast(fitted, data.vocab_size, group.bench).tokens_per_s
    return plan, tokens_per_s, group.devices[0].device
