"""Copies of a run's files in an object store."""

from __future__ import annotations

import pytest

from raytrain_gpt.storage.location import Location
from raytrain_gpt.tracking.run_files import METRICS_FILE
from raytrain_gpt.tracking.sync import RunSync


@pytest.mark.slow
def test_files_that_were_only_read_are_not_written_back(remote_dir: Location) -> None:
    stored = remote_dir / "run" / METRICS_FILE
    stored.write_text('{"step": 1}\n')
    reader = RunSync(stored.parent).pull()
    stored.write_text('{"step": 1}\n{"step": 2}\n')  # by the run itself
    (reader.work_dir / "report.html").write_text("a report")
    reader.push()
    assert stored.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert (stored.parent / "report.html").read_text() == "a report"
