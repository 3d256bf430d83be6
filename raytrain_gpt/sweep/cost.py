"""Resources of a trial, the number of concurrent trials, and the cost of a sweep at a speed measured here."""

from __future__ import annotations

import math
import os
import time

import torch

from raytrain_gpt.cluster.capacity import DATA_CPUS, Resources
from raytrain_gpt.config.resolved import FittedConfig, SizedConfig, decided
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.device import make_autocast, resolve_precision
from raytrain_gpt.core.memory import MemoryModel
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.registry import configured_model
from raytrain_gpt.errors import ClusterError
from raytrain_gpt.format import amount, count, duration
from raytrain_gpt.sweep.results import plan_table
from raytrain_gpt.sweep.spec import Asha, Pbt, Sweep
from raytrain_gpt.sweep.trial_plan import (
    base_config,
    check_sweep,
    num_trials,
    planned_trials,
    tied_values,
)
from raytrain_gpt.train.memory_search import MemorySearch, gpu_limit_bytes
from raytrain_gpt.train.preflight import expected_vocab_size

PROBE_S = 5.0
"""Duration of the speed measurement, which takes at least one forward and backward pass."""
START_S = 35.0
"""Time of a trial of several workers besides its steps (processes, imports, evaluations); two sweeps on two
cores: 33, 51 s."""
NEW_PROCESS_S, USED_PROCESS_S = 6.0, 1.0
"""The same for one worker: in a new process, and in a used one, on two cores. Fifty tiny trials took 0.6 s
each besides steps and evaluations, the nine of the quickstart 1.3 s."""


def one_worker_for_auto(config: Config) -> SizedConfig:
    """Resolve `auto` to one worker per trial and one CPU per worker; local mode also gets one worker."""
    c = config.cluster
    return decided(
        SizedConfig,
        config,
        num_workers=1 if c.num_workers in ("auto", 0) else c.num_workers,
        cpus_per_worker=1 if c.cpus_per_worker == "auto" else c.cpus_per_worker,
    )


def data_cpus(config: SizedConfig) -> int:
    """Return the CPUs of a trial's data tasks; a single worker reads the data itself."""
    return DATA_CPUS if config.cluster.num_workers > 1 else 0


def trial_cpus(config: SizedConfig) -> int:
    c = config.cluster
    return c.num_workers * c.cpus_per_worker + data_cpus(config)


def cpus_to_start(sweep: Sweep, config: SizedConfig) -> int:
    """Return the logical CPUs to start a cluster with, for as many trials as this machine can run."""
    c = config.cluster
    gpus = torch.cuda.device_count() if c.use_gpu is not False else 0
    if gpus:
        fit = int(gpus / (c.num_workers * c.gpus_per_worker) + 1e-9)
    else:
        fit = (os.cpu_count() or 1) // (c.num_workers * c.cpus_per_worker)
    if isinstance(sweep.scheduler, Pbt):
        fit = num_trials(sweep)
    at_once = min(sweep.max_concurrent_trials or fit, num_trials(sweep))
    return max(1, at_once) * trial_cpus(config)


def trials_at_once(sweep: Sweep, config: FittedConfig, resources: Resources) -> int:
    """Return the number of concurrent trials; raises a ClusterError if a population does not fit at once."""
    c = config.cluster
    places = resources.places(c.cpus_per_worker, c.num_gpus)
    fit = min(places // c.num_workers, int(resources.cpus // trial_cpus(config)))
    population = num_trials(sweep)
    at_once = max(1, min(fit, sweep.max_concurrent_trials or fit, population))
    if isinstance(sweep.scheduler, Pbt) and at_once < population:
        raise ClusterError(
            f"scheduler pbt compares {population} trials at the same time, but the cluster has room for "
            f"{fit} (each {count(trial_cpus(config), 'CPU')}"
            f"{f', {c.gpus_per_worker:g} GPU' if c.use_gpu else ''}); set num_trials to at most "
            f"{max(fit, 1)}, remove max_concurrent_trials, or use a larger cluster"
        )
    return at_once


def cost_lines(sweep: Sweep) -> list[str]:
    """Format the trials, the resources of each, and their total tokens and time; may raise ConfigError."""
    base = one_worker_for_auto(base_config(sweep))
    c = base.cluster
    configs = check_sweep(sweep, c.num_workers)
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
    for_data = f", {data_cpus(base)} of them for data" if data_cpus(base) else ""
    at_once = cpus_to_start(sweep, base) // trial_cpus(base)
    lines.append(
        f"each trial: {count(trial_cpus(base), 'CPU')}{for_data}{gpus} | on this machine: {at_once} at once"
    )
    full, least, stops = number * sweep.budget_tokens, halved_tokens(sweep, number), ""
    if least < full:
        stops = f"; {amount(least)} if all trials are stopped as early as possible"
    lines.append(
        f"tokens: {number} × {amount(sweep.budget_tokens)} = {amount(full)} at most{stops}"
    )
    on_gpu = c.use_gpu is not False and torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    measured = measured_tokens_per_s(one_worker_for_auto(configs[0]) if configs else base, device)
    if measured is None:
        return [*lines, "time: unknown; a trial does not fit in this machine's memory"]
    # Trials that share a GPU share its speed.
    speed = (c.gpus_per_worker if on_gpu else 1) * c.num_workers * measured
    if device.type == "cpu":  # more of them share the same cores
        at_once = min(at_once, max(1, (os.cpu_count() or 1) // (c.num_workers * c.cpus_per_worker)))
    first_s, each_s = (0, START_S) if c.num_workers > 1 else (NEW_PROCESS_S, USED_PROCESS_S)
    steps_s, starts_s = full / speed / at_once, first_s + number * each_s / at_once
    lines.append(
        f"time: at most {duration(steps_s + starts_s)}: {duration(steps_s)} of steps at {speed:,.0f} tok/s "
        f"per trial (measured here, {device.type}), {duration(starts_s)} of {count(number, 'start')}, "
        f"{at_once} at full speed at once"
    )
    return lines


def halved_tokens(sweep: Sweep, number: int) -> int:
    """Return the tokens of all trials if only the best pass each rung, or all tokens without halving."""
    if not isinstance(sweep.scheduler, Asha):
        return number * sweep.budget_tokens
    tokens, reached, left = 0, 0, number
    rung = sweep.scheduler.grace_tokens
    while rung < sweep.budget_tokens:
        tokens += left * (rung - reached)
        reached, left = rung, max(1, left // sweep.scheduler.reduction_factor)
        rung *= sweep.scheduler.reduction_factor
    return tokens + left * (sweep.budget_tokens - reached)


def measured_tokens_per_s(config: SizedConfig, device: torch.device) -> float | None:
    """Measure one worker's tokens/s of forward and backward passes, or return None if it does not fit."""
    torch.set_num_threads(config.cluster.cpus_per_worker)
    shape = GPTShape.of(config, expected_vocab_size(config))
    precision = resolve_precision(config.train.precision, device)
    num_workers, on_gpu = config.cluster.num_workers, device.type == "cuda"
    limit_bytes: float = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if on_gpu:
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        limit_bytes = gpu_limit_bytes(total_bytes, num_workers, config.cluster.gpus_per_worker)
    memory = MemoryModel.of(config, num_workers, shape, precision != "fp32")
    search = MemorySearch(config.updated({"use_gpu": on_gpu}), num_workers, memory)
    if search.predict(1, search.modes[-1]) > limit_bytes:
        return None
    fit = search.largest(limit_bytes if on_gpu else math.inf) or search.least()
    # Any id may end documents, since no time depends on it.
    last_id = shape.vocab_size - 1
    model = configured_model(config, shape.vocab_size, last_id, fit.activation_checkpointing)
    model.init_weights(config.train.seed)
    model.to(device)
    autocast = make_autocast(precision, device)
    size = (fit.sequences if on_gpu else 1, config.data.seq_len)
    tokens = torch.randint(shape.vocab_size, size, device=device)

    def step() -> None:
        with autocast():
            loss = model(tokens, tokens)
        loss.backward()
        loss.item()  # waits for the device

    step()
    started, steps = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - started) < PROBE_S or not steps:
        step()
        steps += 1
    return steps * tokens.numel() / elapsed
