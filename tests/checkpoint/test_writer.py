"""Background checkpoints: a snapshot of the right step, complete or absent on all ranks."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.checkpoint.collectives import Collectives
from raytrain_gpt.checkpoint.writer import CheckpointWriter, WrittenCheckpoint
from raytrain_gpt.config.sections import OptimSection
from raytrain_gpt.core.optim import AdamW
from raytrain_gpt.core.state import HostSnapshot, load_model, load_optimizer
from raytrain_gpt.errors import CheckpointError, ClusterError
from raytrain_gpt.storage.location import Location
from tests.checkpoint.test_catalog import names
from tests.training import STATE, WAIT_S, thread_ranks


def trained(seed: int) -> tuple[nn.Module, AdamW]:
    """Return a small model and its optimizer after one update."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    optimizer = AdamW(model, OptimSection())  # type: ignore[arg-type]
    train(model, optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: AdamW) -> None:
    model(torch.ones(2, 8)).square().sum().backward()
    optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.zeros(())
    optimizer.step()
    optimizer.zero_grad()


def savers(run_dir: Location, world_size: int, keep: int = 10) -> list[CheckpointWriter]:
    """Return one writer per rank, all with the same weights."""
    return [
        CheckpointWriter(Catalog(run_dir), "001", ranks, *trained(0), keep)
        for ranks in thread_ranks(world_size)
    ]


def begin(ranks: list[CheckpointWriter], step: int) -> None:
    for saver in ranks:
        saver.begin(dataclasses.replace(STATE, step=step), {"rows.jsonl": "{}\n"})


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Return an event; checkpoint files are written only after it is set."""
    event, write = threading.Event(), HostSnapshot.write

    def waiting(copy: HostSnapshot, file: str, path: Path) -> None:
        assert event.wait(WAIT_S)
        write(copy, file, path)

    monkeypatch.setattr(HostSnapshot, "write", waiting)
    yield event
    event.set()


def failing_on(file: str, error: Exception) -> Callable[[HostSnapshot, str, Path], None]:
    """Return a `HostSnapshot.write` that fails on one file."""
    write = HostSnapshot.write

    def fail(copy: HostSnapshot, name: str, path: Path) -> None:
        if name == file:
            path.write_bytes(b"half")
            raise error
        write(copy, name, path)

    return fail


def test_what_is_written_is_the_state_at_the_begin(tmp_path: Path, held: threading.Event) -> None:
    run_dir = Location.of(tmp_path)
    model, optimizer = trained(0)
    saver = CheckpointWriter(Catalog(run_dir), "001", Collectives(0, 1), model, optimizer, keep=10)
    assert saver.collect() is None
    expected = [p.detach().clone() for p in model.parameters()]
    moments = [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]
    begin([saver], 10)
    assert saver.writing
    for _ in range(3):
        train(model, optimizer)
    assert Catalog(run_dir).complete() == []

    waits = 0

    def while_waiting() -> None:
        nonlocal waits
        waits += 1
        held.set()

    saved = saver.collect(while_waiting)
    assert waits > 0
    assert not saver.writing
    assert (saved.path, saved.state.step) == (run_dir / "checkpoints" / "step=00000010", 10)
    found, found_optimizer = trained(1)
    load_model(saved.path.path, found)
    load_optimizer(saved.path.path, found, found_optimizer)
    for i, parameter in enumerate(found.parameters()):
        assert torch.equal(parameter, expected[i])
        assert torch.equal(found_optimizer.state[parameter]["exp_avg"], moments[i])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_ranks_write_one_checkpoint(run_dir: Location, world_size: int) -> None:
    ranks = savers(run_dir, world_size)
    begin(ranks, 10)
    saved = [saver.collect() for saver in ranks]
    (checkpoint,) = Catalog(run_dir).complete()
    assert {one.path for one in saved} == {checkpoint.path}
    checkpoint.verify()
    model, optimizer = trained(0)
    found, found_optimizer = trained(1)
    with checkpoint.files() as directory:
        load_model(directory, found)
        load_optimizer(directory, found, found_optimizer)
    for a, b in zip(found.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)
        for key, moment in optimizer.state[b].items():
            assert torch.equal(found_optimizer.state[a][key], moment)


@pytest.mark.parametrize("file", ["model.safetensors", "optim-00001.safetensors"])
def test_one_rank_that_fails_fails_on_all_and_leaves_nothing(
    run_dir: Location, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = savers(run_dir, 2)
    begin(ranks, 10)
    assert all(isinstance(saver.collect(), WrittenCheckpoint) for saver in ranks)
    with monkeypatch.context() as patch:
        patch.setattr(
            HostSnapshot, "write", failing_on(file, OSError(28, "No space left on device"))
        )
        begin(ranks, 20)
        for saver in ranks:
            with pytest.raises(CheckpointError, match="no space left"):
                saver.collect()
            assert saver.collect() is None
    assert names(run_dir) == ["step=00000010"]
    begin(ranks, 30)
    assert [saver.collect().state.step for saver in ranks] == [30, 30]


def test_a_commit_that_fails_fails_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, target: Path) -> Path:
        raise RuntimeError(f"{target.name} has no name")

    ranks = savers(Location.of(tmp_path), 2)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        begin(ranks, 10)
        for saver in ranks:
            with pytest.raises(RuntimeError, match="step=00000010 has no name"):
                saver.collect()
    assert names(Location.of(tmp_path)) == []


def test_a_process_that_lost_the_name_leaves_the_new_owners_checkpoint_alone(
    run_dir: Location,
) -> None:
    (owner,) = savers(run_dir, 1)
    begin([owner], 10)
    written = owner.collect()
    before = {name: (written.path / name).sha256() for name in written.path.names()}

    def taken_over() -> None:
        raise ClusterError("taken over")

    late = CheckpointWriter(Catalog(run_dir), "001", Collectives(0, 1), *trained(1), 10, taken_over)
    begin([late], 10)
    with pytest.raises(ClusterError, match="taken over"):
        late.collect()
    assert {name: (written.path / name).sha256() for name in written.path.names()} == before
    assert names(run_dir) == ["step=00000010"]
