"""Stop a run at an exact place, or spoil an exact step: what a fault test needs to hit what it means.

`gated(faults)` is a train loop for `launch.train`; `python -m tests.faults.gates FILE` is the `train`
command with the configuration and the faults of a JSON file. A rank that comes to a gate says so by a
file and waits for another one, so that a test kills at this step and never too early or too late.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.train
import torch
from ray.train.v2._internal.execution.context import get_train_context

from raytrain_gpt.checkpoint.catalog import Checkpoint
from raytrain_gpt.config.schema import Config, parse_config
from raytrain_gpt.core.state import HostSnapshot
from raytrain_gpt.data.order import batches_to_read
from raytrain_gpt.errors import RaytrainGptError
from raytrain_gpt.evaluate import async_evaluation
from raytrain_gpt.train import worker as worker_module
from raytrain_gpt.train.model_setup import TrainingSetup
from raytrain_gpt.train.worker import Worker, train_worker
from raytrain_gpt.train.worker_group import WorkerSpec

POLL_S = 0.02
WITHIN_S = 150.0


def wait_until(condition: Callable[[], Any], what: str, within_s: float = WITHIN_S) -> Any:
    """The condition's first true value; fails when it does not come."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(POLL_S)
    raise AssertionError(f"{what} did not come within {within_s:g} s")


@dataclass(frozen=True)
class Gate:
    """A place where a rank waits until the test lets it go on.

    Attributes:
        directory: Of the gate's two files; a gate once opened stays open.
        rank: Who waits.
        step: Behind this step; with `in_checkpoint` in the middle of writing this step's checkpoint.
        in_checkpoint: See `step`.
    """

    directory: str
    rank: int
    step: int
    in_checkpoint: bool = False

    @property
    def _file(self) -> Path:
        kind = "checkpoint" if self.in_checkpoint else "step"
        return Path(self.directory, f"{kind}-{self.step}-rank-{self.rank}")

    def pass_through(self) -> None:
        """In the worker: say that the gate is reached, with the process, and wait."""
        if self._file.with_suffix(".open").exists():
            return
        self._file.write_text(f"{os.getpid()} {os.environ.get('RAY_RAYLET_PID', 0)}")
        wait_until(self._file.with_suffix(".open").exists, f"the opening of {self._file.name}", 600)

    def reached(self, unless: Callable[[], bool] = lambda: False) -> int:
        """In the test: wait until the rank is there, unless that cannot be; its process id."""

        def there() -> str:
            assert not unless(), f"{self._file.name} cannot be reached any more"
            return self._file.read_text() if self._file.exists() else ""

        return int(wait_until(there, self._file.name).split()[0])

    @property
    def raylet(self) -> int:
        """Process id of the raylet of the node whose rank is there."""
        return int(self._file.read_text().split()[1])

    def open(self) -> None:
        """In the test: let the rank go on, now and whenever it comes here."""
        self._file.with_suffix(".open").touch()


@dataclass(frozen=True)
class Faults:
    """What goes wrong inside the workers.

    Attributes:
        gates: Where ranks wait.
        nan_rank: The rank whose gradients become NaN …
        nan_steps: … in these steps.
        spiked_batches: Global batches whose loss, and so its gradient, is a thousand times too large.
        notice_step: Behind this step every rank waits until Ray has told it of a preemption.
        stop_step: Behind this step every rank waits until it is told to stop.
        evaluations: Where tasks of async evaluation wait; their step is the checkpoint's.
    """

    gates: tuple[Gate, ...] = ()
    nan_rank: int = 0
    nan_steps: tuple[int, ...] = ()
    spiked_batches: tuple[int, ...] = ()
    notice_step: int | None = None
    stop_step: int | None = None
    evaluations: tuple[Gate, ...] = ()


def gated(faults: Faults) -> Callable[[WorkerSpec], None]:
    """`train_worker` with faults."""

    def train_loop(spec: WorkerSpec) -> None:
        with pytest.MonkeyPatch.context() as patch:
            _install(faults, spec, patch)
            train_worker(spec)

    return train_loop


def _install(faults: Faults, spec: WorkerSpec, patch: pytest.MonkeyPatch) -> None:
    record, set_up, write = Worker.record, worker_module.set_up_training, HostSnapshot.write
    begun = spec.resumed.state.step if spec.resumed else 0
    num_steps = spec.plan.config.train.max_steps - begun
    ranges = batches_to_read(spec.ingest.first_batch, num_steps, spec.ingest.skipped)
    batches = [batch for first, stop in ranges for batch in range(first, stop)]
    at = {"rank": 0, "step": begun}

    def recording(worker: Worker, result: Any) -> None:
        record(worker, result)
        at["step"] = result.step
        for gate in faults.gates:
            if (gate.rank, gate.step, gate.in_checkpoint) == (at["rank"], at["step"], False):
                gate.pass_through()
        if at["step"] == faults.notice_step and worker.collectives.world_size > 1:
            context = get_train_context()
            wait_until(lambda: context.preemption_context.preemption_info, "the notice")
            worker._preemption_checked_at = -math.inf  # asks now
        if at["step"] == faults.stop_step:
            assert worker.recorder.stop.wait(WITHIN_S), "nobody told this rank to stop"

    def spoil_gradient(gradient: torch.Tensor) -> torch.Tensor | None:
        if at["rank"] == faults.nan_rank and at["step"] + 1 in faults.nan_steps:
            return gradient * torch.nan
        return None

    def spoil_loss(model: Any, _inputs: Any, loss: torch.Tensor) -> torch.Tensor | None:
        if model.training and batches[at["step"] - begun] in faults.spiked_batches:
            return loss * 1000
        return None

    def setting_up(*args: Any) -> TrainingSetup:
        at["rank"] = ray.train.get_context().get_world_rank()
        setup = set_up(*args)
        # In a tensor's hook the gradient is this rank's own, not yet the mean over the ranks.
        next(iter(setup.raw_model.parameters())).register_hook(spoil_gradient)
        setup.raw_model.register_forward_hook(spoil_loss)
        return setup

    def writing(copy: HostSnapshot, file: str, path: Path) -> None:
        write(copy, file, path)
        for gate in faults.gates:
            name = f"step={gate.step:08d}"
            if gate.in_checkpoint and gate.rank == at["rank"] and name in str(path):
                gate.pass_through()

    if faults.notice_step is not None:  # else the step before may ask already, and be answered here
        patch.setattr(worker_module, "PREEMPTION_CHECK_S", math.inf)
    patch.setattr(Worker, "record", recording)
    patch.setattr(HostSnapshot, "write", writing)
    patch.setattr(worker_module, "set_up_training", setting_up)


def evaluates(before: Callable[[Checkpoint], None]) -> Any:
    """The task that evaluates a checkpoint asynchronously, with something to do before."""
    task = async_evaluation._evaluate

    def _evaluate(checkpoint: Checkpoint, *more: Any) -> Any:
        before(checkpoint)
        return task._function(checkpoint, *more)

    return ray.remote(max_retries=0, max_calls=1)(_evaluate)


def held(gates: tuple[Gate, ...]) -> Any:
    """The same, waiting at gates."""

    def wait(checkpoint: Checkpoint) -> None:
        for gate in gates:
            if gate.step == checkpoint.state.step:
                gate.pass_through()

    return evaluates(wait)


def command(config: Config, faults: Faults, file: Path) -> list[str]:
    """The command line of a gated run as a process of its own."""
    file.write_text(json.dumps({"config": config.model_dump(), "faults": asdict(faults)}))
    return [sys.executable, "-m", "tests.faults.gates", str(file)]


def main(file: str) -> None:
    """Train like the command: lines on stdout, an error on stderr, its exit code."""
    from raytrain_gpt.train.launch import train

    content = json.loads(Path(file).read_text())
    faults = content["faults"]
    gates, evaluations = (
        tuple(Gate(**gate) for gate in faults.pop(name)) for name in ("gates", "evaluations")
    )
    async_evaluation._evaluate = held(evaluations)
    config = parse_config(content["config"], file)
    try:
        train(config, lambda line: print(line, flush=True), gated(Faults(gates, **faults)))
    except RaytrainGptError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main(sys.argv[1])
