"""`sample --batch`: continue the prompts of a file on a cluster.

1. Every line is read and checked, then grouped into tasks of `TASK_PROMPTS`.
2. A pool of actors, one per GPU or, without GPUs, per CPU, loads the checkpoint and processes tasks (Ray
   Data, streaming).
3. Results are written in the order of the tasks; the file appears when it is complete.

A task is one batch, and its random streams follow from its prompts' line numbers. So the file does not depend
on the number of actors of the same kind of machine.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from ray.data import ActorPoolStrategy, ExecutionOptions
from ray.exceptions import RayActorError

from raytrain_gpt.checkpoint.catalog import resolve_checkpoint
from raytrain_gpt.checkpoint.code_check import check_executable
from raytrain_gpt.cluster.capacity import Resources
from raytrain_gpt.cluster.connection import connected
from raytrain_gpt.cluster.failures import user_error_in
from raytrain_gpt.cluster.signals import StopSignals
from raytrain_gpt.config import kinds
from raytrain_gpt.config.call_options import SamplingOptions
from raytrain_gpt.config.code import Code
from raytrain_gpt.core.device import inference_autocast
from raytrain_gpt.core.generate import sample_tokens
from raytrain_gpt.data.locations import recorded
from raytrain_gpt.data.tokenizer import decode_tokens
from raytrain_gpt.errors import ClusterError, DataError, damage_as, failure_as
from raytrain_gpt.evaluate.inference import open_checkpoint, prompt_tokens, sampling_options
from raytrain_gpt.format import Log, amount, count, duration
from raytrain_gpt.storage.location import COMMAND_RETRY_S, Location, LocationLike

TASK_PROMPTS = 32
PROGRESS_EVERY_S = 2.0
ADDED = ("continuations", "finish_reasons")
"""Fields added to each line."""


def sample_batch(
    checkpoint: LocationLike,
    prompts: LocationLike,
    out: LocationLike,
    log: Log,
    *,
    num_samples: int,
    **options: Any,
) -> None:
    """Continue each prompt of a JSON lines file.

    Args:
        checkpoint: A checkpoint or a run.
        prompts: Lines `{"prompt": TEXT, …}`; empty lines are skipped.
        out: The same lines with `continuations` (texts without the prompt) and `finish_reasons` (`stop` or
            `length`); appears when it is complete.
        num_samples: Continuations per prompt, at least 1.
        options: Options of `sampling_options`.

    Raises:
        ConfigError: an option is out of range.
        DataError: the prompts are invalid, or `out` cannot be written.
        CheckpointError: there is no checkpoint, or it is damaged.
        ClusterError: the cluster has no free CPU.
        Interrupted: Ctrl+C or SIGTERM, before anything is written.
    """
    source, out = Location.of(prompts), Location.of(out)
    _check_out(out, source)
    lines = list(_prompt_lines(source))
    if not lines:
        raise DataError(f'{source} has no prompts; write lines {{"prompt": TEXT}}')
    resolved = resolve_checkpoint(Location.of(checkpoint, retry_for_s=COMMAND_RETRY_S), log)
    check_executable(resolved)
    sampling = sampling_options(recorded(resolved.state.config, str(resolved.path)), options)
    stopped = StopSignals(f"interrupted; {out} was not written")
    with stopped, connected(0, log) as resources:
        results = _results(
            lines, resources, log, (resolved.path, num_samples, sampling, kinds.used_code())
        )
        _write(out, results, len(lines), log)


def _check_out(out: Location, source: Location) -> None:
    """Fail before the work rather than when the result is written."""
    if out == source:
        raise DataError(f"--out is the same file as --batch, {source}; choose another --out")
    if not out.is_local:
        out.exists()  # raises if the store refuses access or the bucket does not exist
        return
    with failure_as(DataError, f"cannot write {out}"):
        out.parent.mkdir()
    if out.path.is_dir() or not os.access(out.parent.path, os.W_OK):
        why = "it is a directory" if out.path.is_dir() else "its directory is read-only"
        raise DataError(f"cannot write {out}: {why}; choose another --out")


def _prompt_lines(source: Location) -> Iterator[str]:
    """Yield the lines with prompts; raises a DataError for the first invalid one."""
    with damage_as(DataError, source):
        content = source.read_bytes()
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            text = line.decode("utf-8")
            why = _wrong(json.loads(text))
        except UnicodeDecodeError:
            why = "not UTF-8"
        except (ValueError, RecursionError):
            why = "not JSON"
        if why:
            raise DataError(f'{source} line {number}: {why}; write {{"prompt": TEXT, …}}')
        yield text


def _wrong(content: object) -> str | None:
    """Return the problem with the content of a line, or None."""
    if not isinstance(content, dict):
        return f"{type(content).__name__} instead of an object"
    if not isinstance(content.get("prompt"), str):
        return "no text in field prompt"
    taken = [name for name in ADDED if name in content]
    return f"field {taken[0]} would be overwritten" if taken else None


def _results(
    lines: list[str], resources: Resources, log: Log, generator: tuple[Any, ...]
) -> Iterator[dict[str, Any]]:
    """Yield the result of each task in order; tasks of a dead actor are run again."""
    tasks = [
        {"first": first, "lines": lines[first : first + TASK_PROMPTS]}
        for first in range(0, len(lines), TASK_PROMPTS)
    ]
    gpus = 1 if resources.gpus else 0
    replicas = min(resources.places(1, gpus), len(tasks))
    if not replicas:
        raise ClusterError("the cluster has no CPU; use one with at least 1")
    log(f"{count(len(lines), 'prompt')} | replicas: {replicas}, one per {'GPU' if gpus else 'CPU'}")
    done = 0
    while done < len(tasks):
        done_before = done
        try:
            for result in _mapped(tasks[done:], replicas, gpus, generator):
                done += 1
                yield result
        except RayActorError:
            if done == done_before:
                raise
            log(f"a replica died; running {len(tasks) - done} of {len(tasks)} tasks again")
        except Exception as error:
            raise user_error_in(error) or error from None


def _mapped(
    tasks: list[dict[str, Any]], replicas: int, gpus: int, generator: tuple[Any, ...]
) -> Iterator[dict[str, Any]]:
    """Yield results of a pool of actors in the order of the tasks, until an actor dies."""
    with warnings.catch_warnings():
        # Without max_restarts=0, a deprecated argument, Ray warns on stderr that it may not be able to
        # restart dead actors (ray-project/ray#57733).
        warnings.filterwarnings("ignore", "`ray_remote_args` is deprecated")
        dataset = ray.data.from_items(tasks, override_num_blocks=len(tasks)).map(
            Generator,
            fn_constructor_args=generator,
            # min_size 1: if CPUs are taken, start with as many actors as fit.
            compute=ActorPoolStrategy(min_size=1, initial_size=replicas, max_size=replicas),
            num_cpus=1,
            num_gpus=gpus,
            max_restarts=0,
        )
    dataset.context.execution_options = ExecutionOptions(preserve_order=True)
    yield from dataset.iter_rows()


class Generator:
    """Actor that loads a checkpoint once and continues the prompts of tasks."""

    def __init__(
        self, checkpoint: Location, num_samples: int, options: SamplingOptions, code: Code | None
    ) -> None:
        kinds.use(code)
        _, _, self._model, self._tokenizer, device = open_checkpoint(checkpoint)
        if device.type == "cpu":
            torch.set_num_threads(1)
        self._num_samples, self._options = num_samples, options

    def __call__(self, task: dict[str, Any]) -> dict[str, Any]:
        """Return the lines of a task with their continuations, and counts for the console."""
        rows = [json.loads(line) for line in task["lines"]]
        prompts = [prompt_tokens(self._tokenizer, row["prompt"]) for row in rows]
        num = self._num_samples
        with inference_autocast(self._model.device):
            samples = sample_tokens(
                self._model,
                self._tokenizer.eot_token,
                [prompt for prompt in prompts for _ in range(num)],
                self._options,
                first_stream=int(task["first"]) * num,
            )
        for i, row in enumerate(rows):
            of_prompt = samples[i * num : (i + 1) * num]
            texts = [decode_tokens(self._tokenizer, sample.tokens) for sample in of_prompt]
            reasons = [sample.finish_reason for sample in of_prompt]
            row |= dict(zip(ADDED, (texts, reasons), strict=True))
        seq_len = self._model.shape.seq_len
        return {
            "lines": [json.dumps(row) for row in rows],
            "num_tokens": sum(len(sample.tokens) for sample in samples),
            "num_cut": sum(len(prompt) > seq_len for prompt in prompts),
            "seq_len": seq_len,
        }


def _write(out: Location, results: Iterator[dict[str, Any]], num_prompts: int, log: Log) -> None:
    """Write all results to a temporary file, then upload or move it to `out`."""
    disk_errors = partial(failure_as, DataError, f"cannot write {out}")
    started = shown = time.monotonic()
    done = tokens = cut = seq_len = 0
    with tempfile.TemporaryDirectory(prefix="raytrain-gpt-") as directory:
        unfinished = Path(directory, "out.jsonl")
        for result in results:
            with disk_errors(), unfinished.open("a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in result["lines"])
            done += len(result["lines"])
            tokens, cut = tokens + result["num_tokens"], cut + result["num_cut"]
            seq_len, now = result["seq_len"], time.monotonic()
            if now - shown >= PROGRESS_EVERY_S and done < num_prompts:
                shown, eta = now, (num_prompts - done) * (now - started) / done
                log(f"{done}/{num_prompts} prompts | {amount(tokens)} tokens | eta {duration(eta)}")
        with disk_errors():
            out.upload(unfinished)
    if cut:
        log(
            f"cut {count(cut, 'prompt')} longer than {count(seq_len, 'token')} to the last {seq_len}"
        )
    log(f"{count(done, 'prompt')}, {amount(tokens)} tokens generated: {out}")
