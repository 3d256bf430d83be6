"""Async evaluation: a Ray task for each checkpoint that is due, on resources of its own.

1. The workers save a checkpoint at every evaluation step and train on.
2. A thread of the driver finds it in the catalog and starts a task, one at a time, the oldest
   checkpoint first. Attempts come and go meanwhile.
3. The task loads the verified checkpoint, evaluates it with the code of `eval`, and writes
   `evaluation.json` into its directory.
4. The row and the samples go to the recorder. If the recorder is gone, the next one reads them from the
   checkpoints.

A task that dies is retried. What is missing at the end is waited for; what a killed or stopped driver
left is done by the next command.
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
from raytrain_gpt.tracking.run_files import finite

MAX_RETRIES = 3
"""Retries of an evaluation whose task died, before this command leaves it out."""
MANY_WAIT = 3
"""Checkpoints waiting at a time from which the user is told that evaluation is too slow."""
SAY_EVERY_S = 600.0
NICENESS = 19
"""The lowest priority: where cores are short, training comes first."""
POLL_S = 0.5
CLOSE_TIMEOUT_S = 10.0


class AsyncEvaluation:
    """Evaluates the checkpoints of a run while it is trained.

    Args:
        choices: Ray's reference to HellaSwag; None: it is not scored.
        stop: Once it is set, the running task is cancelled and no other begins.
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
        """Look for checkpoints to evaluate, after what is being evaluated now."""
        self._looks.put(None)

    @property
    def idle(self) -> bool:
        """Whether nothing is being evaluated and every `look` has been done."""
        return self._looks.unfinished_tasks == 0

    def due(self) -> list[Checkpoint]:
        """Complete checkpoints that are yet to be evaluated, oldest first.

        One that another command left out gets another chance.
        """
        waiting = [c for c in self._catalog.complete() if c.evaluated_row is None]
        return [c for c in waiting if c.state.is_evaluated_async and c.hash not in self._left_out]

    def hand_over(self, recorder: RecorderHandle | None, log: Log) -> None:
        """Show new lines, and give new evaluations to a recorder; without one the next one reads them."""
        while not self._news.empty():
            news = self._news.get()
            if isinstance(news, str):
                log(news)
            elif recorder is not None:
                recorder.send("add_evaluated", news.row, news.samples)

    def close(self) -> None:
        """Cancel what is being evaluated; the next command evaluates it."""
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
            except Exception as error:  # whatever it is, it must not end the training
                self._news.put(f"evaluations wait for the next checkpoint: {root_cause(error)}")
            self._looks.task_done()
            if self._closed.is_set():
                return

    def _say_many_wait(self, due: list[Checkpoint]) -> None:
        if len(due) >= MANY_WAIT and not self._said_many_wait:
            self._said_many_wait = True
            self._news.put(
                f"{len(due)} checkpoints wait for their evaluation and are kept until then; if it stays "
                "slower than training: larger eval_every_steps, fewer eval_tokens, or more cpus_per_worker"
            )

    def _evaluate(self, checkpoint: Checkpoint) -> None:
        """Evaluate a checkpoint; retry where the task dies, then leave it out."""
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
                self._news.put(f"the checkpoint of step {step} was gone before it was evaluated")
                return
            known = user_error_in(outcome)
            reason = str(known or root_cause(outcome))
            if not retries_left or isinstance(known, UserError):
                self._leave_out(checkpoint, reason)
                return
            self._news.put(f"evaluation of step {step} failed ({reason}); trying again")

    def _outcome(self, task: Any, step: int) -> EvaluationResult | Exception | None:
        """What came of a task; None: it was cancelled because the run ends."""
        started = said_at = time.monotonic()
        num_looks = self._looks.qsize()
        # Polled, and not a ray.get with a timeout, so that a stop cancels it at once. A task without
        # resources waits for ever in Ray without a word: hence the line.
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
                    f"evaluation of step {step} has not ended after {duration(now - started)}: it is slow, "
                    "or waits for the resources of a worker"
                )
        try:
            evaluated: EvaluationResult = ray.get(task)
            return evaluated
        except Exception as error:
            return error

    def _leave_out(self, checkpoint: Checkpoint, reason: str) -> None:
        self._left_out.add(checkpoint.hash)
        # If it cannot be marked, the only harm is a checkpoint that is kept for ever.
        with contextlib.suppress(OSError, RaytrainGptError):
            write_evaluation_result(
                checkpoint.path, checkpoint.hash, EvaluationResult(None, left_out=reason)
            )
        self._news.put(
            f"evaluation of step {checkpoint.state.step} is left out: {reason}; the next command of "
            "this run tries it again, if the checkpoint is still kept"
        )


def _is_there(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is still the same: after a rollback another one has its step."""
    try:
        return read_checkpoint(checkpoint.path).hash == checkpoint.hash
    except CheckpointError:
        return False


# max_calls=1: the process ends with the task, and gives back the memory of its GPU.
@ray.remote(max_retries=0, max_calls=1)  # type: ignore[untyped-decorator]
def _evaluate(
    checkpoint: Checkpoint, config: FittedConfig, choices: Choices | None
) -> EvaluationResult:
    """Evaluate a checkpoint and write the result beside its files.

    Raises:
        UserError: the checkpoint is damaged or gone, or the dataset is.
    """
    torch.set_num_threads(config.cluster.cpus_per_worker)
    os.nice(NICENESS)
    started = time.perf_counter()
    if checkpoint.path.is_local:  # from an object store it is verified when it is fetched
        checkpoint.verify()
    device = torch.device("cuda" if config.cluster.use_gpu else "cpu")
    model, tokenizer = load_checkpoint(checkpoint, config, device)
    data = data_of(config)
    check_trained_on(checkpoint, data)
    feed = validation_feed(checkpoint, config, device, data)
    evaluation = lone_evaluation(config, model, tokenizer, feed, choices)
    metrics = {name: finite(value) for name, value in evaluation.metrics().items()}
    seconds = {"perf/async_eval_s": time.perf_counter() - started}
    row = {"step": checkpoint.state.step, **metrics, **seconds}
    samples = evaluation.samples() if config.eval.num_samples else ""
    evaluated = EvaluationResult(row, samples)
    if not _is_there(checkpoint):
        raise CheckpointError(f"checkpoint {checkpoint.path} was set aside while it was evaluated")
    write_evaluation_result(checkpoint.path, checkpoint.hash, evaluated)
    return evaluated
