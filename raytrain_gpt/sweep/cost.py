"""Resources of a trial, the number of concurrent trials, and the cost of a sweep at a speed measured here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import repeat
from statistics import fmean

import torch

from raytrain_gpt.cluster.capacity import DATA_CPUS, Resources
from raytrain_gpt.config.resolved import workers_of
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.device import resolve_precision
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.registry import count_model, step_flops
from raytrain_gpt.data.locations import data_is_there, read_data
from raytrain_gpt.format import amount, count, duration
from raytrain_gpt.sweep.results import plan_table
from raytrain_gpt.sweep.spec import Asha, Sweep
from raytrain_gpt.sweep.trial_plan import (
    base_config,
    check_sweep,
    num_trials,
    planned_trials,
    shapes_of,
    tied_values,
)
from raytrain_gpt.train.memory_fit import MemorySearch, gpu_limit_bytes
from raytrain_gpt.train.preflight import expected_vocab_size
from raytrain_gpt.train.probe import probe_steps

_PROBE_S, _MAX_STEPS = 3.0, 1000
"""Duration of the speed measurement, which takes at least two steps."""


def one_worker_for_auto(config: Config) -> Config:
    """Resolve `auto` to one worker per trial and one CPU per worker; local mode also gets one worker."""
    c = config.cluster
    return config.updated(
        {
            "num_workers": 1 if c.num_workers in ("auto", 0) else c.num_workers,
            "cpus_per_worker": 1 if c.cpus_per_worker == "auto" else c.cpus_per_worker,
        }
    )


def data_cpus(config: Config) -> int:
    """Return the CPUs of a trial's data tasks; a single worker reads the data itself."""
    return DATA_CPUS if workers_of(config).num_workers > 1 else 0


def trial_cpus(config: Config) -> int:
    c = workers_of(config)
    return c.num_workers * c.cpus_per_worker + data_cpus(config)


def cpus_to_start(
    config: Config,
    number: int,
    max_concurrent: int | None,
    *,
    shares_gpus: bool = False,
) -> int:
    """Return the logical CPUs to start a cluster with, for as many trials as this machine can run.

    Args:
        number: Number of trials.
        shares_gpus: Whether trials share GPUs, but it is not known yet how many.
    """
    c = workers_of(config)
    gpus = torch.cuda.device_count() if c.use_gpu is not False else 0
    if gpus and not shares_gpus:
        fit = int(gpus / (c.num_workers * c.gpus_per_worker) + 1e-9)
    else:
        fit = (os.cpu_count() or 1) // (c.num_workers * c.cpus_per_worker)
    return max(1, min(max_concurrent or fit, number)) * trial_cpus(config)


def trials_at_once(
    config: Config, resources: Resources, number: int, max_concurrent: int | None
) -> int:
    c = workers_of(config)
    places = resources.places(c.cpus_per_worker, c.num_gpus)
    fit = min(places // c.num_workers, int(resources.cpus // trial_cpus(config)))
    return max(1, min(fit, max_concurrent or fit, number))


def largest_trial(sweep: Sweep, base: Config) -> Config:
    """Return the configuration that needs the most memory of all that trials may get, by prediction.

    For `trials_per_gpu=auto`, which has no `auto` of `AUTO_MEMORY_FIELDS`.
    """

    def needed(config: Config) -> float:
        search = MemorySearch.of(config, 1, expected_vocab_size(config), bf16=True)
        return search.smallest().needed_bytes

    configs = check_sweep(sweep, 1)
    # Equal shapes take equal memory, and a prediction may trace the model.
    sized = {f"{shapes_of(c)} {c.optim.optimizer}": c for c in map(one_worker_for_auto, configs)}
    return max(sized.values(), key=needed, default=base)


def cost_lines(sweep: Sweep) -> list[str]:
    """Format the trials, the resources of each, and their total tokens and time; may raise ConfigError."""
    base = one_worker_for_auto(base_config(sweep))
    c = workers_of(base)
    configs = check_sweep(sweep, c.num_workers)
    on_gpu = c.use_gpu and torch.cuda.is_available()
    planned = planned_trials(sweep)
    number = num_trials(sweep)
    if planned:
        tied = [tied_values(sweep, v, config) for v, config in zip(planned, configs, strict=True)]
        lines = plan_table(tied, [config.train.max_steps for config in configs])
    else:
        lines = [
            f"{count(number, 'trial')}, whose values Optuna chooses from the losses of earlier ones"
        ]
    gpus = "" if c.use_gpu is False else f", with GPUs {c.gpus_per_worker:g} for each worker"
    least = ""
    if sweep.trials_per_gpu == "auto":
        gpus, least = ", with GPUs as many on each as its memory fits", "at least "
    for_data = f", {data_cpus(base)} of them for data" if data_cpus(base) else ""
    at_once = cpus_to_start(base, number, sweep.max_concurrent_trials) // trial_cpus(base)
    lines.append(
        f"each trial: {count(trial_cpus(base), 'CPU')}{for_data}{gpus} | on this machine: "
        f"{least}{at_once} at once"
    )
    full = number * sweep.budget_tokens
    lines.append(f"tokens: {number} × {amount(sweep.budget_tokens)} = {amount(full)} at most")
    trials = [one_worker_for_auto(config) for config in configs] if planned else [base] * number
    vocab_size = expected_vocab_size(base)
    flop_s = seconds_per_flop(trials, vocab_size)
    if flop_s is None:
        return [*lines, "time: unknown; a trial does not fit in this machine's memory"]
    if on_gpu:  # trials that share a GPU share its speed
        flop_s /= c.gpus_per_worker
    else:  # more of them share the same cores
        at_once = min(at_once, max(1, (os.cpu_count() or 1) // (c.num_workers * c.cpus_per_worker)))
    most_s = flop_s * sum(_flops(config, vocab_size) for config in trials) / c.num_workers / at_once
    about = "at most" if isinstance(sweep.scheduler, Asha) else "about"
    lines.append(
        f"time: {about} {duration(most_s)} of steps and evaluations, without starts; a step of the largest "
        f"trial measured here, scaled by FLOPs; {at_once} at full speed at once"
    )
    return lines


def _flops(config: Config, vocab_size: int) -> float:
    """Return the FLOPs of a trial's steps and evaluations, which have no backward pass."""
    tokens = config.eval.eval_tokens
    if data_is_there(config):
        tokens = min(tokens, read_data(config).split_tokens("val"))
    steps, evaluations = (
        config.train.max_steps,
        config.train.max_steps // config.eval.eval_every_steps,
    )
    shape = GPTShape.of(config, vocab_size)
    step = step_flops(shape, config.optim.optimizer, config.train.global_batch_tokens)
    return steps * step + evaluations * tokens * count_model(shape).flops_per_token / 3


def seconds_per_flop(configs: Sequence[Config], vocab_size: int) -> float | None:
    """Time a micro-batch of the configuration with the most FLOPs in a step.

    Returns:
        A worker's seconds for a FLOP, or None if it does not fit.
    """

    def flops(config: Config, tokens: int) -> float:
        return step_flops(GPTShape.of(config, vocab_size), config.optim.optimizer, tokens)

    config = max(configs, key=lambda config: flops(config, config.train.global_batch_tokens))
    c = workers_of(config)
    on_gpu = c.use_gpu and torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.set_num_threads(c.cpus_per_worker)
    precision = resolve_precision(config.train.precision, device)
    num_workers = c.num_workers
    limit_bytes: float = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if on_gpu:
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        limit_bytes = gpu_limit_bytes(total_bytes, num_workers, c.gpus_per_worker)
    search = MemorySearch.of(
        config.updated({"use_gpu": on_gpu}), num_workers, vocab_size, precision != "fp32"
    )
    fit = search.largest(limit_bytes)
    if fit is None:
        return None
    is_auto = config.train.micro_batch_sequences == "auto"
    sequences = 1 if is_auto and not on_gpu else fit.sequences
    times: list[float] = []
    eager = config.updated({"compile": False})
    steps = repeat(1, _MAX_STEPS)
    for seconds in probe_steps(
        eager, vocab_size, sequences, fit.activation_checkpointing, device, steps
    ):
        times.append(seconds)  # the first step fills caches
        if len(times) > 1 and sum(times) > _PROBE_S:
            break
    return fmean(times[1:]) / flops(config, sequences * config.data.seq_len)
