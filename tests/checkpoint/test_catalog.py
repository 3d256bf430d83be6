"""The catalog on a disk and in an object store: checkpoints are complete or absent, verified, in order."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from raytrain_gpt.checkpoint.catalog import Catalog, FileEntry, read_checkpoint, resolve_checkpoint
from raytrain_gpt.checkpoint.checkpoint_state import CheckpointState
from raytrain_gpt.errors import CheckpointError, StorageError
from raytrain_gpt.storage.location import Location
from tests.checkpoints import write_checkpoint
from tests.conftest import raises_line
from tests.s3 import S3Server
from tests.training import STATE

MODEL = bytes(range(256)) * 8


def state(step: int, val_loss: float | None = None) -> CheckpointState:
    return dataclasses.replace(STATE, step=step, val_loss=val_loss)


def rows(step: int) -> dict[str, str]:
    """Return the small file with rows of metrics.jsonl."""
    return {"rows.jsonl": json.dumps({"step": step}) + "\n"}


def content(value: bytes) -> Callable[[Path], object]:
    """Return a function that writes a value to a path."""
    return lambda path: path.write_bytes(value)


def write(
    catalog: Catalog, step: int, val_loss: float | None = None, mark: str = "001"
) -> Location:
    draft = catalog.draft(step, mark)
    entries = {"model.safetensors": draft.add("model.safetensors", content(MODEL))}
    return draft.commit(state(step, val_loss), entries, rows(step))


def written(run_dir: Location, *steps: int) -> Catalog:
    """Return a catalog with checkpoints of the given steps, written in this order."""
    catalog = Catalog(run_dir)
    for step in steps:
        write(catalog, step)
    return catalog


def newest_step(catalog: Catalog) -> int | None:
    """Return the step of the newest good checkpoint, or None if there is none; fail on damage."""
    newest = catalog.pick("newest", pytest.fail)
    return newest.state.step if newest else None


def steps(catalog: Catalog) -> list[int]:
    return [checkpoint.state.step for checkpoint in catalog.complete()]


def names(run_dir: Location) -> list[str]:
    """Return the names in the checkpoints directory."""
    return (run_dir / "checkpoints").names()


def files(path: Location) -> list[str]:
    return [name for name, _ in path.files()]


@pytest.mark.fault("clock skew")
def test_the_newest_is_the_largest_step_whatever_the_clock_says(run_dir: Location) -> None:
    newest = written(run_dir, 30, 10, 20).pick("newest", pytest.fail)
    assert newest is not None
    assert newest.state == state(30)
    assert newest.rows() == [{"step": 30}]
    assert steps(written(run_dir, 100_000_000, 99_999_999))[-2:] == [99_999_999, 100_000_000]


def test_the_newest_before_a_step_is_what_a_rollback_goes_back_to(tmp_path: Path) -> None:
    catalog = written(Location.of(tmp_path), 10, 20, 30)
    for which, step, expected in (
        ("before", 31, 30), ("before", 30, 20), ("before", 11, 10), ("before", 10, None),
        ("step", 20, 20), ("step", 21, None), ("best", 0, 30),
    ):  # fmt: skip
        found = catalog.pick(which, pytest.fail, step)
        assert (found.state.step if found else None) == expected
    assert newest_step(Catalog(Location.of(tmp_path / "new"))) is None


@pytest.mark.fault(
    "checkpoint truncated or one bit flipped", "skipped with a warning; next older one used"
)
@pytest.mark.parametrize(
    "damage", ["flip", "truncate", "remove", "remove hashes", "remove state", "flip hashes"]
)
def test_a_damaged_checkpoint_is_skipped_with_one_line(run_dir: Location, damage: str) -> None:
    catalog = written(run_dir, 10)
    path = write(catalog, 20)
    model = path / "model.safetensors"
    match damage:
        case "flip":
            flipped = bytearray(MODEL)
            flipped[99] ^= 4
            model.write_bytes(flipped)
        case "truncate":
            model.write_bytes(MODEL[:-1])
        case "remove":
            model.remove()
        case "remove hashes":
            (path / "hashes.json").remove()
        case "remove state":
            (path / "state.json").remove()
        case "flip hashes":
            hashes = (path / "hashes.json").read_text()
            (path / "hashes.json").write_text(hashes.replace("sha256", "sha257", 1))
    lines: list[str] = []
    newest = catalog.pick("newest", lines.append)
    assert newest is not None
    assert newest.state.step == 10
    if damage == "remove hashes" and not run_dir.is_local:
        assert lines == []  # in a store, an unfinished checkpoint looks the same
        return
    assert len(lines) == 1
    assert "\n" not in lines[0]
    assert "step=00000020" in lines[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [("step", -1), ("config", {"train": 5}), ("vocab_size", 10**30), ("skipped_batches", [[1]]),
     ("val_loss", float("inf")), ("more", 1), ("order_hash", "a\nb")],
)  # fmt: skip
def test_a_state_of_other_types_is_damage(tmp_path: Path, key: str, value: object) -> None:
    path = write(Catalog(Location.of(tmp_path)), 10)
    content = json.loads((path / "state.json").read_text()) | {key: value}
    (path / "state.json").write_text(json.dumps(content))
    with raises_line(CheckpointError, "state.json is damaged", key):
        read_checkpoint(path)


def test_a_model_that_is_not_listed_is_not_read(tmp_path: Path) -> None:
    path = write(Catalog(Location.of(tmp_path)), 10)
    hashes = json.loads((path / "hashes.json").read_text())
    del hashes["model.safetensors"]
    (path / "hashes.json").write_text(json.dumps(hashes))
    with (
        raises_line(CheckpointError, r"hashes.json lacks model.safetensors"),
        read_checkpoint(path).files(),
    ):
        pass


@pytest.mark.fault("all checkpoints damaged", "fails with a list, never restarts at step 0")
def test_all_damaged_is_an_error_and_no_start_from_nothing(run_dir: Location) -> None:
    catalog = Catalog(run_dir)
    (write(catalog, 10) / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no intact checkpoint in .* \(1 damaged\)"):
        catalog.pick("newest", lambda line: None)


def test_files_of_several_writers_become_one_checkpoint(run_dir: Location) -> None:
    """Each rank has a separate draft; the committing rank receives all sizes and hashes."""
    first, second = (Catalog(run_dir).draft(20, "001") for _ in range(2))
    entries = {name: first.add(name, content(MODEL)) for name in ("model.safetensors", "optim-0")}
    assert entries["optim-0"] == FileEntry(len(MODEL), hashlib.sha256(MODEL).hexdigest())
    entries |= {"optim-1": second.add("optim-1", content(b"moments"))}
    assert steps(Catalog(run_dir)) == []
    assert newest_step(Catalog(run_dir)) is None

    path = first.commit(state(20), entries, rows(20))
    assert path == run_dir / "checkpoints" / "step=00000020"
    assert names(run_dir) == ["step=00000020"]
    everything = [*entries, "rows.jsonl", "state.json", "hashes.json"]
    assert files(path) == sorted(everything)
    checkpoint = read_checkpoint(path)
    checkpoint.verify()
    sizes = dict(path.files())
    assert checkpoint.size_bytes == sum(sizes.values()) - sizes["hashes.json"]
    assert (path / "optim-1").read_bytes() == b"moments"


@pytest.mark.fault("death during a checkpoint")
def test_an_unfinished_draft_of_another_attempt_is_never_read_and_is_cleaned(
    run_dir: Location,
) -> None:
    catalog = written(run_dir, 10)
    dying = catalog.draft(20, "001")
    dying.add("model.safetensors", content(b"of the dying attempt"))
    dying.add("optim-1", content(b"and of its other rank"))
    assert steps(catalog) == [10]
    assert newest_step(catalog) == 10

    path = write(catalog, 20, mark="002")
    checkpoint = read_checkpoint(path)
    checkpoint.verify()
    with checkpoint.files() as directory:
        # An earlier attempt may have had more ranks, whose extra files must not be loaded.
        own = ["hashes.json", "model.safetensors", "rows.jsonl", "state.json"]
        assert sorted(file.name for file in directory.iterdir()) == own
        assert (directory / "model.safetensors").read_bytes() == MODEL
    if run_dir.is_local:
        assert files(path) == own
        assert names(run_dir)[-1] == "unfinished-step=00000020-001"
    catalog.draft(30, "001").add("model.safetensors", content(MODEL))
    catalog.clean(good_until=20)
    assert names(run_dir) == ["step=00000010", "step=00000020"]
    assert steps(catalog) == [10, 20]


FILE_OPERATIONS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")
"""Names of Python's audit events."""


def replace_10_by_20(run_dir: Location, last: int) -> None:
    """Write the checkpoint of step 20 and remove that of step 10, in a process that dies before it is done.

    It has no time to clean up, and dies before its `last` operation on files, counted from 0.
    """
    if pid := os.fork():
        os.waitpid(pid, 0)
        return
    left = itertools.count(last, -1)

    def die_at_last(operation: str, _: object) -> None:
        if operation in FILE_OPERATIONS and next(left) == 0:
            os._exit(0)

    try:
        sys.addaudithook(die_at_last)
        write(Catalog(run_dir), 20, 1.0)
        Catalog(run_dir).prune(1)
    finally:
        os._exit(0)


@pytest.mark.fault("death during a checkpoint")
def test_process_that_dies_at_any_moment_leaves_a_whole_newest_checkpoint(tmp_path: Path) -> None:
    found: list[int | None] = []
    for last in itertools.count():
        run_dir = Location.of(tmp_path / f"{last}")
        catalog = written(run_dir, 10)
        replace_10_by_20(run_dir, last)
        for name in names(run_dir):
            if not name.startswith("unfinished-"):
                read_checkpoint(run_dir / "checkpoints" / name).verify()
        found.append(newest := newest_step(catalog))
        if names(run_dir) == ["step=00000020"]:  # it died after its work
            break
        catalog.clean(good_until=newest or 0)
        assert all(name.startswith("step=") for name in names(run_dir))
    assert found == [10] * found.count(10) + [20] * found.count(20)
    assert min(found.count(10), found.count(20)) > 3


def test_what_lies_above_the_resumed_step_is_set_aside(run_dir: Location) -> None:
    catalog = written(run_dir, 10)
    damaged = write(catalog, 20)
    (damaged / "model.safetensors").write_bytes(b"damaged")
    write(catalog, 30)
    catalog.clean(good_until=10)
    assert steps(catalog) == [10]
    write(catalog, 20)
    assert newest_step(catalog) == 20
    if run_dir.is_local:
        aside = ["broken-step=00000020", "broken-step=00000030"]
        assert names(run_dir) == [*aside, "step=00000010", "step=00000020"]


def test_the_newest_and_the_best_are_kept(run_dir: Location) -> None:
    catalog = Catalog(run_dir)
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0), (40, None), (50, 2.5)):
        write(catalog, step, loss)
    catalog.prune(2)
    assert steps(catalog) == [20, 40, 50]
    assert names(run_dir) == [f"step={step:08d}" for step in (20, 40, 50)]
    assert resolve_checkpoint(run_dir).state.step == 20
    assert resolve_checkpoint(run_dir / "checkpoints" / "step=00000050").state.step == 50


def test_losses_over_other_tokens_are_not_compared(tmp_path: Path) -> None:
    for step, loss, tokens in ((10, 1.0, 128), (20, 2.0, 4096), (30, 2.5, 4096)):
        write_checkpoint(tmp_path, step, loss, eval_tokens=tokens)
    best = Catalog(Location.of(tmp_path)).pick("best", pytest.fail)
    assert best is not None
    assert best.state.step == 20


def test_the_next_best_takes_the_place_of_a_damaged_one_with_a_line(run_dir: Location) -> None:
    catalog = Catalog(run_dir)
    paths = [write(catalog, step, loss) for step, loss in ((10, 2.0), (20, 1.0), (30, 3.0))]
    (paths[1] / "model.safetensors").write_bytes(MODEL[::-1])
    skipped: list[str] = []
    assert resolve_checkpoint(run_dir, skipped.append).state.step == 10
    (paths[0] / "state.json").write_bytes(b"{")
    assert resolve_checkpoint(run_dir, skipped.append).state.step == 30
    for line, step in zip(skipped, (20, 10, 20), strict=True):
        assert line.startswith("skipped: ")
        assert f"step={step:08d}" in line
    (paths[2] / "model.safetensors").write_bytes(MODEL[::-1])
    with raises_line(CheckpointError, "no intact checkpoint", "restore one from a copy"):
        resolve_checkpoint(run_dir, skipped.append)


@pytest.mark.fault("checkpoint of a newer version", "asks for an upgrade")
def test_a_newer_state_version_asks_for_an_upgrade(run_dir: Location) -> None:
    path = write(Catalog(run_dir), 10)
    newer = json.loads((path / "state.json").read_text()) | {"state_version": 99}
    (path / "state.json").write_text(json.dumps(newer))
    with pytest.raises(CheckpointError, match="upgrade raytrain-gpt"):
        resolve_checkpoint(path)
    write(Catalog(run_dir), 5)
    with pytest.raises(CheckpointError, match="upgrade raytrain-gpt"):
        Catalog(run_dir).pick("newest", pytest.fail)


def test_state_of_version_4_is_read(run_dir: Location) -> None:
    path = write(Catalog(run_dir), 10)
    older = json.loads((path / "state.json").read_text()) | {"state_version": 4}
    older["computed_by"] = {"torch": "2.12.0"}
    del older["numerics_environment"]
    (path / "state.json").write_text(json.dumps(older))
    assert read_checkpoint(path).state.numerics_environment == {"torch": "2.12.0"}


def test_state_comes_back_as_it_was(run_dir: Location) -> None:
    skipped, scale = ((3, 7), (20, 31)), (2.0**15, 40)
    whole = dataclasses.replace(state(10, 2.5), skipped_batches=skipped, loss_scale=scale)
    draft = Catalog(run_dir).draft(10, "001")
    assert read_checkpoint(draft.commit(whole, {}, {})).state == whole


# In an object store


@pytest.mark.fault("checkpoint without hashes", "ignored as incomplete")
def test_files_without_the_last_one_are_no_checkpoint(remote_dir: Location) -> None:
    catalog = Catalog(remote_dir)
    path = write(catalog, 20)
    (path / "hashes.json").remove()
    assert (path / "state.json").is_file()
    assert steps(catalog) == []
    assert newest_step(catalog) is None
    with pytest.raises(CheckpointError, match=r"incomplete: it has no hashes\.json"):
        resolve_checkpoint(path)
    with pytest.raises(CheckpointError, match="neither a checkpoint nor a run"):
        resolve_checkpoint(remote_dir)


@pytest.mark.parametrize("name", ["../outside", "/outside"])
def test_names_that_lead_out_of_a_checkpoint_are_damage(run_dir: Location, name: str) -> None:
    path = write(Catalog(run_dir), 20)
    hashes = json.loads((path / "hashes.json").read_text())
    hashes[name] = hashes["state.json"]
    (path / "hashes.json").write_text(json.dumps(hashes))
    with pytest.raises(CheckpointError, match="is damaged"):
        resolve_checkpoint(path)


@pytest.mark.slow
def test_a_store_out_of_reach_is_told_and_the_older_checkpoint_stays(
    bucket: Location, s3: S3Server
) -> None:
    run_dir = dataclasses.replace(bucket, retry_for_s=0.0) / "out-of-reach"
    catalog = written(run_dir, 10)
    draft = catalog.draft(20, "001")
    entries = {"model.safetensors": draft.add("model.safetensors", content(MODEL))}
    s3.stop()
    try:
        with pytest.raises(StorageError, match="storage unreachable"):
            draft.add("optim-1", content(MODEL))
        with pytest.raises(StorageError, match="storage unreachable"):
            draft.commit(state(20), entries, rows(20))
    finally:
        s3.start()
    assert steps(catalog) == [10]
    draft.discard()
    assert names(run_dir) == ["step=00000010"]


# A full disk


@pytest.fixture
def disk(small_disk: Callable[[str], Path]) -> Path:
    """Return a file system of 64 KB."""
    return small_disk("64k")


def filled(path: Path) -> Path:
    """Create a file that fills the remaining space, and return its path."""
    filler = path / "filler"
    with filler.open("wb", buffering=0) as file:
        for _ in range(shutil.disk_usage(path).free // 4096):
            file.write(bytes(4096))
    assert shutil.disk_usage(path).free == 0
    return filler


def check_only(run_dir: Path, step: int) -> None:
    """Check that the checkpoint of a step is intact and the only entry in its directory."""
    assert newest_step(Catalog(Location.of(run_dir))) == step
    assert names(Location.of(run_dir)) == [f"step={step:08d}"]


@pytest.mark.fault("disk full at a checkpoint")
def test_a_full_disk_leaves_the_older_checkpoint_and_nothing_else(disk: Path) -> None:
    catalog = written(Location.of(disk), 10)
    filler = filled(disk)
    draft = catalog.draft(20, "001")
    with pytest.raises(CheckpointError, match="no space left") as error:
        draft.add("model.safetensors", content(bytes(2**17)))
    assert "older checkpoints are intact" in str(error.value)
    assert "bytes are free" in str(error.value)
    draft.discard()
    check_only(disk, 10)
    filler.unlink()
    write(catalog, 20)
    assert steps(catalog) == [10, 20]


def test_a_full_disk_that_safetensors_tells_in_its_own_words(disk: Path) -> None:
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    draft = Catalog(Location.of(disk)).draft(20, "001")
    large = {"weight": torch.zeros(2**16)}
    with pytest.raises(CheckpointError, match="no space left"):
        draft.add("model.safetensors", lambda path: safetensors.save_file(large, path))


def test_a_copy_named_like_another_step_is_never_resumed_from(run_dir: Location) -> None:
    catalog = written(run_dir, 10, 20)
    for file, _ in (run_dir / "checkpoints" / "step=00000010").files():
        content = (run_dir / "checkpoints" / "step=00000010" / file).read_bytes()
        (run_dir / "checkpoints" / "step=00000030" / file).write_bytes(content)
    lines: list[str] = []
    newest = catalog.pick("newest", lines.append)
    assert newest is not None
    assert newest.state.step == 20
    assert lines == [
        f"skipped: checkpoint {run_dir}/checkpoints/step=00000030 was copied, renamed or linked: its "
        "state.json says step 10; name it step=00000010, or remove it"
    ]
    catalog.clean(good_until=20)
    assert steps(catalog) == [10, 20]
    write(catalog, 30)
    assert newest_step(catalog) == 30
