"""Checkpoint tensors: loaded tensors are bit-identical to saved ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from raytrain_gpt.config.sections import OptimSection
from raytrain_gpt.core.gpt2 import GPT2
from raytrain_gpt.core.loop import MicroBatch
from raytrain_gpt.core.model import GPT
from raytrain_gpt.core.optim import AdamW, Optimizer, numbers_of_groups
from raytrain_gpt.core.registry import build_optimizer, count_model
from raytrain_gpt.core.state import (
    MODEL_FILE,
    HostSnapshot,
    check_model_size,
    load_model,
    load_optimizer,
)
from raytrain_gpt.errors import CheckpointError
from tests.conftest import raises_line
from tests.core.conftest import MicroBatches
from tests.training import steps

OPTIM_FILE = "optim-00000.safetensors"
Trained = tuple[GPT, AdamW]


def save_state(directory: Path, model: GPT, optimizer: Optimizer) -> None:
    copy = HostSnapshot(model, optimizer)
    copy.refresh()
    for file in copy.files():
        copy.write(file, directory / file)


def train(
    model: GPT, optimizer: AdamW, batches: Iterator[MicroBatch], first: int, stop: int
) -> None:
    for _ in steps(model, optimizer, batches, stop, first_step=first):
        pass


@pytest.fixture
def trained(model: GPT, micro_batches: MicroBatches) -> Trained:
    """Return a model after 3 steps, and its optimizer."""
    optimizer = build_optimizer(model, OptimSection())
    train(model, optimizer, micro_batches(3), 0, 3)
    return model, optimizer


def test_files_have_only_the_metadata_that_keeps_their_bytes_the_same(
    tmp_path: Path, trained: Trained
) -> None:
    contents = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        save_state(tmp_path / name, *trained)
        contents.append([(tmp_path / name / f).read_bytes() for f in (MODEL_FILE, OPTIM_FILE)])
    assert contents[0] == contents[1]
    for file in (MODEL_FILE, OPTIM_FILE):
        with safe_open(tmp_path / "one" / file, "pt") as tensors:
            assert tensors.metadata() == {"format": "pt"}


@pytest.mark.parametrize(
    "changes", [{"num_layers": 3}, {"num_layers": 1}, {"embd_size": 64}, {"seq_len": 8}], ids=str
)
def test_a_model_and_an_optimizer_of_another_shape_are_refused(
    tmp_path: Path, trained: Trained, changes: dict[str, int]
) -> None:
    save_state(tmp_path, *trained)
    other = GPT2(replace(trained[0].shape, **changes))
    before = [parameter.detach().clone() for parameter in other.parameters()]
    with raises_line(CheckpointError, str(tmp_path), "configuration it was trained with"):
        load_model(tmp_path, other)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), before, strict=True))
    if changes != {"num_layers": 1}:
        with raises_line(CheckpointError, str(tmp_path)):
            load_optimizer(tmp_path, other, build_optimizer(other, OptimSection()))


def test_a_moment_that_is_missing_is_named(tmp_path: Path, trained: Trained) -> None:
    model, optimizer = trained
    save_state(tmp_path, model, optimizer)
    moments = load_file(tmp_path / OPTIM_FILE)
    del moments["ln_f.bias/exp_avg_sq"]
    save_file(moments, tmp_path / OPTIM_FILE)
    with raises_line(CheckpointError, "ln_f.bias/exp_avg_sq"):
        load_optimizer(tmp_path, model, build_optimizer(model, OptimSection()))


@pytest.mark.fault("unlisted files in a checkpoint", "ignored")
def test_moments_of_a_file_that_is_not_listed_are_not_read(
    tmp_path: Path, trained: Trained
) -> None:
    model, optimizer = trained
    save_state(tmp_path, model, optimizer)
    others = {name: tensor + 1 for name, tensor in load_file(tmp_path / OPTIM_FILE).items()}
    save_file(others, tmp_path / "optim-00009.safetensors")
    loaded = build_optimizer(model, OptimSection())
    load_optimizer(tmp_path, model, loaded, {MODEL_FILE, OPTIM_FILE})
    for parameter in model.parameters():
        for key, tensor in optimizer.state[parameter].items():
            assert torch.equal(loaded.state[parameter][key], tensor), key


@pytest.mark.fault("files that claim impossible sizes", "refused before allocation")
@pytest.mark.parametrize(
    "sizes", [{"num_layers": 10**9}, {"embd_size": 10**9}, {"vocab_size": 10**12}, {"seq_len": 1}]
)
def test_a_model_of_another_size_is_refused_before_it_is_made(
    tmp_path: Path, trained: Trained, sizes: dict[str, int]
) -> None:
    save_state(tmp_path, *trained)
    shape = trained[0].shape
    check_model_size(tmp_path, shape)
    with raises_line(
        CheckpointError, MODEL_FILE, f"{count_model(shape).num_parameters} parameters"
    ):
        check_model_size(tmp_path, replace(shape, **sizes))


@pytest.mark.parametrize("content", [None, b"", b"not tensors at all", "half"])
def test_a_damaged_file_is_refused(
    tmp_path: Path, trained: Trained, content: bytes | str | None
) -> None:
    model, optimizer = trained
    save_state(tmp_path, model, optimizer)
    for name in (MODEL_FILE, OPTIM_FILE):
        whole = (tmp_path / name).read_bytes()
        if content is None:
            (tmp_path / name).unlink()
        else:
            half = whole[: len(whole) // 2]
            (tmp_path / name).write_bytes(content if isinstance(content, bytes) else half)
    with raises_line(CheckpointError, MODEL_FILE):
        load_model(tmp_path, model)
    with raises_line(CheckpointError, str(tmp_path)):
        load_optimizer(tmp_path, model, build_optimizer(model, OptimSection()))


class Late(torch.optim.Optimizer):
    """Optimizer whose state, of many types, appears in its first step, and with a number in its group."""

    def __init__(self, model: GPT) -> None:
        super().__init__(model.parameters(), {"lr": 0.1, "d": 1e-6, "k": 0, "weight_decay": 0.5})
        self.grad_scale = self.found_inf = torch.zeros(())
        self.group_numbers = numbers_of_groups(self.param_groups)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["d"] *= 1.5
            group["k"] += 1
            for number, p in enumerate(group["params"]):
                rows = torch.arange(len(p))
                self.state[p] = {
                    "bf16": torch.full_like(p, 0.3, dtype=torch.bfloat16),
                    "fp64": torch.full_like(p, 1 / 3 + group["k"], dtype=torch.float64),
                    "int8": (rows % 100).to(torch.int8),
                    "flag": torch.tensor(True),
                    "count": 2**53 + 1 + number,
                    "ratio": 1e-300,
                    "warm": group["k"] > 1,
                    "nothing": None,
                    "factors": [rows.double() / 7, [], 3, [None, rows]],
                }


def equal(a: Any, b: Any) -> bool:
    """Compare two states: same types, bits and structure."""
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and bool(a == b)


@pytest.mark.parametrize("value", ["text", [object()]])
def test_a_state_that_a_file_cannot_hold_is_refused(model: GPT, value: object) -> None:
    optimizer = Late(model)
    optimizer.step()
    optimizer.state[model.head_weight]["odd"] = value
    with raises_line(CheckpointError, "wte.weight/odd", "tensors, numbers"):
        HostSnapshot(model, optimizer)
    for key in ("a/b", "a:int", 0):
        optimizer.state[model.head_weight] = {key: torch.zeros(1)}
        with raises_line(CheckpointError, repr(key), "name it like a variable"):
            HostSnapshot(model, optimizer)
    optimizer.state = defaultdict(dict, {torch.zeros(1): {"a": torch.zeros(1)}})
    with raises_line(CheckpointError, "belongs to no parameter"):
        HostSnapshot(model, optimizer)


@pytest.mark.parametrize(
    "damage",
    [
        {"factors:list": torch.tensor(5)},
        {"factors:list": torch.tensor([1, 2])},
        {"factors:list": torch.tensor(torch.nan)},
        {"count:int": torch.tensor([1, 2])},
        {"count:int": torch.tensor(torch.inf)},
    ],
)
def test_a_damaged_state_is_refused(tmp_path: Path, model: GPT, damage: dict[str, Tensor]) -> None:
    optimizer = Late(model)
    optimizer.step()
    save_state(tmp_path, model, optimizer)
    tensors = load_file(tmp_path / OPTIM_FILE)
    tensors |= {f"wte.weight/{key}": tensor for key, tensor in damage.items()}
    save_file(tensors, tmp_path / OPTIM_FILE)
    with raises_line(CheckpointError, str(tmp_path), "damaged optimizer state"):
        load_optimizer(tmp_path, model, Late(model))
