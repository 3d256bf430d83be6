"""Resources of a trial, the number of concurrent trials, and the cost of a sweep at a speed measured here."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import repeat
from statistics import fmean

import torch

from raytrain_gpt.checkpoint.branch import with_origin
from raytrain_gpt.cluster.capacity import DATA_CPUS, Resources, usable_cores
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.accumulation import FloatAccumulator
from raytrain_gpt.core.device import make_autocast, matmul_dtype, resolve_precision, synchronize
from raytrain_gpt.core.loop import train_steps
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.registry import build_optimizer, configured_model, init_weights, step_flops
from raytrain_gpt.format import amount, count, duration, table
from raytrain_gpt.redact import say
from raytrain_gpt.sweep.history import value_text
from raytrain_gpt.sweep.spec import Sweep
from raytrain_gpt.sweep.trial_plan import (
    base_config,
    check_sweep,
    num_trials,
    planned_trials,
    tied_values,
)
from raytrain_gpt.train.memory_fit import (
    MAX_CPU_TOKENS,
    MemoryFit,
    MemorySearch,
    gpu_here,
    gpu_limit_bytes,
)
from raytrain_gpt.train.preflight import expected_vocab_size

_PROBE_S, _MAX_STEPS = 3.0, 1000
"""Duration of the speed measurement, which takes at least two steps."""
_MAX_CPU_FLOPS = 3e11
"""FLOPs of a measured step on a CPU, some seconds."""


def one_worker_for_auto(config: Config) -> Config:
    """Resolve `auto` to one worker per trial and one CPU per worker; local mode also gets one worker."""
    c = config.cluster
    return config.replaced(
        {
            "num_workers": 1 if c.num_workers in ("auto", 0) else c.num_workers,
            "cpus_per_worker": 1 if c.cpus_per_worker == "auto" else c.cpus_per_worker,
        }
    )


def data_cpus(config: Config) -> int:
    """Return the CPUs of a trial's data tasks; a single worker reads the data itself."""
    return DATA_CPUS if config.cluster.workers > 1 else 0


def trial_cpus(config: Config) -> int:
    return config.cluster.workers * config.cluster.num_cpus + data_cpus(config)


def fit_here(config: Config, number: int, most: int | None) -> int:
    """Return how many of `number` trials, at most `most`, this machine can run at once."""
    c = config.cluster
    fit = usable_cores() // (c.workers * c.num_cpus)
    if c.use_gpu is not False and (gpus := torch.cuda.device_count()):
        fit = int(gpus / (c.workers * c.gpus_per_worker) + 1e-9)
    return max(1, min(most or fit, number))


def trials_at_once(config: Config, resources: Resources, number: int, most: int | None) -> int:
    """Return how many of `number` trials, at most `most`, a cluster can run at once."""
    c = config.cluster
    places = resources.places(c.num_cpus, c.num_gpus)
    fit = min(places // c.workers, int(resources.cpus // trial_cpus(config)))
    return max(1, min(fit, most or fit, number))


def cost_lines(sweep: Sweep) -> list[str]:
    """Format the trials, the resources of each, and their total tokens and time; may raise a UserError."""
    base = one_worker_for_auto(with_origin(base_config(sweep), say))
    configs = check_sweep(sweep, base.cluster.workers)
    planned, number = planned_trials(sweep), num_trials(sweep)
    if planned:
        tied = [tied_values(sweep, v, config) for v, config in zip(planned, configs, strict=True)]
        rows = [
            [f"{n:03d}", *map(value_text, values.values()), f"{config.train.max_steps:,}"]
            for n, (values, config) in enumerate(zip(tied, configs, strict=True))
        ]
        lines = table(["trial"], [*tied[0], "steps"], rows)
    else:
        lines = [
            f"{count(number, 'trial')}, whose values Optuna chooses from the losses of earlier ones"
        ]
    gpus = ""
    if base.cluster.use_gpu is not False:
        gpus = f", and {base.cluster.gpus_per_worker:g} GPU for each worker"
        if base.cluster.use_gpu == "auto":
            gpus += " where there are GPUs"
    full = number * sweep.budget_tokens
    trials = [one_worker_for_auto(config) for config in configs] if planned else [base] * number
    return [
        *lines,
        f"each trial: {count(trial_cpus(base), 'CPU')}{gpus}",
        f"tokens: {number} × {amount(sweep.budget_tokens)} = {amount(full)} without early stopping",
        time_line(trials, sweep.max_concurrent_trials),
    ]


def time_line(trials: Sequence[Config], most: int | None) -> str:
    """Format the time that trials take on this machine; `most` limits how many run at once.

    A few steps of the trial with the most FLOPs in a step are measured, and scaled by FLOPs.
    """
    vocab_size = expected_vocab_size(trials[0])
    # More of them than fit share the same cores.
    at_once = min(fit_here(trials[0], len(trials), one) for one in (most, None))
    flop_s = _seconds_per_flop(trials, vocab_size)
    if flop_s is None:
        return "time: unknown; the largest trial is too large for this machine"
    steps_flops = [one.train.max_steps * _step_flops(one, vocab_size) for one in trials]
    total_s = flop_s * sum(steps_flops)
    about = duration(total_s / trials[0].cluster.workers / at_once)
    return (
        f"time: about {about} without starts, evaluations and early stopping, {at_once} at once; a step of "
        "the largest trial measured here, scaled by FLOPs"
    )


def _step_flops(config: Config, vocab_size: int, tokens: int | None = None) -> float:
    tokens = tokens or config.train.global_batch_tokens
    return step_flops(GPTShape.of(config, vocab_size), config.optim, tokens)


def _seconds_per_flop(configs: Sequence[Config], vocab_size: int) -> float | None:
    """Return a worker's seconds for a FLOP, measured with the configuration with the most FLOPs in a step.

    None if its micro-batch does not fit, or would take minutes.
    """
    config = max(configs, key=lambda one: _step_flops(one, vocab_size))
    on_gpu = config.cluster.use_gpu is not False and torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    workers, share = config.cluster.workers, config.cluster.gpus_per_worker if on_gpu else 1
    torch.set_num_threads(config.cluster.num_cpus)
    eager = config.replaced({"compile": False, "use_gpu": on_gpu})
    if on_gpu:
        gpu = gpu_here(config.train.precision)
        search = MemorySearch.of(eager, workers, vocab_size, gpu.bf16)
        fit = search.largest(gpu_limit_bytes(gpu.total_bytes, workers, share))
    else:  # more tokens gain little speed, and may take minutes
        micro, most = config.train.micro_batch_sequences, MAX_CPU_TOKENS // config.data.seq_len
        fit = MemoryFit(1 if micro == "auto" else max(1, min(micro, most)), "none")
    if fit is None:
        return None
    flops = _step_flops(config, vocab_size, fit.sequences * config.data.seq_len)
    if not on_gpu and flops > _MAX_CPU_FLOPS:
        return None
    times: list[float] = []
    for seconds in _timed_steps(eager, vocab_size, fit, device):
        times.append(seconds)  # the first step fills caches
        if len(times) > 1 and sum(times) > _PROBE_S:
            break
    return fmean(times[1:]) / flops / share


def _timed_steps(
    config: Config, vocab_size: int, fit: MemoryFit, device: torch.device
) -> Iterator[float]:
    """Train a new model on made-up tokens, and yield the seconds of each step of one micro-batch."""
    precision = resolve_precision(config.train.precision, device)
    # The choice of end-of-text token affects neither sizes nor times.
    model = configured_model(config, vocab_size, vocab_size - 1, fit.activation_checkpointing)
    init_weights(model, config.train.seed)
    model.to(device)
    tokens = torch.randint(vocab_size, (fit.sequences, config.data.seq_len + 1), device=device)
    synchronize(device)
    started = time.perf_counter()
    for _ in train_steps(
        model,
        build_optimizer(model, config.optim, matmul_dtype(precision), None),
        repeat((tokens[:, :-1], tokens[:, 1:])),
        FloatAccumulator(model, 1, 0),
        first_step=0,
        max_steps=_MAX_STEPS,
        learning_rate=lambda _: config.optim.peak_lr,
        grad_clip=config.optim.grad_clip,
        autocast=make_autocast(precision, device),
        seed=config.train.seed,
    ):
        synchronize(device)
        yield time.perf_counter() - started
        started = time.perf_counter()
