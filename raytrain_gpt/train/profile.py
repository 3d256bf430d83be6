"""A profile of a few steps by torch's profiler, in the training process.

1. The first steps after a start are excluded: they compile and fill caches.
2. The profiler warms up during the step before the profiled ones. These steps are slower and must not be
   averaged with others, so all ranks report before and after them (`is_edge`).
3. Each profiled step is a span that ends when the GPU is done.

A profile does not change any computed value.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from raytrain_gpt.core.device import synchronize
from raytrain_gpt.core.loop import StepResult
from raytrain_gpt.events import Profile

STEP_SPAN = "training step"
STEPS_BEFORE_PROFILE = 5
"""Steps before profiling starts; they compile, fill caches and warm up."""
_TABLE_ROWS, _NAME_CHARACTERS = 50, 60


class StepProfile:
    """Steps of an attempt to profile; rank 0 records them.

    Args:
        take: Takes the profile after its last step; None on ranks that do not record one.

    Attributes:
        steps: The profiled steps; fewer if the run ends earlier.
        slowed: These, and the profiler's warm-up step.
    """

    def __init__(
        self,
        num_steps: int,
        steps_done: int,
        max_steps: int,
        device: torch.device,
        take: Callable[[Profile], None] | None,
    ) -> None:
        self._steps_done, self._device, self._take = steps_done, device, take
        first = steps_done + STEPS_BEFORE_PROFILE + 1
        self.steps = range(first, min(first + num_steps, max_steps + 1))
        self.slowed = range(first - 1, self.steps.stop) if self.steps else self.steps
        if self.steps:  # silences the profiler's start and stop messages on stderr
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")

    def is_edge(self, step: int) -> bool:
        """Whether all ranks report after this step, to separate slowed steps from others."""
        return bool(self.slowed) and step in (self.slowed.start - 1, self.slowed[-1])

    def record_steps(self, results: Iterator[StepResult]) -> Iterator[StepResult]:
        """Pass results through, recording the chosen steps."""
        if self._take is None or not self.steps:
            yield from results
            return
        yield from islice(results, self.slowed.start - 1 - self._steps_done)
        on_gpu = self._device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] * on_gpu)]
        warm_up = schedule(wait=0, warmup=1, active=len(self.steps) + 1, repeat=1)
        with profile(activities=activities, schedule=warm_up) as profiler:
            yield from islice(results, 1)
            profiler.step()
            for step in self.steps:
                with record_function(STEP_SPAN):
                    result = next(results)
                    synchronize(self._device)
                if step < self.steps[-1]:
                    yield result
        table = profiler.key_averages().table(
            f"self_{'cuda' if on_gpu else 'cpu'}_time_total",
            _TABLE_ROWS,
            max_name_column_width=_NAME_CHARACTERS,
        )
        with tempfile.TemporaryDirectory(prefix="raytrain-gpt-") as directory:
            path = Path(directory, "trace.json.gz")
            profiler.export_chrome_trace(str(path))
            self._take(Profile(self.steps, table, path.read_bytes()))
        yield result
        yield from results
