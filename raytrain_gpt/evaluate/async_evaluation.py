"""Async evaluation: a separate Ray task for each checkpoint that is due.

1. The workers save a checkpoint at every evaluation step and continue training.
2. A thread of the driver finds it in the catalog and starts a task: one at a time, the oldest checkpoint
   first, regardless of restarts of the training workers.
3. The task verifies and evaluates the checkpoint with the code of `eval`, and writes `evaluation.json` into
   its directory.
4. The row and the samples go to the recorder. A restarted recorder reads them from the checkpoints.

A task that dies is retried. The run waits for pending evaluations at its end; the next command evaluates what
a killed or stopped driver did not.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from typing import Any

import ray
import torch

from raytrain_gpt.checkpoint.catalog import Catalog, Checkpoint, read_checkpoint
from raytrain_gpt.checkpoint.evaluation_result import EvaluationResult, write_evaluation_result
from raytrain_gpt.cluster.failures import root_cause, user_error_in
from raytrain_gpt.config.resolved import FittedConfig
from raytrain_gpt.data.locations import data_of
from raytrain_gpt.errors import CheckpointError, RaytrainGptError, UserError
from raytrain_gpt.evaluate.hellaswag import Choices
from raytrain_gpt.evaluate.inference import (
    check_trained_on,
    load_checkpoint,
    lone_evaluation,
    validation_feed,
)
from raytrain_gpt.format import Log, duration
from raytrain_gpt.tracking.recorder_handle import RecorderHandle

MAX_RETRIES = 3
"""Retries of an evaluation whose task died, before this command skips it."""
MANY_WAIT = 3
"""Pending checkpoints from which the user is warned that evaluation is too slow."""
SAY_EVERY_S = 600.0
NICENESS = 19
"""Lowest priority, so that training gets the cores first."""
POLL_S = 0.5
CLOSE_TIMEOUT_S = 10.0


class AsyncEvaluation:
    """Evaluation of a run's checkpoints during training.

    Args:
        choices: Ray's reference to HellaSwag, or None to skip it.
        stop: Once set, the running task is cancelled and no further one starts.
    """

    def __init__(
        self, config: FittedConfig, catalog: Catalog, choices: Any, stop: threading.Event
    ) -> None:
        self._config, self._catalog, self._choices = config, catalog, choices
        self._stop, self._closed = stop, threading.Event()
        self._news: queue.SimpleQueue[str | EvaluationResult] = queue.SimpleQueue()
        self._looks: queue.Queue[None] = queue.Queue()
        self._said_many_wait = False
        self._left_out: set[str] = set()
        self._thread = threading.Thread(target=self._work, name="async evaluation", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Request a search for checkpoints to evaluate."""
        self._looks.put(None)

    @property
    def idle(self) -> bool:
        """Whether no evaluation runs and every requested search is done."""
        return self._looks.unfinished_tasks == 0

    def due(self) -> list[Checkpoint]:
        """Return complete checkpoints to evaluate, oldest first, even if an earlier command skipped them."""
        waiting = [c for c in self._catalog.complete() if c.evaluated_row is None]
        return [c for c in waiting if c.state.is_evaluated_async and c.hash not in self._left_out]

    def hand_over(self, recorder: RecorderHandle | None, log: Log) -> None:
        """Log messages, and send new evaluations to the recorder; without one, the next one reads them."""
        while not self._news.empty():
            news = self._news.get()
            if isinstance(news, str):
                log(news)
            elif recorder is not None:
                recorder.send("add_evaluated", news.row, news.samples)

    def close(self) -> None:
        """Cancel the current evaluation; the next command repeats it."""
        self._closed.set()
        self.look()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _ends(self) -> bool:
        return self._closed.is_set() or self._stop.is_set()

    def _work(self) -> None:
        while True:
            self._looks.get()
            try:
                while not self._ends() and (due := self.due()):
                    self._say_many_wait(due)
                    self._evaluate(due[0])
            except Exception as error:  # no error here may end the training
                self._news.put(f"evaluations wait for the next checkpoint: {root_cause(error)}")
            self._looks.task_done()
            if self._closed.is_set():
                return

    def _say_many_wait(self, due: list[Checkpoint]) -> None:
        if len(due) >= MANY_WAIT and not self._said_many_wait:
            self._said_many_wait = True
            self._news.put(
                f"{len(due)} checkpoints are waiting for evaluation, and none is deleted before it; if "
                "evaluation stays slower than training: increase eval_every_steps or cpus_per_worker, or "
                "reduce eval_tokens"
            )

    def _evaluate(self, checkpoint: Checkpoint) -> None:
        """Evaluate a checkpoint; retry if the task dies, then skip it."""
        c, step = self._config.cluster, checkpoint.state.step
        task = _evaluate.options(num_cpus=c.cpus_per_worker, num_gpus=c.num_gpus)
        for retries_left in reversed(range(MAX_RETRIES + 1)):
            outcome = self._outcome(task.remote(checkpoint, self._config, self._choices), step)
            if isinstance(outcome, EvaluationResult):
                self._news.put(outcome)
                return
            if outcome is None:
                return
            if not _is_there(checkpoint):
                self._news.put(f"the checkpoint of step {step} was deleted before its evaluation")
                return
            known = user_error_in(outcome)
            reason = str(known or root_cause(outcome))
            if not retries_left or isinstance(known, UserError):
                self._leave_out(checkpoint, reason)
                return
            self._news.put(f"evaluation of step {step} failed ({reason}); retrying")

    def _outcome(self, task: Any, step: int) -> EvaluationResult | Exception | None:
        """Wait for a task; None if it was cancelled because the run ends."""
        started = said_at = time.monotonic()
        num_looks = self._looks.qsize()
        # Polled, so that a stop cancels it at once. Ray does not report a task that waits for resources.
        while not ray.wait([task], timeout=POLL_S)[0]:
            if self._ends():
                ray.cancel(task, force=True)
                return None
            if self._looks.qsize() > num_looks:
                num_looks = self._looks.qsize()
                with contextlib.suppress(OSError, RaytrainGptError):
                    self._say_many_wait(self.due())
            now = time.monotonic()
            if now - said_at >= SAY_EVERY_S:
                said_at = now
                self._news.put(
                    f"evaluation of step {step} has not finished after {duration(now - started)}: it is "
                    "slow, or waits for the resources of a worker"
                )
        try:
            evaluated: EvaluationResult = ray.get(task)
            return evaluated
        except Exception as error:
            return error

    def _leave_out(self, checkpoint: Checkpoint, reason: str) -> None:
        self._left_out.add(checkpoint.hash)
        # If it cannot be marked, its checkpoint is never deleted.
        with contextlib.suppress(OSError, RaytrainGptError):
            write_evaluation_result(
                checkpoint.path, checkpoint.hash, EvaluationResult(None, left_out=reason)
            )
        self._news.put(
            f"skipping evaluation of step {checkpoint.state.step}: {reason}; the next command of this run "
            "retries it if the checkpoint still exists"
        )


def _is_there(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint is unchanged: after a rollback its step may have a different one."""
    try:
        return read_checkpoint(checkpoint.path).hash == checkpoint.hash
    except CheckpointError:
        return False


# max_calls=1: the process exits with the task, which frees its GPU memory.
@ray.remote(max_retries=0, max_calls=1)  # type: ignore[untyped-decorator]
def _evaluate(
    checkpoint: Checkpoint, config: FittedConfig, choices: Choices | None
) -> EvaluationResult:
    """Evaluate a checkpoint and write the result into its directory; may raise a UserError."""
    torch.set_num_threads(config.cluster.cpus_per_worker)
    os.nice(NICENESS)
    started = time.perf_counter()
    if checkpoint.path.is_local:  # a download from an object store verifies it
        checkpoint.verify()
    device = torch.device("cuda" if config.cluster.use_gpu else "cpu")
    model, tokenizer = load_checkpoint(checkpoint, config, device)
    data = data_of(config)
    check_trained_on(checkpoint, data)
    feed = validation_feed(checkpoint, config, device, data)
    evaluation = lone_evaluation(config, model, tokenizer, feed, choices)
    metrics = evaluation.metrics()
    seconds = {"perf/async_eval_s": time.perf_counter() - started}
    row = {"step": checkpoint.state.step, **metrics, **seconds}
    samples = evaluation.samples() if config.eval.num_samples else ""
    evaluated = EvaluationResult(row, samples)
    if not _is_there(checkpoint):
        raise CheckpointError(f"checkpoint {checkpoint.path} was retired during its evaluation")
    write_evaluation_result(checkpoint.path, checkpoint.hash, evaluated)
    return evaluated
