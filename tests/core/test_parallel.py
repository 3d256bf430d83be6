"""Models sharded over real processes: losses, updates, evaluations and checkpoints match DDP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from raytrain_gpt.config.sections import OptimSection
from raytrain_gpt.core.device import make_autocast, matmul_dtype
from raytrain_gpt.core.gpt2 import GPT2
from raytrain_gpt.core.registry import build_optimizer, count_model, new_model
from raytrain_gpt.core.state import HostSnapshot, load_model, load_optimizer
from tests import training
from tests.core.sharded import (
    BAD_STEP,
    CASES,
    CPU,
    MUON_CASES,
    SHAPE,
    STEPS,
    batch_of,
    go_on_from,
    in_ranks,
    rewrite_muon,
    train_all_cases,
    train_muon,
)

pytestmark = pytest.mark.slow

Found = list[dict[str, Any]]


def ranks_of(world_size: int, directory: Path, job: Callable[[Path], Any]) -> Found:
    """Run a job on every rank, and return its results by rank."""
    torch.multiprocessing.spawn(in_ranks, (world_size, directory, job), nprocs=world_size)
    return [torch.load(directory / f"rank-{rank}.pt") for rank in range(world_size)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output directory of the two ranks."""
    return tmp_path_factory.mktemp("two-ranks")


@pytest.fixture(scope="module")
def two(directory: Path) -> Found:
    return ranks_of(2, directory, train_all_cases)


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def closeness(case: str) -> float:
    """Return the relative tolerance for a different summation order, larger with 16-bit numbers."""
    return 1e-5 if CASES[case].precision == "fp32" else 5e-4


def files_of(directory: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint, independent of their distribution over files."""
    return {
        f"{path.name.partition('-')[0]} {name}": tensor
        for path in directory.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


@pytest.mark.parametrize("case", CASES)
def test_losses_norms_and_weights_are_those_of_ddp(two: Found, case: str) -> None:
    for rank in two:
        ddp, fsdp = rank[f"ddp {case}"], rank[f"fsdp {case}"]
        for ours, theirs in zip(fsdp["steps"], ddp["steps"], strict=True):
            assert ours == pytest.approx(theirs, rel=closeness(case), nan_ok=True)
        # Weights are compared together: AdamW moves a weight by a full step for a gradient of mere rounding.
        ours, theirs = (
            torch.cat([*map(torch.flatten, w.values())]) for w in (fsdp["weights"], ddp["weights"])
        )
        assert (ours - theirs).norm() < closeness(case) * theirs.norm()
    first, second = (rank[f"fsdp {case}"] for rank in two)
    norms = [[step["grad_norm"] for step in rank["steps"]] for rank in (first, second)]
    assert norms[0] == pytest.approx(norms[1], rel=0, abs=0, nan_ok=True)
    assert same(first["weights"], second["weights"])


@pytest.mark.parametrize("case", CASES)
def test_a_bad_loss_of_one_rank_skips_the_update_on_all(two: Found, case: str) -> None:
    for number, rank in enumerate(two):
        found = rank[f"fsdp {case}"]
        norms = [step["grad_norm"] for step in found["steps"]]
        losses = [step["loss"] for step in found["steps"]]
        finite = [step != BAD_STEP for step in range(1, STEPS + 1)]
        assert [norm == norm for norm in norms] == finite
        assert [loss == loss for loss in losses] == (finite if number == 1 else [True] * STEPS)
        assert found["steps_done"] == {STEPS - 1}


def test_a_rank_keeps_its_shards_only(two: Found) -> None:
    parameters = count_model(SHAPE).num_parameters
    for rank in two:
        for kept in (rank["fsdp fp32"]["kept"], rank["read"][1]):
            weights, moments = kept
            assert weights == parameters // 2
            assert moments == parameters
        assert rank["ddp fp32"]["kept"] >= (parameters, 2 * parameters)


@pytest.mark.parametrize("case", CASES)
def test_ranks_with_other_numbers_of_batches_evaluate_as_in_ddp(two: Found, case: str) -> None:
    for number, rank in enumerate(two):
        ddp, fsdp = rank[f"ddp {case}"], rank[f"fsdp {case}"]
        assert len(fsdp["evaluated"]) == (4 if number == 0 else 0)
        assert fsdp["evaluated"] == pytest.approx(ddp["evaluated"], rel=closeness(case))
        assert same(fsdp["weights after"], fsdp["weights"])


def test_a_checkpoint_has_the_names_and_shapes_that_ddp_writes(two: Found, directory: Path) -> None:
    ddp, fsdp = files_of(directory / "ddp"), files_of(directory / "fsdp")
    assert {k: (t.shape, t.dtype) for k, t in fsdp.items()} == {
        k: (t.shape, t.dtype) for k, t in ddp.items()
    }
    names = [sorted(p.name for p in (directory / kind).iterdir()) for kind in ("ddp", "fsdp")]
    assert names[0] == names[1]


def test_what_goes_on_from_a_checkpoint_is_the_unbroken_training(two: Found) -> None:
    for rank in two:
        assert same(rank["read"][0], rank["at 3"])
        steps, weights = rank["again"]
        unbroken_steps, unbroken_weights = rank["went on"]
        assert steps == unbroken_steps
        assert same(weights, unbroken_weights)


def test_a_checkpoint_of_two_is_read_by_one_and_by_three(
    two: Found, directory: Path, tmp_path: Path
) -> None:
    """The state goes from 2 shards to 1 rank to 3 shards, where first dimensions do not divide."""
    model = GPT2(SHAPE)
    load_model(directory / "fsdp", model)
    assert same(dict(model.named_parameters()), two[0]["at 3"])
    optimizer = build_optimizer(model, OptimSection())
    load_optimizer(directory / "fsdp", model, optimizer)
    (tmp_path / "from").mkdir()
    copy = HostSnapshot(model, optimizer)
    copy.refresh()
    for file in copy.files():
        copy.write(file, tmp_path / "from" / file)
    three = ranks_of(3, tmp_path, go_on_from)
    assert same(files_of(tmp_path / "written"), files_of(directory / "fsdp"))
    assert sum(rank["kept"][0] for rank in three) < 1.05 * count_model(SHAPE).num_parameters
    for rank in three:
        assert len(rank["steps"]) == STEPS - 3
        assert same(rank["weights"], three[0]["weights"])


@pytest.fixture(scope="module")
def five_with_muon(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Found]:
    """Return the output directory and results of five ranks with Muon.

    Some ranks have no rows of a matrix, or no matrix.
    """
    directory = tmp_path_factory.mktemp("five-ranks")
    return directory, ranks_of(5, directory, train_muon)


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Return the distance over all weights together, relative to the norm of `theirs`."""
    a, b = (torch.cat([w.detach().flatten() for w in all_.values()]) for all_ in (ours, theirs))
    return float((a - b).norm() / b.norm())


@pytest.mark.long
@pytest.mark.parametrize("name", MUON_CASES)
@pytest.mark.parametrize("num_ranks", [2, 5])
def test_muon_in_several_ranks_is_muon_in_one(
    two: Found, five_with_muon: tuple[Path, Found], name: str, num_ranks: int
) -> None:
    """The single rank gets the micro-batches of all ranks but those of the skipped bad step."""
    case = CASES[name]
    model = new_model(case.shape)
    model.init_weights(0)
    steps = [step for step in range(STEPS) if step != BAD_STEP - 1]
    batches = (
        batch_of(2 * step + n, rank) for step in steps for n in (0, 1) for rank in range(num_ranks)
    )
    optimizer = build_optimizer(model, case.optim, matmul_dtype(case.precision))
    autocast, num = make_autocast(case.precision, CPU), 2 * num_ranks
    for _ in training.steps(
        model, optimizer, batches, len(steps), micro_batches_per_step=num, autocast=autocast
    ):
        pass
    one = dict(model.named_parameters())
    ranks = two if num_ranks == 2 else five_with_muon[1]
    for kind in ("ddp", "fsdp"):
        weights = [rank[f"{kind} {name}"]["weights"] for rank in ranks]
        assert all(same(weights[0], other) for other in weights)
        assert distance(weights[0], one) < closeness(name)


@pytest.mark.long
def test_muons_checkpoints_of_five_are_written_again_by_two(
    five_with_muon: tuple[Path, Found], tmp_path: Path
) -> None:
    directory, _ = five_with_muon
    (tmp_path / "from").symlink_to(directory)
    ranks_of(2, tmp_path, rewrite_muon)
    for name in MUON_CASES:
        written = files_of(directory / f"fsdp {name}")
        assert files_of(directory / f"ddp {name}").keys() == written.keys()
        for kind in ("ddp", "fsdp"):
            assert same(files_of(tmp_path / f"{kind} {name}"), written)
