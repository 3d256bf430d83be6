"""The catalogue: complete or absent, verified by hash, ordered by step."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from raytrain_gpt.errors import CheckpointError
from raytrain_gpt.runtime.checkpoints import Catalogue, CheckpointState, resolve_checkpoint

STATE = CheckpointState(
    step=0,
    next_batch=0,
    order_hash="00",
    val_loss=None,
    tokens_seen=0,
    config={},
    manifest_hash="m",
    vocab_hash="v",
    vocab_size=257,
    order_version=1,
    num_workers=1,
)


def write(catalogue: Catalogue, step: int, val_loss: float | None = None) -> Path:
    def fill(directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(bytes(range(256)) * 8)
        (directory / "rows.jsonl").write_text(json.dumps({"step": step}) + "\n")

    return catalogue.write(dataclasses.replace(STATE, step=step, val_loss=val_loss), fill)


def steps(catalogue: Catalogue) -> list[int]:
    return [checkpoint.state.step for checkpoint in catalogue.complete()]


def test_the_newest_is_the_largest_step_whatever_the_clock_says(tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path)
    for step in (30, 10, 20):
        write(catalogue, step)
    newest = catalogue.newest_good(pytest.fail)
    assert newest is not None
    assert newest.state.step == 30
    assert newest.rows() == [{"step": 30}]


def test_a_run_without_checkpoints_has_no_newest(tmp_path: Path) -> None:
    assert Catalogue(tmp_path).newest_good(pytest.fail) is None


@pytest.mark.parametrize(
    "damage", ["flip", "truncate", "remove", "remove hashes", "remove state", "flip hashes"]
)
def test_a_damaged_checkpoint_is_skipped_with_one_line(tmp_path: Path, damage: str) -> None:
    catalogue = Catalogue(tmp_path)
    write(catalogue, 10)
    path = write(catalogue, 20)
    model = path / "model.safetensors"
    match damage:
        case "flip":
            content = bytearray(model.read_bytes())
            content[99] ^= 4
            model.write_bytes(content)
        case "truncate":
            model.write_bytes(model.read_bytes()[:-1])
        case "remove":
            model.unlink()
        case "remove hashes":
            (path / "hashes.json").unlink()
        case "remove state":
            (path / "state.json").unlink()
        case "flip hashes":
            hashes = (path / "hashes.json").read_text()
            (path / "hashes.json").write_text(hashes.replace("sha256", "sha257", 1))
    lines: list[str] = []
    newest = catalogue.newest_good(lines.append)
    assert newest is not None
    assert newest.state.step == 10
    assert len(lines) == 1
    assert "\n" not in lines[0]
    assert "step=00000020" in lines[0]


def test_all_damaged_is_an_error_and_no_start_from_nothing(tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path)
    (write(catalogue, 10) / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        catalogue.newest_good(lambda line: None)


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path)
    write(catalogue, 10)

    def fail(directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="no space left") as error:
        catalogue.write(dataclasses.replace(STATE, step=20), fail)
    assert "older checkpoints are intact" in str(error.value)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step=00000010"]


def test_unfinished_directories_are_never_read_and_are_cleaned(tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path)
    whole = write(catalogue, 10)
    whole.rename(whole.with_name("unfinished-step=00000010"))
    assert steps(catalogue) == []
    assert catalogue.newest_good(pytest.fail) is None
    catalogue.clean(good_until=0)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_what_lies_above_the_resumed_step_is_set_aside(tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path)
    write(catalogue, 10)
    (write(catalogue, 20) / "hashes.json").unlink()
    catalogue.clean(good_until=10)
    write(catalogue, 20)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["broken-step=00000020", "step=00000010", "step=00000020"]


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path)
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0), (40, None), (50, 2.5)):
        write(catalogue, step, loss)
    catalogue.prune(keep=2)
    assert steps(catalogue) == [20, 40, 50]
    best = catalogue.best()
    assert best is not None
    assert best.state.step == 20
    assert resolve_checkpoint(tmp_path).state.step == 20
    assert resolve_checkpoint(tmp_path / "checkpoints" / "step=00000050").state.step == 50


def test_a_newer_state_version_asks_for_an_upgrade(tmp_path: Path) -> None:
    path = write(Catalogue(tmp_path), 10)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | {"state_version": 99}))
    with pytest.raises(CheckpointError, match="upgrade raytrain-gpt"):
        resolve_checkpoint(path)
    write(Catalogue(tmp_path), 5)
    with pytest.raises(CheckpointError, match="upgrade raytrain-gpt"):
        Catalogue(tmp_path).newest_good(pytest.fail)


def test_no_checkpoint_names_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither a checkpoint nor a run"):
        resolve_checkpoint(tmp_path)
