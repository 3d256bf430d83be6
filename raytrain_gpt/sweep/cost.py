"""Resources of a trial, the number of concurrent trials, and the cost of a sweep at a speed measured here."""

from __future__ import annotations

import itertools
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import torch

from raytrain_gpt.cluster.capacity import DATA_CPUS, Resources
from raytrain_gpt.config.resolved import FittedConfig, SizedConfig, decided
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.accumulation import FloatSum
from raytrain_gpt.core.device import make_autocast, matmul_dtype, resolve_precision
from raytrain_gpt.core.loop import train_steps
from raytrain_gpt.core.memory import MemoryModel
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.registry import build_optimizer, configured_model
from raytrain_gpt.data.locations import data_is_there, data_of
from raytrain_gpt.format import amount, count, duration
from raytrain_gpt.sweep.halving import Halving
from raytrain_gpt.sweep.results import plan_table
from raytrain_gpt.sweep.spec import Asha, Sweep
from raytrain_gpt.sweep.trial_plan import (
    base_config,
    check_sweep,
    checked_configs,
    gpu_share,
    num_trials,
    planned_trials,
    shapes_of,
    tied_values,
)
from raytrain_gpt.train.memory_fit import fit_sharing
from raytrain_gpt.train.memory_search import MemorySearch, gpu_limit_bytes
from raytrain_gpt.train.preflight import expected_vocab_size

PROBE_S = 6.0
"""Duration of the speed measurement, which takes at least one step of every shape."""
TRIAL_IMPORTS = [sys.executable, "-c", "import raytrain_gpt.sweep.trial_actor"]
"""Imports of a trial's process. The other starts are multiples of their time: ratios from the quickstart's
sweep on two cores, where they take 3.2 s."""
FIXED = 4.7
"""Start of the command, of Ray and of the first processes; pictures and the end: 15 s."""
NEW_PROCESS, USED_PROCESS = 0.9, 0.12
"""First trial of a process besides its steps and evaluations (MLflow's imports), 2.9 s; later ones, 0.4 s."""
SEVERAL_WORKERS = 11.0
"""A trial of several workers besides its steps: 33 and 51 s in two sweeps."""
DRAWS = 2000
"""Trials drawn for the expected tokens of early stopping."""


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


def cpus_to_start(
    config: SizedConfig,
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
    c = config.cluster
    gpus = torch.cuda.device_count() if c.use_gpu is not False else 0
    if gpus and (not shares_gpus or c.gpus_per_worker < 1):
        fit = int(gpus / (c.num_workers * c.gpus_per_worker) + 1e-9)
    else:
        fit = (os.cpu_count() or 1) // (c.num_workers * c.cpus_per_worker)
    return max(1, min(max_concurrent or fit, number)) * trial_cpus(config)


def sweep_cpus(sweep: Sweep, config: SizedConfig) -> int:
    """Return the logical CPUs to start a cluster with for a sweep."""
    return cpus_to_start(
        config,
        num_trials(sweep),
        sweep.max_concurrent_trials,
        shares_gpus=sweep.trials_per_gpu == "auto",
    )


def trials_at_once(
    config: FittedConfig, resources: Resources, number: int, max_concurrent: int | None
) -> int:
    c = config.cluster
    places = resources.places(c.cpus_per_worker, c.num_gpus)
    fit = min(places // c.num_workers, int(resources.cpus // trial_cpus(config)))
    return max(1, min(fit, max_concurrent or fit, number))


def largest_trial(sweep: Sweep, base: SizedConfig) -> SizedConfig:
    """Return the configuration that needs the most memory of all that trials may get, by prediction.

    For `trials_per_gpu=auto`, which has no `auto` of `AUTO_MEMORY_FIELDS`.
    """

    def needed(config: SizedConfig) -> float:
        shape = GPTShape.of(config, expected_vocab_size(config))
        train, memory = config.train, MemoryModel.of(config, 1, shape, bf16=True)
        assert train.micro_batch_sequences != "auto"
        assert train.activation_checkpointing != "auto"
        return memory.predict(train.micro_batch_sequences, train.activation_checkpointing).total

    configs = checked_configs(sweep, 1)
    sized = {_shape(config): config for config in map(one_worker_for_auto, configs)}
    return max(sized.values(), key=needed, default=base)


@dataclass(frozen=True)
class Speed:
    """Measured times of one worker, in seconds.

    Attributes:
        sequences: Sequences of a micro-batch.
        first_s: A step of one micro-batch, with the optimizer.
        further_s: Each further micro-batch of a step.
        eval_s: Evaluation of one token.
    """

    sequences: int
    first_s: float
    further_s: float
    eval_s: float

    def step_s(self, config: SizedConfig) -> float:
        here = config.batch_sequences / config.cluster.num_workers
        return self.first_s + max(0.0, here / self.sequences - 1) * self.further_s

    def evaluation_s(self, config: SizedConfig) -> float:
        tokens = config.eval.eval_tokens
        if data_is_there(config):
            tokens = len(data_of(config).val_ids(config.data.seq_len, tokens)) * config.data.seq_len
        return tokens * self.eval_s / config.cluster.num_workers


def cost_lines(sweep: Sweep) -> list[str]:
    """Format the trials, the resources of each, and their total tokens and time; may raise ConfigError."""
    base = one_worker_for_auto(base_config(sweep))
    configs = check_sweep(sweep, base.cluster.num_workers)
    on_gpu = base.cluster.use_gpu is not False and torch.cuda.is_available()
    if sweep.trials_per_gpu == "auto" and on_gpu:
        largest = largest_trial(sweep, base)
        together = fit_sharing(largest, expected_vocab_size(largest))
        base = base.updated({"gpus_per_worker": gpu_share(together)})
    c = base.cluster
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
    if sweep.trials_per_gpu == "auto" and not on_gpu:
        gpus = ", with GPUs as many on each as its memory fits"
    for_data = f", {data_cpus(base)} of them for data" if data_cpus(base) else ""
    at_once = sweep_cpus(sweep, base) // trial_cpus(base)
    lines.append(
        f"each trial: {count(trial_cpus(base), 'CPU')}{for_data}{gpus} | on this machine: {at_once} at once"
    )
    full, share, stops = number * sweep.budget_tokens, trained_share(sweep, number), ""
    if share < 1:
        stops = f"; about {amount(share * full)} if early stopping meets losses in any order"
    lines.append(
        f"tokens: {number} × {amount(sweep.budget_tokens)} = {amount(full)} at most{stops}"
    )
    device = torch.device("cuda" if on_gpu else "cpu")
    trials = [one_worker_for_auto(config) for config in configs] or [base] * number
    steps_s = all_steps_s(sweep, trials, device)
    if steps_s is None:
        return [*lines, "time: unknown; a trial does not fit in this machine's memory"]
    if on_gpu:  # trials that share a GPU share its speed
        steps_s /= c.gpus_per_worker
    else:  # more of them share the same cores
        at_once = min(at_once, max(1, (os.cpu_count() or 1) // (c.num_workers * c.cpus_per_worker)))
    imports_s = measured_imports_s()
    first, each = (0, SEVERAL_WORKERS) if c.num_workers > 1 else (NEW_PROCESS, USED_PROCESS)
    starts_s = imports_s * (FIXED + first + number * each / at_once)
    most_s, about_s = (part * steps_s / at_once for part in (1, share))
    most = f" (at most {duration(starts_s + most_s)})" if share < 1 else ""
    lines.append(
        f"time: about {duration(starts_s + about_s)}{most}: {duration(about_s)} of steps and evaluations, "
        f"measured here ({device.type}), {at_once} at full speed at once; {duration(starts_s)} of starts"
    )
    return lines


def trained_share(sweep: Sweep, number: int) -> float:
    """Return the expected share of the tokens that trials train, if losses come in any order.

    A trial that is better at one rung is so at all of them.
    """
    if not isinstance(sweep.scheduler, Asha):
        return 1.0
    names, draws = [str(n) for n in range(number)], random.Random(sweep.sweep_seed)
    shares = []
    for _ in range(-(-DRAWS // number)):
        halving = Halving(sweep.scheduler, sweep.budget_tokens, names)
        for name in names:
            loss, rung = draws.random(), sweep.scheduler.grace_tokens
            while rung < sweep.budget_tokens:
                halving.report(name, rung, loss)
                if not halving.passes(name, rung):
                    break
                rung *= sweep.scheduler.reduction_factor
            shares.append(min(rung, sweep.budget_tokens) / sweep.budget_tokens)
    return fmean(shares)


def all_steps_s(sweep: Sweep, trials: list[SizedConfig], device: torch.device) -> float | None:
    """Measure each shape here; return the time of all trials' steps and evaluations, in seconds.

    None if a trial does not fit.
    """
    shapes = {_shape(config): config for config in trials}
    times = {}
    for shape, config in shapes.items():
        speed = measured_speed(config, device, PROBE_S / len(shapes))
        if speed is None:
            return None
        times[shape] = speed, speed.evaluation_s(config)
    total_s, evaluations = 0.0, sweep.budget_tokens // sweep.report_every_tokens
    for config in trials:
        speed, evaluation_s = times[_shape(config)]
        steps = sweep.budget_tokens / config.train.global_batch_tokens
        total_s += steps * speed.step_s(config) + evaluations * evaluation_s
    return total_s


def _shape(config: SizedConfig) -> str:
    """Return the fields that decide the time of a step of one micro-batch."""
    return f"{shapes_of(config)} {config.optim.optimizer}"


def measured_imports_s() -> float:
    started = time.perf_counter()
    subprocess.run(TRIAL_IMPORTS, check=True)
    return time.perf_counter() - started


def measured_speed(config: SizedConfig, device: torch.device, probe_s: float) -> Speed | None:
    """Time steps of one and two micro-batches, and evaluation; None if the model does not fit."""
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
    fit = search.largest(limit_bytes if on_gpu else math.inf) or search.least()
    micro = config.train.micro_batch_sequences
    sequences = micro if isinstance(micro, int) else fit.sequences if on_gpu else 1
    if search.predict(sequences, fit.activation_checkpointing) > limit_bytes:
        return None
    # Any id may end documents, since no time depends on it.
    last_id = shape.vocab_size - 1
    model = configured_model(config, shape.vocab_size, last_id, fit.activation_checkpointing)
    model.init_weights(config.train.seed)
    model.to(device)
    ids = torch.randint(shape.vocab_size, (sequences, config.data.seq_len), device=device)
    autocast = make_autocast(precision, device)
    optimizer = build_optimizer(model, config.optim, matmul_dtype(precision))

    def step(micro_batches: int) -> None:
        model.train()
        for result in train_steps(
            model,
            optimizer,
            itertools.repeat((ids, ids)),
            FloatSum(model, micro_batches),
            first_step=0,
            max_steps=1,
            learning_rate=lambda _: config.optim.peak_lr,
            grad_clip=config.optim.grad_clip,
            autocast=autocast,
            seed=config.train.seed,
        ):
            result.loss.item()  # waits for the device

    @torch.no_grad()
    def evaluate() -> None:
        model.eval()
        with autocast():
            model(ids, ids, reduction="none").sum().item()

    def seconds(action: Callable[[], None]) -> float:
        """Repeat an action for a third of the probe; return its mean time."""
        action()
        started, times = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - started) < probe_s / 3 or not times:
            action()
            times += 1
        return elapsed / times

    one_s, two_s = seconds(lambda: step(1)), seconds(lambda: step(2))
    return Speed(sequences, one_s, max(two_s - one_s, 0.0), seconds(evaluate) / ids.numel())
