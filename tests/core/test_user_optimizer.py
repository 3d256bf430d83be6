"""Optimizers of the user's code: skipped, clipped, saved and resumed like the built-in ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from raytrain_gpt.core.model import GPT
from raytrain_gpt.core.optim import Optimizer, UserOptimizer, update
from raytrain_gpt.core.registry import build_optimizer, count_model, new_model
from raytrain_gpt.core.state import MODEL_FILE, HostSnapshot, load_model, load_optimizer
from raytrain_gpt.errors import ConfigError
from tests.conftest import raises_line
from tests.core.conftest import NewModel
from tests.core.foreign import CODE, own_section, train_foreign
from tests.core.sharded import SHAPE
from tests.core.test_optim import put_gradients
from tests.core.test_parallel import ranks_of, same
from tests.made_runs import own_config


def take_steps(model: GPT, optimizer: Optimizer, seeds: range) -> None:
    for seed in seeds:
        put_gradients(model, seed, 0.1)
        update(optimizer, [*model.parameters()], 0.01, 1.0)


def all_of(model: GPT, optimizer: Optimizer) -> list[Any]:
    """Return copies of the weights, the state, and the groups' values."""
    values: list[Any] = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        state = optimizer.state.get(p, {})
        values += [v.clone() if isinstance(v, Tensor) else v for _, v in sorted(state.items())]
    for group in optimizer.param_groups:
        values += [value for key, value in sorted(group.items()) if key not in ("params", "lr")]
    return values


def alike(ours: list[Any], theirs: list[Any]) -> bool:
    return len(ours) == len(theirs) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b
        for a, b in zip(ours, theirs, strict=True)
    )


def test_gradients_are_clipped_and_settings_arrive(new_model: NewModel) -> None:
    ours, theirs = new_model(), new_model()
    optimizer = build_optimizer(ours, own_section(optimizer="lion", lion_beta=0.5, peak_lr=0.3))
    assert isinstance(optimizer, UserOptimizer)
    assert (optimizer.param_groups[0]["beta"], optimizer.param_groups[0]["lr"]) == (0.5, 0.3)
    put_gradients(ours, 1, 10.0)
    put_gradients(theirs, 1, 10.0)
    norm = update(optimizer, [*ours.parameters()], 0.01, 1.0)
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert other.grad is not None
        expected = other.detach() - 0.01 * other.grad.sign()
        assert torch.allclose(mine, expected, atol=1e-7)
        assert torch.allclose(optimizer.state[mine]["momentum"], 0.5 * other.grad)
    assert norm > 1


@pytest.mark.parametrize("name", ["lion", "varied", "rate_in_tensor"])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_gradients_that_are_not_finite_change_nothing(
    model: GPT, name: str, steps_before: int
) -> None:
    optimizer = build_optimizer(model, own_section(optimizer=name))
    take_steps(model, optimizer, range(steps_before))
    before = all_of(model, optimizer)
    put_gradients(model, 3, 1.0)
    next(model.parameters()).grad[0, 0] = torch.nan  # type: ignore[index]
    update(optimizer, [*model.parameters()], 0.01, 1.0)
    assert alike(all_of(model, optimizer), before)
    assert all(p.grad is None for p in model.parameters())


def test_rates_of_groups_keep_their_ratio(model: GPT) -> None:
    optimizer = build_optimizer(model, own_section(optimizer="two_rates", peak_lr=0.5))
    for _ in range(3):
        before = [p.detach().clone() for p in model.parameters()]
        put_gradients(model, 1, 1e-3)
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        update(optimizer, [*model.parameters()], 0.01, 1e9)
        rates = [0.1] + [0.01] * (len(before) - 1)
        for p, old, gradient, rate in zip(
            model.parameters(), before, gradients, rates, strict=True
        ):
            assert torch.allclose(p, old - rate * gradient)


@pytest.mark.parametrize(
    ("name", "num_parts"),
    [
        ("adamw", 1),
        ("muon", 3),
        ("normuon", 2),
        ("lion", 1),
        ("varied", 3),
        ("renewed", 1),
        ("rate_in_tensor", 3),
    ],
)
def test_every_state_resumes_with_the_same_bits(
    name: str, num_parts: int, new_model: NewModel, tmp_path: Path
) -> None:
    config = own_section(optimizer=name)
    if name == "normuon":
        config = own_section(optimizer="muon", normuon_beta2=0.9)
    straight, cut, resumed = new_model(), new_model(), new_model()
    unbroken = build_optimizer(straight, config)
    take_steps(straight, unbroken, range(6))
    optimizer = build_optimizer(cut, config)
    snapshots = [HostSnapshot(cut, optimizer, part, num_parts) for part in range(num_parts)]
    take_steps(cut, optimizer, range(3))
    written: list[str] = []
    for snapshot in snapshots:
        snapshot.refresh()
        for file in snapshot.files():
            snapshot.write(file, tmp_path / file)
            written += load_file(tmp_path / file)
    assert len(written) == len({*written}), "each is in one share"
    load_model(tmp_path, resumed)
    again = build_optimizer(resumed, config)
    load_optimizer(tmp_path, resumed, again)
    take_steps(resumed, again, range(3, 6))
    assert alike(all_of(resumed, again), all_of(straight, unbroken))


def test_state_on_the_host_stays_there_although_the_weights_are_elsewhere(tmp_path: Path) -> None:
    """torch's AdamW has its step counts on the host; on a GPU each would cost a wait per step."""
    with torch.device("meta"):
        model = new_model(SHAPE)
    optimizer = build_optimizer(model, own_section(optimizer="rate_in_tensor"))
    for p in model.parameters():
        optimizer.state[p] = {"step": torch.tensor(3.0), "exp_avg": torch.empty_like(p)}
    snapshot = HostSnapshot(model, optimizer)
    (file,) = [file for file in snapshot.files() if file != MODEL_FILE]
    snapshot.write(file, tmp_path / file)
    assert {"wte.weight/step:cpu", "wte.weight/exp_avg"} <= load_file(tmp_path / file).keys()
    for has_state in (False, True):  # before loading
        if not has_state:
            optimizer.state.clear()
        load_optimizer(tmp_path, model, optimizer)
        assert {s["step"].device.type for s in optimizer.state.values()} == {"cpu"}
        assert {s["exp_avg"].device.type for s in optimizer.state.values()} == {"meta"}
    with torch.device("cpu"):
        model = new_model(SHAPE)
    optimizer = build_optimizer(model, own_section(optimizer="rate_in_tensor"))
    load_optimizer(tmp_path, model, optimizer)
    assert {s["step"].shape for s in optimizer.state.values()} == {()}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("forgets", ["updates 27 of 28 parameters; pass it each parameter once"]),
        ("no_rate", ["without a learning rate", "give every group an lr"]),
        ("other", ["optimizer other returned a int"]),
        ("raises", ["optimizer raises, my.py, line", "AttributeError", "no_such_attribute"]),
    ],
)
def test_what_cannot_be_an_optimizer_is_one_line(model: GPT, name: str, words: list[str]) -> None:
    with raises_line(ConfigError, *words):
        build_optimizer(model, own_section(optimizer=name))


def test_only_elementwise_optimizers_are_sharded() -> None:
    for name in ("lion", "muon", "adamw"):
        own_config(CODE.text, optimizer=name, parallel="fsdp")
    with raises_line(ConfigError, "parallel=fsdp", "optimizer varied", "elementwise=True", "ddp"):
        own_config(CODE.text, optimizer="varied", parallel="fsdp")


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Return the output directory and results of three ranks."""
    directory = tmp_path_factory.mktemp("three-ranks")
    return directory, ranks_of(3, directory, train_foreign)


@pytest.mark.slow
@pytest.mark.parametrize("run", ["lion False", "lion True", "varied False"])
def test_ranks_resume_with_the_same_bits(
    three: tuple[Path, list[dict[str, Any]]], run: str
) -> None:
    for rank in three[1]:
        assert same(rank[run]["resumed"], rank[run]["straight"])
        assert same(rank[run]["straight"], three[1][0][run]["straight"])


@pytest.mark.slow
def test_an_elementwise_optimizer_has_shards_and_the_momentum_of_ddp(
    three: tuple[Path, list[dict[str, Any]]],
) -> None:
    directory, ranks = three
    num = count_model(SHAPE).num_parameters
    for rank in ranks:
        ddp, fsdp = rank["lion False"], rank["lion True"]
        assert ddp["kept"] == (num, num)
        assert max(fsdp["kept"]) < 0.36 * num
        for ours, theirs in zip(fsdp["momenta"], ddp["momenta"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    files = [
        {k: t for path in (directory / run).glob("*") for k, t in load_file(path).items()}
        for run in ("lion False", "lion True")
    ]
    shapes = [{k: (t.shape, t.dtype) for k, t in file.items()} for file in files]
    assert shapes[0] == shapes[1]
    assert any(name.endswith("/momentum") for name in shapes[0])


@pytest.mark.slow
def test_exact_sums_give_one_rank_and_two_the_same_bits(
    three: tuple[Path, list[dict[str, Any]]],
) -> None:
    one, *two = (rank["exact"] for rank in three[1])
    assert all(alike(one, other) for other in two)
