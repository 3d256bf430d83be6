"""Muon: torch's Muon steps for matrices, AdamW steps for the rest, no step for non-finite gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from raytrain_gpt.config.sections import OptimSection
from raytrain_gpt.core import muon
from raytrain_gpt.core.model import GPT
from raytrain_gpt.core.muon import newton_schulz, newton_schulz_flops
from raytrain_gpt.core.optim import AdamW, LossScale, update
from raytrain_gpt.core.registry import build_optimizer, new_model
from tests.core.conftest import QWEN3, TINY
from tests.core.test_optim import all_equal, put_gradients

MUON = OptimSection(optimizer="muon", weight_decay=0.2, beta1=0.8, beta2=0.9, grad_clip=0.7)
RECIPE = {
    "muon_momentum": 0.8, "muon_head_group": 1, "normuon_beta2": 0.9, "embedding_lr_factor": 3.0
}  # fmt: skip
CONFIGS = {
    "adamw": MUON.model_copy(update={"optimizer": "adamw"}),
    "muon": MUON,
    "normuon": MUON.model_copy(update=RECIPE),
}
SHAPES = {"gpt2": replace(TINY, num_layers=3), "qwen3": replace(QWEN3, num_layers=3)}
"""Shapes with square, tall and wide matrices."""
CPU = torch.device("cpu")


@pytest.fixture(params=SHAPES)
def make(request: pytest.FixtureRequest) -> Callable[[], GPT]:
    """Return a factory of models with fixed weights, once per architecture."""

    def made() -> GPT:
        model = new_model(SHAPES[request.param])
        model.init_weights(0)
        return model

    return made


def optimizer_of(model: GPT, dtype: torch.dtype = torch.float32, kind: str = "muon") -> AdamW:
    return build_optimizer(model, CONFIGS[kind], dtype)


def matrices(model: GPT) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.h.parameters() if parameter.dim() == 2]


def take_step(model: GPT, optimizer: AdamW, seed: int, scale: float = 1.0) -> None:
    put_gradients(model, seed, scale)
    update(optimizer, list(model.parameters()), 0.01, MUON.grad_clip)
    assert all(parameter.grad is None for parameter in model.parameters())


def state_of(model: GPT, optimizer: AdamW) -> list[Tensor]:
    """Return copies of all weights and of the optimizer's state."""
    tensors: list[Tensor] = list(model.parameters())
    for parameter in model.parameters():
        tensors += optimizer.state[parameter].values()
    return [tensor.detach().clone() for tensor in tensors]


def trained_with_torchs(model: GPT, num_steps: int) -> None:
    """Train the block matrices with `torch.optim.Muon`, and clip the gradients by hand.

    GPT-2's queries, keys and values are updated as separate matrices.
    """
    thirds = {
        parameter: [torch.nn.Parameter(part.clone()) for part in parameter.detach().chunk(3)]
        for name, parameter in model.h.named_parameters()
        if name.endswith("c_attn.weight")
    }
    reference = torch.optim.Muon(
        [part for parameter in matrices(model) for part in thirds.get(parameter, [parameter])],
        weight_decay=MUON.weight_decay,
        momentum=0.95,
        nesterov=True,
        adjust_lr_fn="match_rms_adamw",
    )
    for step in range(num_steps):
        norm = put_gradients(model, step, 1.0)
        for group in reference.param_groups:
            group["lr"] = 1e-3 * (step + 1)
        for parameter in matrices(model):
            assert parameter.grad is not None
            parameter.grad *= min(1.0, MUON.grad_clip / norm)
            for part, gradient in zip(
                thirds.get(parameter, []), parameter.grad.chunk(3), strict=False
            ):
                part.grad = gradient
        reference.step()
    for parameter, parts in thirds.items():
        parameter.data = torch.cat([*parts])


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "num_steps", "close"), [
    (torch.float32, 15, 2e-6), (torch.bfloat16, 5, 0.02)
])  # fmt: skip
def test_steps_are_those_of_torchs_muon(
    make: Callable[[], GPT],
    dtype: torch.dtype,
    num_steps: int,
    close: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's Muon iterates in bf16 only; for the fp32 case it is patched to iterate in float64."""
    ours, theirs = make(), make()
    optimizer = optimizer_of(ours, dtype)
    for step in range(num_steps):
        put_gradients(ours, step, 1.0)
        update(optimizer, list(ours.parameters()), 1e-3 * (step + 1), MUON.grad_clip)
    with monkeypatch.context() as patch:
        if dtype == torch.float32:
            patch.setattr(Tensor, "bfloat16", Tensor.double)
        trained_with_torchs(theirs, num_steps)
    started = make()
    for a, b, start in zip(matrices(ours), matrices(theirs), matrices(started), strict=True):
        assert (a - b).norm() < close * (b - start).norm()


def test_all_but_the_blocks_matrices_get_exactly_adamws_steps(make: Callable[[], GPT]) -> None:
    ours, theirs = make(), make()
    optimizers = optimizer_of(ours), optimizer_of(theirs, kind="adamw")
    for step in range(3):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            take_step(model, optimizer, step)
    by_muon = {id(parameter) for parameter in matrices(ours)}
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b) == (id(a) not in by_muon)
    kept = [set(optimizers[0].state[p]) == {"momentum_buffer"} for p in matrices(ours)]
    assert kept == [True] * len(by_muon) != []


@pytest.mark.parametrize(
    ("kind", "bad", "place", "steps_before"),
    [
        ("adamw", math.nan, "h.1.mlp", 2),
        ("muon", math.nan, "h.0.attn", 0),
        ("muon", math.inf, "h.1.mlp", 2),
        ("muon", -math.inf, "wte.weight", 2),
        ("normuon", math.nan, "h.1.mlp", 2),
    ],
)
def test_a_broken_gradient_changes_nothing(
    make: Callable[[], GPT], kind: str, bad: float, place: str, steps_before: int
) -> None:
    broken, unbroken = make(), make()
    optimizers = [optimizer_of(model, kind=kind) for model in (broken, unbroken)]
    for step in range(steps_before):
        for model, optimizer in zip((broken, unbroken), optimizers, strict=True):
            take_step(model, optimizer, step)
    weights = [parameter.detach().clone() for parameter in broken.parameters()]

    put_gradients(broken, 50, 1.0)
    spoilt = next(p for name, p in broken.named_parameters() if name.startswith(place))
    assert spoilt.grad is not None
    spoilt.grad.view(-1)[3] = bad
    norm = update(optimizers[0], list(broken.parameters()), 0.01, MUON.grad_clip)
    assert not math.isfinite(norm.item())
    assert all_equal([*broken.parameters()], weights)

    for model, optimizer in zip((broken, unbroken), optimizers, strict=True):
        take_step(model, optimizer, 99)
    assert all_equal(state_of(broken, optimizers[0]), state_of(unbroken, optimizers[1]))


def test_a_loss_scale_changes_no_bit(make: Callable[[], GPT]) -> None:
    plain, scaled = make(), make()
    optimizers = optimizer_of(plain, kind="normuon"), optimizer_of(scaled, kind="normuon")
    for step in range(3):
        take_step(plain, optimizers[0], step)
        put_gradients(scaled, step, 1024.0)
        scale = LossScale(CPU, 1024.0)
        update(optimizers[1], list(scaled.parameters()), 0.01, MUON.grad_clip, scale)
    assert all_equal(state_of(plain, optimizers[0]), state_of(scaled, optimizers[1]))


def test_normuon_evens_out_neurons_over_time(make: Callable[[], GPT]) -> None:
    """Each matrix by itself; the columns of a wide one are its neurons, and fused maps have only rows."""
    ours, theirs = make(), make()
    settings = {"muon_momentum": 0.8, "weight_decay": 0.0, "normuon_beta2": 0.9}
    optimizer = build_optimizer(ours, MUON.model_copy(update=settings))
    plain = build_optimizer(theirs, MUON.model_copy(update=settings | {"normuon_beta2": 0.0}))
    averages: dict[str, Tensor] = {}
    for step in range(3):
        before = {name: p.detach().clone() for name, p in ours.h.named_parameters()}
        theirs.load_state_dict(ours.state_dict())
        for model, one in ((ours, optimizer), (theirs, plain)):
            take_step(model, one, step)
        for (name, p), q in zip(ours.h.named_parameters(), theirs.h.parameters(), strict=True):
            if p.dim() < 2:
                continue
            update = (before[name] - q).double() / 0.01  # root mean square about 0.2
            num_maps = 3 if name.endswith("c_attn.weight") else 1
            dim = 1 if num_maps > 1 or len(p) >= p.shape[1] else 0
            squares = (update / 0.2).square().mean(dim, keepdim=True)
            average = averages.get(name, torch.ones_like(squares))
            averages[name] = 0.9 * average + 0.1 * squares
            expected = before[name] - 0.01 * update / averages[name].sqrt()
            torch.testing.assert_close(p.detach().double(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("head_group", "num_maps"), [
    (1, {"gpt2": (6,), "qwen3": (4, 2, 2)}),
    (2, {"gpt2": (3,), "qwen3": (2, 1, 1)}),
    (4, {"gpt2": (3,), "qwen3": (1, 1, 1)}),
])  # fmt: skip
def test_groups_of_heads_are_updated_like_separate_matrices(
    make: Callable[[], GPT],
    head_group: int,
    num_maps: dict[str, tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = make(), make()
    optimizer = build_optimizer(ours, MUON.model_copy(update={"muon_head_group": head_group}))
    maps = dict(zip(ours.head_projections, num_maps[ours.shape.architecture], strict=True))
    monkeypatch.setattr(type(theirs), "fused_projections", maps)
    for model, one in ((ours, optimizer), (theirs, optimizer_of(theirs))):
        take_step(model, one, 0)
    assert all_equal(state_of(ours, optimizer)[: len([*ours.parameters()])], [*theirs.parameters()])


def test_only_an_embedding_that_is_not_the_head_has_its_own_rate(make: Callable[[], GPT]) -> None:
    ours, theirs = make(), make()
    for model, config in ((ours, CONFIGS["normuon"]), (theirs, CONFIGS["adamw"])):
        factor = 3 if model is theirs and ours.head_weight is not ours.wte.weight else 1
        optimizer = build_optimizer(model, config)
        for step in range(2):
            put_gradients(model, step, 1.0)
            update(optimizer, list(model.parameters()), 0.01 * factor, MUON.grad_clip)
    assert torch.equal(ours.wte.weight, theirs.wte.weight)
    others = list(ours.ln_f.parameters())
    assert all_equal(others, [*theirs.ln_f.parameters()]) == (ours.head_weight is ours.wte.weight)


def test_without_a_gradient_weights_only_decay(make: Callable[[], GPT]) -> None:
    model = make()
    before = [matrix.detach().clone() for matrix in matrices(model)]
    take_step(model, optimizer_of(model), 0, scale=0.0)
    for matrix, start in zip(matrices(model), before, strict=True):
        torch.testing.assert_close(matrix.detach(), start * (1 - 0.01 * MUON.weight_decay))


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_how_many_matrices_are_stacked_changes_only_rounding(
    make: Callable[[], GPT], dtype: torch.dtype, rounding: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some CPUs multiply a stack of one matrix by another kernel than a stack of several."""
    states = []
    for limit in (muon.STACK_ELEMENTS, 2 * 96 * 32, 1):
        monkeypatch.setattr(muon, "STACK_ELEMENTS", limit)
        model = make()
        optimizer = optimizer_of(model, dtype, "normuon")
        for step in range(3):
            take_step(model, optimizer, step)
        states.append(state_of(model, optimizer))
    for other in states[1:]:
        torch.testing.assert_close(states[0], other, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("shape", [(24, 72), (72, 24)])
def test_singular_values_become_about_one(shape: tuple[int, int]) -> None:
    stack = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(newton_schulz(stack))
    assert values.min() > 0.3
    assert values.max() < 1.3
    assert torch.equal(newton_schulz(torch.zeros(2, *shape)), torch.zeros(2, *shape))


@pytest.mark.parametrize("shape", [(32, 32), (32, 96)])
def test_operations_are_those_that_torch_counts(shape: tuple[int, int]) -> None:
    with FlopCounterMode(display=False) as counted:
        newton_schulz(torch.randn(5, *shape))
    assert counted.get_total_flops() == 5 * newton_schulz_flops(*shape)
