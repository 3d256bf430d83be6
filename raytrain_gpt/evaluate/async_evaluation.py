"""Async evaluation: a Ray task for each checkpoint that is due, on resources of its own.

1. The workers save a checkpoint at every evaluation step and train on.
2. A thread of the driver finds it in the catalog and starts a task, one at a time, the oldest
   checkpoint first. Attempts come and go meanwhile.
3. The task loads the verified checkpoint, evaluates it with the code of `eval`, and writes
   `evaluation.json` into its directory.
4. The row and the samples go to the recorder. What is lost on the way there is read from the
   checkpoints by the next recorder.

A task that dies is tried again. What is missing at the end is waited for; what a killed or stopped
driver left is done by the next command.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
import torch

from raytrain_gpt.checkpoint.catalog import Catalog, Checkpoint, read_checkpoint
from raytrain_gpt.checkpoint.evaluation_result import EvaluationResult, write_evaluation_result
from raytrain_gpt.cluster.failures import root_cause, user_error_in
from raytrain_gpt.config.resolved import FittedConfig
from raytrain_gpt.errors import CheckpointError, RaytrainGptError, TrainingFailed, UserError
from raytrain_gpt.evaluate.hellaswag import Choices
from raytrain_gpt.evaluate.inference import load_checkpoint, lone_evaluation, validation_feed
from raytrain_gpt.format import duration
from raytrain_gpt.storage.lease import Lease
from raytrain_gpt.tracking.recorder import RecorderSpec, start_recorder
from raytrain_gpt.tracking.run_files import finite

MAX_RETRIES = 3
"""Times that an evaluation whose task died is tried again, before it is left out."""
MANY_WAIT = 3
"""So many checkpoints that wait at once are told."""
TELL_EVERY_S = 600.0
NICENESS = 19
"""The lowest priority: where cores are short, it is the training that goes on."""
POLL_S = 0.5
CLOSE_WITHIN_S = 10.0


class AsyncEvaluation:
    """Evaluates the checkpoints of a run while it is trained.

    Args:
        config: The run's, with every `auto` of the cluster section decided.
        catalog: Of the run.
        choices: Reference to HellaSwag's `Choices`; None: it is not asked.
        stop: Once it is set, the task is cancelled and nothing is begun any more.
    """

    def __init__(
        self, config: FittedConfig, catalog: Catalog, choices: Any, stop: threading.Event
    ) -> None:
        self._config, self._catalogue, self._choices = config, catalog, choices
        self._stop = stop
        self._news: queue.SimpleQueue[str | EvaluationResult] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._asked = self._busy = self._closed = self._told_many = False
        self._num_looks = 0
        self._left_out: set[str] = set()
        self._thread = threading.Thread(target=self._work, name="async", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """There may be a checkpoint to evaluate: begin, now or behind what is being done."""
        with self._changed:
            self._asked = self._busy = True
            self._num_looks += 1
            self._changed.notify()

    @property
    def idle(self) -> bool:
        """Whether nothing is being evaluated, and nothing that was found waits."""
        return not self._busy

    def is_due(self, checkpoint: Checkpoint) -> bool:
        """Whether it is yet to be evaluated; one that another command left out gets another chance."""
        due = checkpoint.evaluated_row is None and checkpoint.state.is_evaluated_async
        return due and checkpoint.hash not in self._left_out

    def hand_over(self, recorder: Any, log: Callable[[str], None]) -> None:
        """Show new lines, and give new evaluations to a recorder.

        Args:
            recorder: Its handle; None: there is none, the next one reads them from the checkpoints.
            log: Gets the lines.
        """
        while not self._news.empty():
            news = self._news.get()
            if isinstance(news, str):
                log(news)
            elif recorder is not None:
                recorder.add_evaluated.remote(news.row, news.samples)

    def finish(
        self,
        spec: RecorderSpec,
        newest: Checkpoint,
        lease: Lease,
        write_report: Callable[[], None],
        log: Callable[[str], None],
    ) -> None:
        """Evaluate what is due behind the last step, or until `stop`, with a recorder of its own.

        Args:
            spec: Of the recorder.
            newest: The run's last checkpoint.
            lease: On the run's name.
            write_report: Called when all rows are written.
            log: Gets console lines.

        Raises:
            ClusterError: another run took the name over.
            TrainingFailed: the recorder died.
        """
        self.look()
        try:
            self._finish(start_recorder(spec), newest, lease, write_report, log)
        except ray.exceptions.RayActorError as error:
            raise TrainingFailed(
                f"the recorder died ({root_cause(error)}); everything is saved, the same command goes on"
            ) from error

    def _finish(
        self,
        recorder: Any,
        newest: Checkpoint,
        lease: Lease,
        write_report: Callable[[], None],
        log: Callable[[str], None],
    ) -> None:
        while not (self.idle or self._stop.is_set()):
            self._show(recorder, POLL_S, log)
            lease.check()
        self._show(recorder, 0.01, log)
        write_report()
        status = "KILLED" if self._stop.is_set() else "FINISHED"
        ray.get(recorder.close.remote(status, str(newest.path)))
        self._show(recorder, 0.01, log)
        ray.kill(recorder)

    def _show(self, recorder: Any, within_s: float, log: Callable[[str], None]) -> None:
        self.hand_over(recorder, log)
        for line in ray.get(recorder.take_news.remote(within_s)):
            log(line)

    def close(self) -> None:
        """Cancel what is being done; nothing of it is lost but time."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(CLOSE_WITHIN_S)

    def _ends(self) -> bool:
        return self._closed or self._stop.is_set()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._asked or self._closed):
                    self._busy = False
                    self._changed.wait()
                if self._closed:
                    return
                self._asked = False
            try:
                while not self._ends() and (due := self._due()):
                    self._tell_many(due)
                    self._evaluate(due[0])
            except Exception as error:  # whatever it is, it must not end the training
                self._news.put(f"evaluations wait for the next checkpoint: {root_cause(error)}")

    def _due(self) -> list[Checkpoint]:
        return [checkpoint for checkpoint in self._catalogue.complete() if self.is_due(checkpoint)]

    def _tell_many(self, due: list[Checkpoint]) -> None:
        if len(due) >= MANY_WAIT and not self._told_many:
            self._told_many = True
            self._news.put(
                f"{len(due)} checkpoints wait for their evaluation and are kept until then; if it stays "
                "slower than training: larger eval_every_steps, fewer eval_tokens, or more cpus_per_worker"
            )

    def _evaluate(self, checkpoint: Checkpoint) -> None:
        """Evaluate a checkpoint, again where the task dies, or leave it out."""
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
            self._news.put(f"evaluation of step {step} failed ({reason}), it is tried again")

    def _outcome(self, task: Any, step: int) -> EvaluationResult | Exception | None:
        """What came of a task; None: it was cancelled because all of this ends."""
        started = told_at = time.monotonic()
        num_looks = self._num_looks
        while not ray.wait([task], timeout=POLL_S)[0]:
            if self._ends():
                ray.cancel(task, force=True)
                return None
            if self._num_looks != num_looks:
                num_looks = self._num_looks
                with contextlib.suppress(OSError, RaytrainGptError):
                    self._tell_many(self._due())
            now = time.monotonic()
            if now - told_at >= TELL_EVERY_S:
                told_at = now
                self._news.put(
                    f"evaluation of step {step} has not ended after {duration(now - started)}: it is slow, "
                    "or waits for resources as a worker has them"
                )
        try:
            evaluated: EvaluationResult = ray.get(task)
            return evaluated
        except Exception as error:
            return error

    def _leave_out(self, checkpoint: Checkpoint, reason: str) -> None:
        self._left_out.add(checkpoint.hash)
        # Without the mark nothing is lost but the room of a checkpoint that is kept for ever.
        with contextlib.suppress(OSError, RaytrainGptError):
            write_evaluation_result(
                checkpoint.path, checkpoint.hash, EvaluationResult(None, left_out=reason)
            )
        self._news.put(
            f"evaluation of step {checkpoint.state.step} is left out: {reason}; the next command of "
            "this run tries it again, if the checkpoint is still kept"
        )


def _is_there(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is still the same: a rollback sets it aside, and its step comes again."""
    try:
        return read_checkpoint(checkpoint.path).hash == checkpoint.hash
    except CheckpointError:
        return False


@ray.remote(max_retries=0, max_calls=1)  # type: ignore[untyped-decorator]
def _evaluate(
    checkpoint: Checkpoint, config: FittedConfig, choices: Choices | None
) -> EvaluationResult:
    """Evaluate a checkpoint and write down what was found.

    Raises:
        UserError: the checkpoint is damaged or gone, or the dataset is.
    """
    torch.set_num_threads(config.cluster.cpus_per_worker)
    os.nice(NICENESS)
    started = time.perf_counter()
    if checkpoint.path.is_local:  # what is fetched from an object store is verified then
        checkpoint.verify()
    device = torch.device("cuda" if config.cluster.use_gpu else "cpu")
    model, tokenizer = load_checkpoint(checkpoint, config, device)
    feed = validation_feed(checkpoint, config, device, data=None, eval_tokens=None)
    evaluation = lone_evaluation(config, model, tokenizer, feed, choices)
    metrics = {name: finite(value) for name, value in evaluation.metrics().items()}
    seconds = {"perf/eval_beside_s": time.perf_counter() - started}
    row = {"step": checkpoint.state.step, **metrics, **seconds}
    samples = evaluation.samples() if config.eval.num_samples else ""
    evaluated = EvaluationResult(row, samples)
    if not _is_there(checkpoint):
        raise CheckpointError(f"checkpoint {checkpoint.path} was set aside while it was evaluated")
    write_evaluation_result(checkpoint.path, checkpoint.hash, evaluated)
    return evaluated
