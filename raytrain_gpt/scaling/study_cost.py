"""The plan of a study as text: models, runs, and their time and price at a measured or assumed speed."""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Iterator, Sequence

import torch

from raytrain_gpt.config.resolved import SizedConfig
from raytrain_gpt.core.device import ASSUMED_MFU
from raytrain_gpt.data.locations import data_is_there, data_of
from raytrain_gpt.format import amount, duration, table
from raytrain_gpt.scaling.plan import PlannedRun, StudyPlan, study_base
from raytrain_gpt.scaling.rates import around
from raytrain_gpt.scaling.study_file import Study
from raytrain_gpt.sweep import cost
from raytrain_gpt.train.preflight import expected_vocab_size

Seconds = Callable[[PlannedRun], float]


def cost_lines(study: Study) -> Iterator[str]:
    """Format models, runs, tokens, time and price; may raise ConfigError."""
    base = cost.one_worker_for_auto(study_base(study))
    plan = StudyPlan(study, base, expected_vocab_size(base))
    doubts = list(plan.check(data_of(base).split_tokens("train") if data_is_there(base) else None))
    rows = []
    for number, size in enumerate(plan.sizes, 1):
        steps = [plan.steps(size, length) for length in plan.lengths]
        tokens = [f"{amount(n * plan.batch_tokens)} ({n:,})" for n in steps]
        rows.append([str(number), *map(str, size.shape), amount(size.parameters), *tokens])
    shape = ["layers", "heads", "channels", "parameters"]
    yield from table(["size"], [*shape, *(f"×{n} tokens (steps)" for n in plan.lengths)], rows)
    rates = study.peak_lrs
    middle = rates[len(rates) // 2]
    stages = [
        [*plan.rate_runs(0, rates), *plan.rate_runs(1, rates)],
        plan.rate_runs(2, around(middle, rates)),
        plan.ladder([middle] * len(plan.sizes)),
    ]
    runs = [run for stage in stages for run in stage]
    flops = sum(6 * run.size.parameters * run.own_tokens for run in runs)
    yield (
        f"runs: {' + '.join(str(len(stage)) for stage in stages)} (rates at two sizes, at the third; trunks, "
        f"cooldowns, seeds, batch), {amount(sum(run.own_tokens for run in runs))} tokens, {flops:.2g} FLOPs"
    )
    times = study.target_compute / plan.largest_compute
    yield f"target: {study.target_compute:.3g} FLOPs, {times:.1f} times the largest run"
    yield from (f"doubt: {line}" for line in doubts)
    devices, most = base.cluster.num_workers, study.max_concurrent_runs
    starts_s = cost.measured_imports_s() * (cost.FIXED + len(stages) * cost.NEW_PROCESS)
    each_s = cost.SEVERAL_WORKERS if devices > 1 else cost.USED_PROCESS
    if study.gpu is not None:
        at_once, speed = most or 1, study.gpu.bf16_flops * ASSUMED_MFU * devices
        seconds: Seconds | None = lambda run: 6 * run.size.parameters * run.own_tokens / speed  # noqa: E731
        how = f"{devices} × {study.gpu.name} each, at an MFU of {ASSUMED_MFU:g}, not measured"
    else:
        at_once = cost.cpus_to_start(base, len(runs), most) // cost.trial_cpus(base)
        at_once = min(
            at_once, max(1, (os.cpu_count() or 1) // (devices * base.cluster.cpus_per_worker))
        )
        seconds, how = _measured(plan, base), "measured here"
    if seconds is None:
        yield "time: unknown; a model does not fit in this machine's memory"
        return
    total_s = starts_s + sum(_makespan(stage, at_once, seconds, each_s) for stage in stages)
    price = ""
    if study.price_per_hour is not None:
        price = f" | price {total_s / 3600 * devices * at_once * study.price_per_hour:,.2f}"
    yield f"time: about {duration(total_s)}, {at_once} at once, {how}{price}"


def _measured(plan: StudyPlan, base: SizedConfig) -> Seconds | None:
    """Measure each size here; return a function of a run's seconds, or None if one does not fit."""
    on_gpu = base.cluster.use_gpu is not False and torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    times = {}
    for size in plan.sizes:
        config = base.updated(size.fields)
        speed = cost.measured_speed(config, device, cost.PROBE_S / len(plan.sizes))
        if speed is None:
            return None
        times[size] = speed.step_s(config) / plan.batch_tokens, speed.evaluation_s(config)
    return lambda run: run.own_tokens * times[run.size][0] + times[run.size][1]


def _makespan(runs: Sequence[PlannedRun], at_once: int, seconds: Seconds, each_s: float) -> float:
    """Return the time of runs that start in order, each after its trunk."""
    free, ends = [0.0] * at_once, {"": 0.0}
    for run in runs:
        ends[run.name] = max(heapq.heappop(free), ends[run.trunk]) + seconds(run) + each_s
        heapq.heappush(free, ends[run.name])
    return max(free)
