"""The end of a run with async evaluation: wait for the pending evaluations."""

from __future__ import annotations

import contextlib

import ray

from raytrain_gpt.checkpoint.catalog import Catalog, Checkpoint
from raytrain_gpt.cluster.failures import root_cause
from raytrain_gpt.cluster.signals import StopSignals
from raytrain_gpt.config.resolved import FittedConfig
from raytrain_gpt.errors import Interrupted, RaytrainGptError, TrainingFailed
from raytrain_gpt.evaluate.async_evaluation import AsyncEvaluation
from raytrain_gpt.storage.lease import Lease
from raytrain_gpt.tracking.recorder_handle import ActorRecorder, RecorderHandle
from raytrain_gpt.tracking.run_files import read_rows
from raytrain_gpt.train.attempt import POLL_S
from raytrain_gpt.train.run_output import RunOutput


def await_evaluations(
    evaluations: AsyncEvaluation,
    config: FittedConfig,
    newest: Checkpoint,
    lease: Lease,
    output: RunOutput,
    signals: StopSignals,
) -> bool:
    """Wait until every evaluation is done and written everywhere.

    Returns:
        Whether an evaluation or its row was missing.

    Raises:
        ClusterError: another run took over the name.
        Interrupted: stopped by a signal; the next command does the rest.
        TrainingFailed: an evaluation or the recorder failed; the next command retries.
    """
    catalog = Catalog(output.run_dir)
    written = {row["step"] for row in read_rows(output.sync.work_dir) if "val/loss" in row}
    complete = catalog.complete()
    due = _steps(evaluations.due())
    waited = bool(due) or any(c.evaluated_row and c.state.step not in written for c in complete)
    if waited:
        signals.defer()
        if due:
            output.log(f"training finished; waiting for the evaluation of step {due}")
        evaluations.hand_over(None, output.log)
        # List again: evaluations finished since then are in the checkpoints, no longer in the queue.
        spec = output.recorder_spec(config, newest.state.step, catalog.complete(), attempt=None)
        evaluations.look()
        try:
            _watch(evaluations, ActorRecorder(spec), newest, lease, output, signals)
        except ray.exceptions.RayActorError as error:
            raise TrainingFailed(
                f"the recorder died ({root_cause(error)}); everything is saved, run the same command to "
                "resume"
            ) from error
    # Some checkpoints stayed only until evaluated, or were the best until a newer evaluation.
    with contextlib.suppress(OSError, RaytrainGptError):
        catalog.prune(config.train.keep_checkpoints)
    if not waited:
        return False
    output.sync.push()
    missing = _steps(evaluations.due())
    if signals.stop.is_set() and missing:
        raise Interrupted(
            f"interrupted at step {newest.state.step}, saved: {newest.path}; run the same command to "
            f"evaluate step {missing}"
        )
    if missing:
        raise TrainingFailed(
            f"training finished, saved: {newest.path}, but step {missing} is not evaluated; run the same "
            "command to try again"
        )
    return True


def _steps(checkpoints: list[Checkpoint]) -> str:
    return ", ".join(str(checkpoint.state.step) for checkpoint in checkpoints)


def _watch(
    evaluations: AsyncEvaluation,
    recorder: RecorderHandle,
    newest: Checkpoint,
    lease: Lease,
    output: RunOutput,
    signals: StopSignals,
) -> None:
    def show(within_s: float) -> None:
        evaluations.hand_over(recorder, output.log)
        for line in recorder.ask("take_news", within_s):
            output.log(line)

    while not (evaluations.idle or signals.stop.is_set()):
        show(POLL_S)
        lease.check()
    show(0.01)
    output.write_report()
    end = "interrupted" if signals.stop.is_set() else "finished"
    recorder.ask("close", end, str(newest.path))
    show(0.01)
    recorder.end()
