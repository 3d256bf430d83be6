"""Settings that may change on resume, and rollbacks before bad steps on a real catalog."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain_gpt.checkpoint.catalog import SKIPPED_FILE, Catalog, Checkpoint, read_skipped
from raytrain_gpt.config.schema import Config, changes_math
from raytrain_gpt.core.spikes import BadStreak
from raytrain_gpt.data.order import ORDER_VERSION
from raytrain_gpt.data.shards import Manifest, read_manifest
from raytrain_gpt.errors import CheckpointError
from raytrain_gpt.format import Log
from raytrain_gpt.storage.location import Location
from raytrain_gpt.train.resume import Rollbacks, check_changes, keep_start
from tests.checkpoint.test_catalog import names, newest_step, state, steps, write
from tests.conftest import raises_line
from tests.made_runs import MakeConfig

Made = tuple[Config, Manifest, Checkpoint]


@pytest.fixture
def made(make_config: MakeConfig) -> Made:
    """Return a configuration, the manifest of its data and a checkpoint of both."""
    config = make_config(run_name="drift", num_workers=2)
    manifest = read_manifest(Location.of(config.data.data_path))
    trained = replace(
        state(20),
        config=config.model_dump(),
        manifest_hash=manifest.hash,
        vocab_hash=manifest.vocab_hash,
        vocab_size=manifest.vocab_size,
        order_version=ORDER_VERSION,
    )
    return config, manifest, Checkpoint(Location.of("/runs/drift/checkpoints/step=20"), trained, 0)


@pytest.mark.fault(
    "configuration changed", "refused with key and both values; harmless changes logged"
)
@pytest.mark.parametrize(
    ("leaf", "value"),
    [
        ("seed", 1),
        ("peak_lr", 2e-3),
        ("document_mask", True),
    ],
)
def test_changed_maths_is_refused_with_the_key_and_both_values(
    made: Made, leaf: str, value: Any
) -> None:
    config, manifest, checkpoint = made
    assert changes_math(leaf, config)
    before = config.field_values()[leaf]
    with raises_line(CheckpointError, f"{leaf} {before} -> {value}", "another run_name", "drift"):
        check_changes(config.updated({leaf: value}), manifest, checkpoint, pytest.fail)


@pytest.mark.fault("data or tokenizer changed", "refused by hash")
def test_changed_data_and_tokenizer_are_refused(made: Made) -> None:
    config, manifest, checkpoint = made
    other = replace(checkpoint, state=replace(checkpoint.state, manifest_hash="ab" * 32))
    with raises_line(CheckpointError, "data (manifest hash) abababababab ->"):
        check_changes(config, manifest, other, pytest.fail)
    other = replace(checkpoint, state=replace(checkpoint.state, vocab_hash="cd" * 32))
    with raises_line(CheckpointError, "tokenizer (vocabulary hash) cdcdcdcdcdcd ->"):
        check_changes(config, manifest, other, pytest.fail)


def test_harmless_changes_are_accepted_and_logged(made: Made) -> None:
    config, manifest, checkpoint = made
    changes = {
        "log_every_steps": 1,
        "max_steps": 60,
        "num_workers": 1,
        "spike_patience": 3,
        "hang_timeout_s": None,
        "keep_checkpoints": 2,
        "parallel": "fsdp",
    }
    lines: list[str] = []
    check_changes(config.updated(changes), manifest, checkpoint, lines.append)
    for name, value in changes.items():
        assert (
            f"changed since that checkpoint: {name} {config.field_values()[name]} -> {value}"
            in lines
        )
    assert len(lines) == 1 + len(changes), "also the resumed step"


@pytest.mark.parametrize(
    ("leaf", "value"),
    [("micro_batch_sequences", 1), ("compile", True), ("activation_checkpointing", "full")],
)
def test_what_decides_exact_sums_may_change_only_without_them(
    made: Made, leaf: str, value: Any
) -> None:
    config, manifest, checkpoint = made
    check_changes(config.updated({leaf: value}), manifest, checkpoint, [].append)
    exact = config.updated({"exact": True})
    trained = replace(checkpoint, state=replace(checkpoint.state, config=exact.model_dump()))
    before = config.field_values()[leaf]
    with raises_line(CheckpointError, f"{leaf} {before} -> {value}", "another run_name"):
        check_changes(exact.updated({leaf: value}), manifest, trained, pytest.fail)


def test_a_micro_batch_that_became_smaller_is_no_change(made: Made) -> None:
    config, manifest, checkpoint = made
    assert checkpoint.state.num_workers == 1
    trained = config.updated({"micro_batch_sequences": 3}).model_dump()
    smaller = replace(checkpoint.state, config=trained, num_workers=4)
    lines: list[str] = []
    asked = config.updated({"micro_batch_sequences": 4})
    check_changes(asked, manifest, replace(checkpoint, state=smaller), lines.append)
    assert len(lines) == 1
    whole = replace(smaller, num_workers=3)
    check_changes(asked, manifest, replace(checkpoint, state=whole), lines.append)
    assert lines[-1] == "changed since that checkpoint: micro_batch_sequences 3 -> 4"


A_POINT = "/runs/other/checkpoints/step=00000010"


def started(made: Made, run_dir: Path, name: str, value: str | None) -> Checkpoint:
    """Return a checkpoint of a run in `run_dir` that started with this `init_from` or `branch_from`."""
    config, _, checkpoint = made
    trained = replace(checkpoint.state, config=config.updated({name: value}).model_dump())
    return Checkpoint(Location.of(run_dir / "checkpoints" / "step=00000020"), trained, 0)


@pytest.mark.parametrize("name", ["init_from", "branch_from"])
@pytest.mark.parametrize("own", [None, A_POINT])
def test_a_run_keeps_the_start_that_it_had(
    made: Made, tmp_path: Path, name: str, own: str | None
) -> None:
    checkpoint = started(made, tmp_path / "drift", name, own)
    for same in (None, own):
        config = made[0].updated({name: same})
        assert keep_start(config, checkpoint).field_values()[name] == own
    shown = own or "null"
    with raises_line(
        CheckpointError,
        f"{name}=quickstart@999, but run drift started with {name}={shown}",
        f"set {name} to {shown}, or use another run_name",
    ):
        keep_start(made[0].updated({name: "quickstart@999"}), checkpoint)


def test_a_start_may_be_named_differently(made: Made, tmp_path: Path) -> None:
    run = "/runs/other"
    for name in (run, "other"):
        given = made[0].updated({"init_from": name})
        kept = keep_start(given, started(made, tmp_path, "init_from", A_POINT))
        assert kept.model.init_from == A_POINT
    with pytest.raises(CheckpointError, match="init_from=/runs, but"):
        keep_start(given.updated({"init_from": "/runs"}), started(made, tmp_path, "init_from", run))


BAD = BadStreak(first_step=25, last_step=34, first_batch=24, last_batch=33)


@pytest.fixture
def books() -> Any:
    events: list[dict[str, Any]] = []

    def note(step: int, event: str, **details: Any) -> None:
        events.append({"step": step, "event": event, **details})

    return SimpleNamespace(note=note, events=events)


@pytest.fixture
def run(tmp_path: Path) -> Location:
    run_dir = Location.of(tmp_path / "run")
    for step in (10, 20, 30):
        write(Catalog(run_dir), step)
    return run_dir


def rollbacks(run_dir: Location, skip_before: int = 0, log: Log = print) -> Rollbacks:
    where = {"storage_path": str(run_dir.parent), "run_name": run_dir.name}
    return Rollbacks(Config().updated({**where, "skip_before": skip_before}), (), log)


def go_back(made: Rollbacks, run: Location, started_at: int, books: Any) -> int | None:
    """Roll back; return the step from which the run resumes."""
    made.go_back(BAD, started_at, books)
    return newest_step(Catalog(run))


def test_the_checkpoint_before_the_bad_steps_is_gone_back_to(run: Location, books: Any) -> None:
    lines: list[str] = []
    resume = rollbacks(run, skip_before=2, log=lines.append)
    assert go_back(resume, run, 0, books) == 20
    assert steps(Catalog(run)) == [10, 20]
    assert "broken-step=00000030" in names(run)
    assert resume.skipped == ((22, 34),)
    assert json.loads((run / SKIPPED_FILE).read_text()) == [[22, 34]]
    (event,) = books.events
    assert (event["step"], event["event"], event["to_step"]) == (34, "rollback", 20)
    assert (event["first_batch"], event["stop_batch"]) == (22, 34)
    assert lines == ["bad steps 25–34: rolled back to step 20, skipping batches 22–33"]


def test_no_batch_that_the_checkpoint_has_read_is_skipped(run: Location, books: Any) -> None:
    resume = rollbacks(run, skip_before=50)
    position = replace(state(20), next_batch=23)
    write_state = Catalog(run)
    (run / "checkpoints" / "step=00000020").remove()
    write_state.draft(20, "001").commit(position, {}, {})
    resume.go_back(BAD, 0, books)
    assert resume.skipped == ((23, 34),)


def test_what_goes_wrong_again_leads_to_an_older_checkpoint(run: Location, books: Any) -> None:
    resume = rollbacks(run)
    # The last two rollbacks are from step 10, the oldest checkpoint.
    found = [go_back(resume, run, started_at, books) for started_at in (0, 20, 10, 10)]
    assert found == [20, 10, 10, 10]


def test_without_a_checkpoint_it_goes_back_to_the_start(tmp_path: Path, books: Any) -> None:
    new = Location.of(tmp_path / "new")
    resume = rollbacks(new, skip_before=5)
    assert go_back(resume, new, 0, books) is None
    assert resume.skipped == ((19, 34),)


def test_ranges_of_the_file_and_of_a_checkpoint_are_joined(run: Location) -> None:
    (newest,) = Catalog(run).complete()[-1:]
    copied = replace(newest.state, skipped_batches=((3, 5), (22, 34)))
    assert read_skipped(run, None) == ()
    (run / SKIPPED_FILE).write_text("[[22, 34], [40, 41]]")
    joined = read_skipped(run, replace(newest, state=copied))
    assert joined == ((3, 5), (22, 34), (40, 41))
    (run / SKIPPED_FILE).write_text('[["x", 2]]')
    with raises_line(CheckpointError, SKIPPED_FILE, "is damaged"):
        read_skipped(run, newest)
