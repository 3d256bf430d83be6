"""Loss scaling: growth and backoff of the factor, skipped overflows, and bit-identical resumes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from raytrain_gpt.config.sections import OptimSection, SpikesSection
from raytrain_gpt.core.device import make_autocast, resolve_precision
from raytrain_gpt.core.loop import MicroBatch, StepResult
from raytrain_gpt.core.model import GPT
from raytrain_gpt.core.optim import (
    GROWTH_INTERVAL,
    INIT_SCALE,
    LossScale,
    Optimizer,
    loss_scale_for,
)
from raytrain_gpt.core.registry import build_optimizer
from raytrain_gpt.core.spikes import SpikeDetector, overflowed
from tests import training
from tests.core.conftest import MicroBatches, NewModel

CPU = torch.device("cpu")
OPTIM = OptimSection(peak_lr=1e-2, warmup_steps=0)
YES, NO = torch.tensor(True), torch.tensor(False)


def steps(
    model: GPT,
    optimizer: Optimizer,
    micro_batches: Iterator[MicroBatch],
    scale: LossScale | None,
    first: int,
    last: int,
    precision: str = "fp16",
) -> list[StepResult]:
    changes: dict[str, Any] = {"micro_batches_per_step": 2, "learning_rate": lambda step: 1e-2}
    changes |= {"first_step": first, "seed": 1, "loss_scale": scale}
    autocast = make_autocast(precision, CPU)
    return list(training.steps(model, optimizer, micro_batches, last, autocast=autocast, **changes))


def test_the_factor_halves_with_an_overflow_and_doubles_after_many_steps_without() -> None:
    scale = LossScale(CPU, 8.0)
    scale.adjust(YES)
    assert scale.state() == (4.0, 0)
    for _ in range(GROWTH_INTERVAL - 1):
        scale.adjust(NO)
    assert scale.state() == (4.0, GROWTH_INTERVAL - 1)
    scale.adjust(NO)
    assert scale.state() == (8.0, 0)
    scale.adjust(NO)
    scale.adjust(YES)
    assert scale.state() == (4.0, 0)
    for _ in range(40):
        scale.adjust(YES)
    assert scale.state() == (1.0, 0)


def test_only_fp16_is_scaled() -> None:
    assert loss_scale_for("fp32", CPU) is None
    assert loss_scale_for("bf16", CPU) is None
    new, saved = loss_scale_for("fp16", CPU), loss_scale_for("fp16", CPU, (32.0, 7))
    assert new is not None
    assert new.state() == (INIT_SCALE, 0)
    assert saved is not None
    assert saved.state() == (32.0, 7)
    assert resolve_precision("fp16", CPU) == "fp16"


def test_an_overflow_changes_nothing_but_the_factor(
    new_model: NewModel, micro_batches: MicroBatches
) -> None:
    model, scale = new_model(), LossScale(CPU, 2.0**30)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = build_optimizer(model, OPTIM)
    (result,) = steps(model, optimizer, micro_batches(1, 4), scale, 0, 1)
    assert math.isfinite(result.loss.item())
    assert not math.isfinite(result.grad_norm.item())
    for parameter, kept in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, kept)
    assert scale.state() == (2.0**29, 0)


def test_going_on_is_bitwise_the_unbroken_run(
    new_model: NewModel, micro_batches: MicroBatches
) -> None:
    """This also holds for a resume amid the overflows of the first steps."""
    first, at = 2.0**20, 6
    unbroken, broken = new_model(), new_model()
    scale = LossScale(CPU, first)
    told = steps(unbroken, build_optimizer(unbroken, OPTIM), micro_batches(8, 4), scale, 0, 8)
    finite = [math.isfinite(result.grad_norm.item()) for result in told]
    assert (finite[0], finite[-1]) == (False, True)
    optimizer, before = build_optimizer(broken, OPTIM), LossScale(CPU, first)
    steps(broken, optimizer, micro_batches(8, 4), before, 0, at)
    after = loss_scale_for("fp16", CPU, before.state())
    steps(broken, optimizer, micro_batches(8, 4, first_step=at), after, at, 8)
    assert after is not None
    assert after.state() == scale.state()
    for a, b in zip(broken.parameters(), unbroken.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("loss", "norm", "scale", "answer"),
    [
        (2.0, math.inf, 2.0, True),
        (2.0, math.nan, 2.0, True),
        (2.0, math.inf, 1.0, False),
        (2.0, math.inf, None, False),
        (math.nan, math.nan, 2.0, False),
        (math.inf, 1.0, 2.0, False),
        (2.0, 1.0, 2.0, False),
    ],
)
def test_an_overflow_is_of_the_gradients_alone(
    loss: float, norm: float, scale: float | None, answer: bool
) -> None:
    assert overflowed(loss, norm, scale) is answer


def test_overflows_are_no_bad_steps_until_the_factor_is_one() -> None:
    config = SpikesSection()
    detector = SpikeDetector(config)
    for step in range(100):
        assert detector.judge(step, 2.0, math.inf, 2.0) is None
    assert detector.streak == []
    for step in range(config.spike_patience):
        bad = detector.judge(100 + step, 2.0, math.inf, 1.0)
        assert bad is not None
        assert not bad.finite
    assert detector.out_of_patience
