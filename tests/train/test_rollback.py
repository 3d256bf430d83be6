"""Going back before bad steps, on a real catalog: where to, what is skipped, and what is written."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.core.spikes import BadStretch
from raytrain_gpt.storage.location import Location
from raytrain_gpt.train import rollback as rollback_module
from raytrain_gpt.train.rollback import SKIPPED_FILE, Rollback
from tests.checkpoint.test_catalog import names, state, steps, write

BAD = BadStretch(first_step=25, last_step=34, first_batch=24, last_batch=33)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Any:
    events: list[dict[str, Any]] = []

    def add_event(step: int, event: str, **details: Any) -> None:
        events.append({"step": step, "event": event, **details})

    monkeypatch.setattr(rollback_module, "ray", SimpleNamespace(get=lambda value: value))
    return SimpleNamespace(add_event=SimpleNamespace(remote=add_event), events=events)


@pytest.fixture
def run(tmp_path: Path) -> Location:
    run_dir = Location.of(tmp_path / "run")
    for step in (10, 20, 30):
        write(Catalog(run_dir), step)
    return run_dir


def test_the_checkpoint_before_the_bad_steps_is_gone_back_to(run: Location, recorder: Any) -> None:
    lines: list[str] = []
    rollback = Rollback(run, skip_before=2, log=lines.append)
    found = rollback.go_back(BAD, started_at=0, origin=None, recorder=recorder)
    assert found is not None
    assert found.state.step == 20
    assert steps(Catalog(run)) == [10, 20]
    assert "broken-step=00000030" in names(run)
    assert rollback.skipped == ((22, 34),)
    assert json.loads((run / SKIPPED_FILE).read_text()) == [[22, 34]]
    (event,) = recorder.events
    assert (event["step"], event["event"], event["to_step"]) == (34, "rollback", 20)
    assert (event["first_batch"], event["stop_batch"]) == (22, 34)
    assert lines == [
        "steps 25 to 34 were bad: back to step 20, global batches 22 to 33 are skipped"
    ]


def test_no_batch_that_the_checkpoint_has_read_is_skipped(run: Location, recorder: Any) -> None:
    rollback = Rollback(run, skip_before=50, log=print)
    position = dataclasses.replace(state(20), next_batch=23)
    write_state = Catalog(run)
    (run / "checkpoints" / "step=00000020").remove()
    write_state.draft(20, "001").commit(position, {}, {})
    rollback.go_back(BAD, started_at=0, origin=None, recorder=recorder)
    assert rollback.skipped == ((23, 34),)


def test_what_goes_wrong_again_leads_to_an_older_checkpoint(run: Location, recorder: Any) -> None:
    rollback = Rollback(run, skip_before=0, log=print)
    found = [rollback.go_back(BAD, 0, None, recorder)]
    for started_at in (20, 10, 10):  # from step 10 it goes wrong twice, and there is nothing older
        found.append(rollback.go_back(BAD, started_at, None, recorder))
    assert [c and c.state.step for c in found] == [20, 10, 10, 10]


def test_an_attempt_that_a_rollback_did_not_lead_to_goes_back_to_where_it_began(
    run: Location, recorder: Any
) -> None:
    found = Rollback(run, skip_before=0, log=print).go_back(BAD, 20, None, recorder)
    assert found is not None
    assert found.state.step == 20


def test_without_a_checkpoint_it_goes_back_to_the_start_or_the_origin(
    tmp_path: Path, run: Location, recorder: Any
) -> None:
    for origin in (None, Catalog(run).complete()[0]):
        rollback = Rollback(Location.of(tmp_path / "new"), skip_before=5, log=print)
        assert rollback.go_back(BAD, 0, origin, recorder) == origin
        assert rollback.skipped == ((19, 34),)


def test_ranges_of_the_file_and_of_a_checkpoint_are_joined(run: Location) -> None:
    (newest,) = Catalog(run).complete()[-1:]
    copied = dataclasses.replace(newest.state, skipped_batches=((3, 5), (22, 34)))
    rollback = Rollback(run, skip_before=0, log=print)
    rollback.read_skipped(None)
    assert rollback.skipped == ()
    (run / SKIPPED_FILE).write_text("[[22, 34], [40, 41]]")
    rollback.read_skipped(dataclasses.replace(newest, state=copied))
    assert rollback.skipped == ((3, 5), (22, 34), (40, 41))
