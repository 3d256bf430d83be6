"""Profiles of real steps: recorded at the right steps, complete, and without changing the math."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator

import pytest
import torch

from raytrain_gpt.config.sections import OptimSection
from raytrain_gpt.core.gpt2 import GPT2
from raytrain_gpt.core.loop import MicroBatch, StepResult
from raytrain_gpt.core.model import GPT, GPTShape
from raytrain_gpt.core.registry import build_optimizer
from raytrain_gpt.events import Profile
from raytrain_gpt.trackers.run_files import read_rows
from raytrain_gpt.train.launch import train
from raytrain_gpt.train.profile import STEP_SPAN, STEPS_BEFORE_PROFILE, StepProfile
from tests.made_runs import MakeConfig
from tests.training import steps

CPU = torch.device("cpu")
MAX_STEPS = 10


def num_spans(trace: bytes) -> int:
    """Count the profiled steps in a trace."""
    events = json.loads(gzip.decompress(trace))["traceEvents"]
    return sum(event["name"] == STEP_SPAN for event in events)


def tokens() -> Iterator[MicroBatch]:
    generator = torch.Generator().manual_seed(3)
    while True:
        ids = torch.randint(0, 100, (4, 17), generator=generator)
        yield ids[:, :-1], ids[:, 1:]


def trained(
    profile_steps: int, take: Callable[[Profile], None]
) -> Iterator[tuple[StepResult, GPT]]:
    """Train a tiny model for ten steps, of which `profile_steps` are profiled."""
    model = GPT2(GPTShape(2, 2, 32, 16, 100, dropout=0.1))
    model.init_weights(0)
    profile = StepProfile(profile_steps, 0, MAX_STEPS, CPU, take)
    optimizer = build_optimizer(model, OptimSection())
    results = steps(model, optimizer, tokens(), MAX_STEPS, micro_batches_per_step=2, seed=1)
    for result in profile.record_steps(results):
        yield result, model


@pytest.mark.slow
@pytest.mark.parametrize("profile_steps", [1, MAX_STEPS - STEPS_BEFORE_PROFILE])
def test_a_profile_changes_no_bit(profile_steps: int) -> None:
    taken: list[Profile] = []
    plain = [(result.step, float(result.loss)) for result, _ in trained(0, taken.append)]
    assert not taken
    *_, (_, model) = trained(0, taken.append)
    profiled = [(r.step, float(r.loss), m) for r, m in trained(profile_steps, taken.append)]
    assert [row[:2] for row in profiled] == plain
    weights = profiled[-1][2].state_dict()
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    (profile,) = taken
    assert len(profile.steps) == num_spans(profile.trace) == profile_steps
    for operator in (STEP_SPAN, "aten::addmm", "Optimizer.step#", "Self CPU time total:"):
        assert operator in profile.table


def test_a_run_that_leaves_in_the_middle_stops_the_profiler() -> None:
    taken: list[Profile] = []
    results = trained(3, taken.append)
    for result, _ in results:
        if result.step == STEPS_BEFORE_PROFILE + 1:
            assert torch.autograd._profiler_enabled()
            break
    results.close()  # type: ignore[attr-defined]
    assert not torch.autograd._profiler_enabled()
    assert not taken


@pytest.mark.parametrize(
    ("num_steps", "done", "max_steps", "steps"),
    [
        (2, 0, 50, [6, 7]),
        (2, 30, 50, [36, 37]),
        (4, 42, 50, [48, 49, 50]),  # the run ends before the fourth step
        (2, 45, 50, []),
        (0, 0, 50, []),
    ],
)
def test_profile_begins_some_steps_after_each_start(
    num_steps: int, done: int, max_steps: int, steps: list[int]
) -> None:
    profile = StepProfile(num_steps, done, max_steps, CPU, pytest.fail)
    assert list(profile.steps) == steps
    assert list(profile.slowed) == ([steps[0] - 1, *steps] if steps else [])
    edges = [step for step in range(done + 1, max_steps + 1) if profile.is_edge(step)]
    assert edges == ([steps[0] - 2, steps[-1]] if steps else [])


@pytest.mark.slow
def test_profile_of_a_run_is_kept_and_its_slow_steps_are_not_averaged_with_others(
    make_config: MakeConfig,
) -> None:
    run_dir = train(
        make_config(run_name="profiled", profile_steps=2, max_steps=8), print
    ).run_dir.path
    rows = read_rows(run_dir)
    (event,) = [row for row in rows if row.get("event") == "profile"]
    assert num_spans((run_dir / event["trace"]).read_bytes()) == 2
    # The profiler's warm-up step is as slow as the profiled ones.
    steps = {row["step"]: row for row in rows if "train/loss" in row}
    assert [n for n, row in steps.items() if row["perf/tokens_per_s"] is None] == [5, 6, 7]
    assert len({steps[step]["perf/step_time_s"] for step in (4, 5, 8)}) == 3
