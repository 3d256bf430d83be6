"""Going back before bad steps, and the global batches that are skipped from then on.

`skipped.json` in the run's directory holds the skipped ranges, so that a run that goes on from a
checkpoint before them, whose state does not have them, skips them too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import ray

from raytrain_gpt.checkpoint.catalog import Catalog, Checkpoint
from raytrain_gpt.core.spikes import BadStretch
from raytrain_gpt.data.order import Skipped
from raytrain_gpt.storage.location import Location

SKIPPED_FILE = "skipped.json"


class Rollback:
    """Takes a run back; remembers what is skipped and where it went back to last.

    Args:
        run_dir: The run's directory.
        skip_before: Global batches that are skipped before the first bad one.
        log: Gets a line for every rollback.

    Attributes:
        skipped: Ranges of global batches that are left out, (first, stop).
    """

    def __init__(self, run_dir: Location, skip_before: int, log: Callable[[str], None]) -> None:
        self._file, self._catalog = run_dir / SKIPPED_FILE, Catalog(run_dir)
        self._skip_before, self._log = skip_before, log
        self._last_step: int | None = None
        self.skipped: Skipped = ()

    def read_skipped(self, resumed: Checkpoint | None) -> None:
        """Take the ranges of the run's file and of a checkpoint, which may be another run's copy."""
        ranges = json.loads(self._file.read_text()) if self._file.is_file() else []
        found = {(int(first), int(stop)) for first, stop in ranges}
        self.skipped = tuple(sorted(found | set(resumed.state.skipped_batches if resumed else ())))

    def go_back(
        self, bad: BadStretch, started_at: int, origin: Checkpoint | None, recorder: Any
    ) -> Checkpoint | None:
        """Back to the last checkpoint before the bad steps, whose batches are skipped from now on.

        When it returns the rollback is durable: later checkpoints are set aside, the ranges written.

        Args:
            bad: The bad steps.
            started_at: The step that the attempt began at.
            origin: Checkpoint of another run that this one began with, or None.
            recorder: Gets the event.
        """
        resumed = self._catalog.newest_good(self._log, before_step=bad.first_step) or origin
        step = resumed.state.step if resumed else 0
        if 0 < started_at == step == self._last_step:
            # A rollback led here before and it went wrong again: the weights may have been hurt
            # earlier than the loss has shown.
            older = self._catalog.newest_good(self._log, before_step=started_at)
            resumed = older or resumed
            step = resumed.state.step if resumed else 0
        self._last_step = step
        self._catalog.clean(good_until=step)
        next_batch = resumed.state.next_batch if resumed else 0
        skipped = (max(next_batch, bad.first_batch - self._skip_before), bad.last_batch + 1)
        self.skipped = (*self.skipped, skipped)
        self._file.write_text(json.dumps(self.skipped) + "\n")
        details = {
            "to_step": step,
            "first_bad_step": bad.first_step,
            "first_batch": skipped[0],
            "stop_batch": skipped[1],
        }
        ray.get(recorder.add_event.remote(bad.last_step, "rollback", **details))
        self._log(
            f"steps {bad.first_step} to {bad.last_step} were bad: back to step {step}, "
            f"global batches {skipped[0]} to {skipped[1] - 1} are skipped"
        )
        return resumed
