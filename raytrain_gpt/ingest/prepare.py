"""`prepare`: text to token shards, as streaming Ray Data tasks on all CPUs of the cluster.

The same tasks prepare small text in this process, faster than a cluster would start. With `dedupe` the
text is read twice: the first pass hashes every document.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from raytrain_gpt.cluster.failures import user_error_in
from raytrain_gpt.config.call_options import PrepareOptions
from raytrain_gpt.data.duplicates import find_duplicates
from raytrain_gpt.data.preparation import finish, notices, prepared_tokenizer, start, task_file
from raytrain_gpt.data.prepare_plan import Plan, make_plan
from raytrain_gpt.data.shards import Manifest
from raytrain_gpt.data.tokenize import hash_task, run_task
from raytrain_gpt.data.tokenizer import Tokenizer
from raytrain_gpt.data.tokenizer_file import check_eot, open_tokenizer
from raytrain_gpt.errors import DataError, failure_as
from raytrain_gpt.format import Log, amount, count, duration
from raytrain_gpt.ingest.train_tokenizer import new_vocab_size, train_on_plan
from raytrain_gpt.storage.lease import LEASE_FILE, hold_lease
from raytrain_gpt.storage.location import Location, LocationLike

PROGRESS_EVERY_S = 2.0
SMALL_BYTES = 50_000_000
"""Text that one process tokenizes in seconds; a cluster takes ten to start and stop."""

Row = dict[str, Any]
_Mapper = Callable[[Callable[[Row], Row], list[Row]], Iterable[Row]]
"""`map`, or its equivalent on a cluster, in any order."""


def prepare(
    sources: list[str],
    directory: LocationLike,
    tokenizer: str,
    options: PrepareOptions,
    *,
    log: Log,
    in_process: bool = False,
) -> Manifest:
    """Tokenize sources into a dataset; the shards are the same with and without Ray, on any cluster.

    An interrupted preparation is completed.

    Args:
        sources: Files, directories or globs, local, in an object store or on the HF hub; or
            `stdlib`.
        directory: The dataset; every task needs write access to it.
        tokenizer: `bpe:VOCAB_SIZE` to train one on the training documents, or as in `open_tokenizer`.
        in_process: Run without Ray, which is the default below SMALL_BYTES of text unless RAY_ADDRESS
            names a cluster. A private cluster stops after the tasks.

    Raises:
        DataError: a source, the tokenizer or the directory cannot be used.
        ClusterError: the directory is in use, the storage refuses access, or Ray cannot be used.
        StorageError: the storage was unreachable for too long; finished shards are kept.
    """
    directory = Location.of(directory)
    plan, tokenizer_used = _plan_and_tokenizer(sources, directory, tokenizer, options, log)
    is_small = sum(piece.text_bytes for piece in plan.pieces) < SMALL_BYTES
    names_cluster = os.environ.get("RAY_ADDRESS", "local") not in ("", "local")
    on_ray = not in_process and (names_cluster or not is_small)
    run, cluster = _on_ray(log) if on_ray else (map, nullcontext())
    lease = directory.parent / f".{directory.name}{LEASE_FILE}"
    with _storage_errors(directory), hold_lease(lease, f"dataset {directory}", log):
        manifest = start(directory, plan, tokenizer_used)
        if manifest is not None:
            log(f"{directory} is already prepared")
            return manifest
        source: dict[str, Any] = {"sources": list(sources)}
        if options.val:
            source["val"] = options.val
        with cluster:  # after all checks: it takes ten seconds or more to start
            results = _run_tasks(directory, plan, options.max_bad_documents, run, log)
        manifest = finish(directory, plan, results, source, options.max_bad_documents)
        for line in notices(plan, results):
            log(line)
        return manifest


def _plan_and_tokenizer(
    sources: list[str], directory: Location, tokenizer: str, options: PrepareOptions, log: Log
) -> tuple[Plan, Tokenizer]:
    vocab_size = new_vocab_size(tokenizer)
    if vocab_size is None:
        opened = open_tokenizer(tokenizer, options.eot)
        return make_plan(sources, opened, options, log), opened
    check_eot(tokenizer, options.eot)
    plan = make_plan(sources, None, options, log)
    with _storage_errors(directory):
        found = prepared_tokenizer(directory, plan, tokenizer)
    trained = found or train_on_plan(plan, vocab_size, options, log)
    return replace(plan, vocab_hash=trained.hash), trained


def _run_tasks(
    directory: Location, plan: Plan, max_bad: int, run: _Mapper, log: Log
) -> list[dict[str, Any]]:
    """Run all tasks and log their progress."""
    rows: list[Row] = [{"task": task} for task in range(len(plan.tasks))]
    fixed: dict[str, Any] = {"directory": directory, "plan": plan, "max_bad": max_bad}
    if plan.dedupe:
        num_documents = sum(row["documents"] for row in run(partial(_hash_row, **fixed), rows))
        files = [task_file(directory, task, ".hashes") for task in range(len(plan.tasks))]
        duplicates = find_duplicates(files)
        for row, mask in zip(rows, duplicates, strict=True):
            row["duplicates"] = np.packbits(mask).tobytes()
        log(
            f"skipping {count(sum(int(mask.sum()) for mask in duplicates), 'duplicate')} among "
            f"{count(num_documents, 'document')}"
        )
    sizes = [sum(piece.text_bytes for piece in plan.pieces[slice(*task)]) for task in plan.tasks]
    total, done, documents, tokens = sum(sizes), 0, 0, 0
    started = shown = time.monotonic()
    results: list[dict[str, Any]] = []
    for row in run(partial(_task_row, **fixed), rows):
        results.append(row["result"])
        done += sizes[results[-1]["task"]]
        documents, tokens = documents + results[-1]["documents"], tokens + results[-1]["tokens"]
        now = time.monotonic()
        if now - shown >= PROGRESS_EVERY_S and 0 < done < total:
            shown, eta = now, duration((total - done) * (now - started) / done)
            log(f"prepare {done / total:4.0%} | {_amounts(documents, tokens)} | eta {eta}")
    log(f"prepare done in {duration(time.monotonic() - started)} | {_amounts(documents, tokens)}")
    return results


def _amounts(documents: int, tokens: int) -> str:
    return f"{amount(documents)} documents, {amount(tokens)} tokens"


def _on_ray(log: Log) -> tuple[_Mapper, AbstractContextManager[object]]:
    """Return Ray Data's `map`, which yields results as they finish, and a cluster for it."""
    import ray.data  # slow to import, and sets up a logger that `connected` silences

    from raytrain_gpt.cluster.connection import connected

    def run(function: Callable[[Row], Row], rows: list[Row]) -> Iterator[Row]:
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # a task's error is raised as well
        data = ray.data.from_items(rows, override_num_blocks=len(rows)).map(function)
        try:
            yield from data.iter_rows()
        except Exception as error:
            raise user_error_in(error) or error from None

    return run, connected(0, log)


def _hash_row(row: Row, directory: Location, plan: Plan, max_bad: int) -> Row:
    with _storage_errors(directory):
        return {**row, "documents": hash_task(directory, plan, row["task"], max_bad)}


def _task_row(row: Row, directory: Location, plan: Plan, max_bad: int) -> Row:
    duplicates = None
    if "duplicates" in row:  # padded with zeros
        duplicates = np.unpackbits(np.frombuffer(row["duplicates"], np.uint8)).astype(np.bool_)
    with _storage_errors(directory):
        return {"result": run_task(directory, plan, row["task"], max_bad, duplicates)}


def _storage_errors(directory: Location) -> AbstractContextManager[None]:
    advice = "; finished shards are kept: choose another --out, or free space and try again"
    return failure_as(DataError, f"cannot write {directory}", advice)
