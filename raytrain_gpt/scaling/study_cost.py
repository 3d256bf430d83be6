"""The plan of a study as text: models, runs, and their time and price at a measured or assumed speed."""

from __future__ import annotations

import os
from collections.abc import Iterator

from raytrain_gpt.config.resolved import workers_of
from raytrain_gpt.core.device import ASSUMED_MFU
from raytrain_gpt.data.locations import data_is_there, read_data
from raytrain_gpt.format import amount, duration, table
from raytrain_gpt.scaling.plan import StudyPlan, study_base
from raytrain_gpt.scaling.rates import around
from raytrain_gpt.scaling.study_file import Study
from raytrain_gpt.sweep import cost
from raytrain_gpt.train.preflight import expected_vocab_size


def cost_lines(study: Study) -> Iterator[str]:
    """Format models, runs, tokens, time and price; may raise ConfigError."""
    base = cost.one_worker_for_auto(study_base(study))
    plan = StudyPlan(study, base, expected_vocab_size(base))
    doubts = list(
        plan.check(read_data(base).split_tokens("train") if data_is_there(base) else None)
    )
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
    c, most = workers_of(base), study.max_concurrent_runs
    devices = c.num_workers
    if study.gpu is not None:
        at_once, flop_s = most or 1, 1 / (study.gpu.bf16_flops * ASSUMED_MFU)
        how = f"{devices} × {study.gpu.name} each, at an MFU of {ASSUMED_MFU:g}, not measured"
    else:
        at_once = cost.cpus_to_start(base, len(runs), most) // cost.trial_cpus(base)
        cores = max(1, (os.cpu_count() or 1) // (devices * c.cpus_per_worker))
        at_once, largest = min(at_once, cores), base.updated(plan.sizes[-1].fields)
        measured_s = cost.seconds_per_flop([largest], plan.vocab_size)
        if measured_s is None:
            yield "time: unknown; a model does not fit in this machine's memory"
            return
        flop_s, how = measured_s, "a step of the largest measured here and scaled by FLOPs"
    # An evaluation has no backward pass.
    flops += sum(6 * run.size.parameters * base.eval.eval_tokens / 3 for run in runs)
    total_s = flops * flop_s / devices / at_once
    price = ""
    if study.price_per_hour is not None:
        price = f" | price {total_s / 3600 * devices * at_once * study.price_per_hour:,.2f}"
    yield f"time: about {duration(total_s)} without starts and waits, {at_once} at once, {how}{price}"
