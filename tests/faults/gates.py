"""Gates that stop a run at an exact step, and faults injected at exact steps, for fault tests.

`gated(faults)` is a train loop for `launch.train`; `python -m tests.faults.gates FILE` is the `train`
command with the configuration and the faults of a JSON file. A rank that reaches a gate writes a file and
waits for a second one. A test therefore kills at exactly this step, never too early or too late.
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
import ray.train
import torch

from raytrain_gpt.config.schema import Config, parse_config
from raytrain_gpt.core.state import HostSnapshot
from raytrain_gpt.data.order import batches_to_read
from raytrain_gpt.errors import RaytrainGptError
from raytrain_gpt.events import Events
from raytrain_gpt.train import rank as rank_module
from raytrain_gpt.train.model_setup import TrainingSetup
from raytrain_gpt.train.rank import Rank, train_rank
from raytrain_gpt.train.worker_group import RankJob, TrainLoop

POLL_S = 0.02
WITHIN_S = 300.0


def wait_until(condition: Callable[[], Any], what: str, within_s: float = WITHIN_S) -> Any:
    """Return the condition's first true value, or fail after `within_s`."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(POLL_S)
    raise AssertionError(f"timed out after {within_s:g} s waiting for {what}")


@dataclass(frozen=True)
class Gate:
    """A point where a rank waits until the test releases it.

    Attributes:
        directory: Directory of the gate's two files; an opened gate stays open.
        rank: Rank that waits.
        step: Step after which the rank waits.
        in_checkpoint: Wait in the middle of writing the checkpoint of `step` instead.
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
        """In the worker: record the process IDs of rank and raylet at the gate, and wait."""
        if self._file.with_suffix(".open").exists():
            return
        self._file.write_text(f"{os.getpid()} {os.environ.get('RAY_RAYLET_PID', 0)}")
        wait_until(self._file.with_suffix(".open").exists, f"the opening of {self._file.name}", 600)

    def reached(self, unless: Callable[[], bool] = lambda: False) -> int:
        """In the test: wait until the rank is at the gate, and fail if `unless`; return its process ID."""

        def there() -> str:
            assert not unless(), f"{self._file.name} can no longer be reached"
            return self._file.read_text() if self._file.exists() else ""

        return int(wait_until(there, self._file.name).split()[0])

    @property
    def raylet(self) -> int:
        """Process ID of the raylet on the node of the waiting rank."""
        return int(self._file.read_text().split()[1])

    def open(self) -> None:
        """In the test: release the rank, now and every time it reaches the gate again."""
        self._file.with_suffix(".open").touch()


@dataclass(frozen=True)
class Faults:
    """Faults inside the workers.

    Attributes:
        gates: Gates where ranks wait.
        nan_rank: Rank whose gradients become NaN in `nan_steps`.
        nan_steps: Steps in which the gradients of `nan_rank` become NaN.
        nan_weight_step: Step after which, in the first attempt, all weights are NaN.
        spiked_batches: Global batches whose loss, and therefore gradient, is a thousand times too large.
        notice_step: Step after which every rank of several waits for the notice of a preemption.
        stop_step: Step after which every rank waits for the request to stop.
    """

    gates: tuple[Gate, ...] = ()
    nan_rank: int = 0
    nan_steps: tuple[int, ...] = ()
    nan_weight_step: int | None = None
    spiked_batches: tuple[int, ...] = ()
    notice_step: int | None = None
    stop_step: int | None = None


def gated(faults: Faults) -> TrainLoop:
    """Return `train_rank` with faults."""

    def train_loop(job: RankJob) -> Events:
        with pytest.MonkeyPatch.context() as patch:
            _install(faults, job, patch)
            yield from train_rank(job)

    return train_loop


def _install(faults: Faults, job: RankJob, patch: pytest.MonkeyPatch) -> None:
    record, set_up, write = Rank.record, rank_module.set_up_training, HostSnapshot.write
    begun = job.resumed.state.step if job.resumed else 0
    num_steps = job.plan.config.train.max_steps - begun
    ranges = batches_to_read(job.position.next_batch, num_steps, job.position.skipped)
    batches = [batch for first, stop in ranges for batch in range(first, stop)]
    at = {"rank": 0, "step": begun}

    def recording(rank: Rank, result: Any) -> None:
        record(rank, result)
        at["step"] = result.step
        if (job.attempt, result.step) == (1, faults.nan_weight_step):
            torch._foreach_mul_([p.detach() for p in rank.setup.raw_model.parameters()], math.nan)
        for gate in faults.gates:
            if (gate.rank, gate.step, gate.in_checkpoint) == (at["rank"], at["step"], False):
                gate.pass_through()
        noticed = at["step"] == faults.notice_step and rank.collectives.world_size > 1
        if noticed or at["step"] == faults.stop_step:
            assert rank.link.stop.wait(WITHIN_S), "this rank received no request to stop"

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
        # A tensor's hook sees the gradient of this rank, before it is averaged over the ranks.
        next(iter(setup.raw_model.parameters())).register_hook(spoil_gradient)
        setup.raw_model.register_forward_hook(spoil_loss)
        return setup

    def writing(copy: HostSnapshot, file: str, path: Path) -> None:
        write(copy, file, path)
        for gate in faults.gates:
            name = f"step={gate.step:08d}"
            if gate.in_checkpoint and gate.rank == at["rank"] and name in str(path):
                gate.pass_through()

    patch.setattr(Rank, "record", recording)
    patch.setattr(HostSnapshot, "write", writing)
    patch.setattr(rank_module, "set_up_training", setting_up)


def command(config: Config, faults: Faults, file: Path) -> list[str]:
    """Write the JSON file of a gated run and return the command line that reads it."""
    file.write_text(json.dumps({"config": config.model_dump(), "faults": asdict(faults)}))
    return [sys.executable, "-m", "tests.faults.gates", str(file)]


def main(file: str) -> None:
    """Train like the `train` command: lines on stdout, an error on stderr, the same exit codes."""
    from raytrain_gpt.train.launch import train

    content = json.loads(Path(file).read_text())
    faults = content["faults"]
    gates = tuple(Gate(**gate) for gate in faults.pop("gates"))
    config = parse_config(content["config"], file)
    try:
        train(config, lambda line: print(line, flush=True), gated(Faults(gates, **faults)))
    except RaytrainGptError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main(sys.argv[1])
