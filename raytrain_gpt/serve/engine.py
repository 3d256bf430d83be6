"""Continuous batching: one thread generates all sequences of all requests together.

    request → submit → queue, in order of arrival → a free slot in the batch → one token per step

Weights can be replaced at any time. Running requests finish on the old ones, so two batches may run for a
while; they share the slots.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import tiktoken
import torch

from raytrain_gpt.config.call_options import SamplingOptions
from raytrain_gpt.core.device import inference_autocast
from raytrain_gpt.core.generate import DecodingBatch, SampledToken
from raytrain_gpt.core.model import GPT
from raytrain_gpt.data.tokenizer import bytes_per_id

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 2
"""Tolerated consecutive failures: one may be a request that needs too much memory, more mean that
the model or its device is broken."""


@dataclass(eq=False)
class Weights:
    name: str
    step: int
    val_loss: float | None
    """Nats per token, or None if it was not evaluated."""
    loaded_at: int
    """Unix time."""
    model: GPT
    tokenizer: tiktoken.Encoding
    hash: str

    @cached_property
    def max_prompt_bytes(self) -> int:
        """Maximum size of a text that may fit the context: seq_len times the longest token."""
        longest = bytes_per_id(self.tokenizer, self.tokenizer.n_vocab).max()
        return int(longest) * self.model.shape.seq_len


@dataclass(eq=False)
class Job:
    """One sequence of a request."""

    weights: Weights
    prompt: Sequence[int]
    """At least one token."""
    options: SamplingOptions
    index: int
    """Index of the choice in the response; also selects its random stream."""
    drawn: asyncio.Queue[tuple[int, SampledToken | None]] = field(repr=False)
    """Receives (index, result of a step), or (index, None) if the engine failed."""


class Engine:
    """Thread that runs `max_batch` jobs at a time, with `max_queue` waiting; `loop` gets the results."""

    def __init__(
        self, weights: Weights, loop: asyncio.AbstractEventLoop, max_batch: int, max_queue: int
    ) -> None:
        self.weights = weights
        """Weights of new requests; assign to replace the model."""
        self._loop = loop
        self._max_batch, self._max_queue = max_batch, max_queue
        self._changed = threading.Condition()
        self._queue: deque[Job] = deque()
        self._cancelled: set[Job] = set()
        self._num_failed_steps = 0
        self._running: dict[Weights, tuple[DecodingBatch, dict[int, Job]]] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue the sequences of a request, or raise `asyncio.QueueFull` if not all of them fit."""
        with self._changed:
            if len(self._queue) + len(jobs) > self._max_queue + self._num_free():
                raise asyncio.QueueFull
            self._queue.extend(jobs)
            self._changed.notify()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Stop jobs, which may have finished, and free their slots."""
        with self._changed:
            self._cancelled.update(jobs)
            self._changed.notify()

    def check(self) -> None:
        """Raise a RuntimeError if the thread has ended, or the last steps all failed."""
        if not self._thread.is_alive():
            raise RuntimeError("the engine's thread has ended")
        if self._num_failed_steps > MAX_FAILED_STEPS:
            raise RuntimeError(f"the last {self._num_failed_steps} steps of the model failed")

    def _run(self) -> None:
        with inference_autocast(self.weights.model.device):
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._queue or self._running or self._cancelled)
                # A separate method, so that no local variable keeps replaced weights alive while idle.
                self._step()

    def _step(self) -> None:
        with self._changed:
            self._drop_cancelled()
            self._admit()
            running = list(self._running.items())
        for weights, (batch, jobs) in running:
            try:
                drawn: list[SampledToken] | None = batch.step()
                self._num_failed_steps = 0
            except Exception:
                # For example out of memory: fail these requests, the next ones may succeed.
                logger.exception("a step failed")
                drawn = None
                self._num_failed_steps += 1
            with self._changed:
                events = self._finish_step(weights, jobs, drawn)
            self._loop.call_soon_threadsafe(_deliver, events)

    def _num_free(self) -> int:
        return self._max_batch - sum(len(jobs) for _, jobs in self._running.values())

    def _drop_cancelled(self) -> None:
        cancelled, self._cancelled = self._cancelled, set()
        if not cancelled:
            return
        self._queue = deque(job for job in self._queue if job not in cancelled)
        for weights, (batch, jobs) in list(self._running.items()):
            for handle in [handle for handle, job in jobs.items() if job in cancelled]:
                batch.cancel(handle)
                del jobs[handle]
            if not jobs:
                self._free(weights)

    def _admit(self) -> None:
        for _ in range(min(self._num_free(), len(self._queue))):
            job = self._queue.popleft()
            if job.weights not in self._running:
                model, eot_token = job.weights.model, job.weights.tokenizer.eot_token
                self._running[job.weights] = DecodingBatch(model, eot_token, self._max_batch), {}
            batch, jobs = self._running[job.weights]
            jobs[batch.add(job.prompt, job.options, job.index)] = job

    def _finish_step(
        self, weights: Weights, jobs: dict[int, Job], drawn: list[SampledToken] | None
    ) -> list[tuple[Job, SampledToken | None]]:
        """Return results of a step by job; free the batch and its cache after the last job."""
        if drawn is None:
            events: list[tuple[Job, SampledToken | None]] = [(job, None) for job in jobs.values()]
            jobs.clear()
        else:
            events = [(jobs[one.handle], one) for one in drawn]
            for one in drawn:
                if one.finish_reason is not None:
                    del jobs[one.handle]
        if not jobs:
            self._free(weights)
        return events

    def _free(self, weights: Weights) -> None:
        """Free the batch of replaced weights, and their bf16 copies."""
        del self._running[weights]
        torch.clear_autocast_cache()


def _deliver(events: list[tuple[Job, SampledToken | None]]) -> None:
    for job, drawn in events:
        job.drawn.put_nowait((job.index, drawn))
