"""`prepare`: text to token shards, as streaming Ray Data tasks on every CPU of the cluster."""

from __future__ import annotations

import errno
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import ray.data

from raytrain_gpt.data.shards import Manifest
from raytrain_gpt.data.storage import Location, Place
from raytrain_gpt.data.tokenize import Plan, finish, make_plan, run_task, start
from raytrain_gpt.data.tokenizer import load_tokenizer
from raytrain_gpt.errors import DataError
from raytrain_gpt.runtime.console import amount, duration
from raytrain_gpt.runtime.failures import user_error_in
from raytrain_gpt.runtime.lease import LEASE_FILE, held_lease

PROGRESS_EVERY_S = 2.0


def prepare(
    sources: list[str],
    directory: Place,
    tokenizer: str,
    *,
    log: Callable[[str], None],
    num_cpus: int | None = None,
    **options: Any,
) -> Manifest:
    """Tokenize sources into a dataset; the shards are the same for any number of workers.

    A preparation that was stopped goes on with what is not done yet.

    Args:
        sources: Files, directories or globs, local or in an object store, or `stdlib`.
        directory: Where the dataset goes; tasks write there themselves.
        tokenizer: A name.
        log: Gets progress lines.
        num_cpus: Tasks at a time; None: all CPUs of the cluster.
        options: Of `make_plan`: text_field, val_fraction, val_tokens, shard_tokens.

    Raises:
        DataError: a source, the tokenizer or the directory cannot be used.
        ClusterError: another process prepares there, or the storage refuses access.
        StorageError: the storage was out of reach for too long; what is done stays.
    """
    encoding = load_tokenizer(tokenizer)
    plan = make_plan(sources, encoding, **options)
    directory = Location.of(directory)
    lease = directory.parent / f".{directory.name}{LEASE_FILE}"
    try:
        with held_lease(lease, f"dataset {directory}", log):
            manifest = start(directory, plan, encoding)
            if manifest is not None:
                log(f"{directory} is already prepared")
                return manifest
            results = _run_tasks(directory, plan, num_cpus, log)
            return finish(directory, plan, results, {"sources": sources})
    except OSError as error:
        raise _storage_error(error, directory) from None


def _run_tasks(
    directory: Location, plan: Plan, num_cpus: int | None, log: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Results of all tasks, shown as they come."""
    rows = [{"task": task} for task in range(len(plan.tasks))]
    at_once = None if num_cpus is None else min(num_cpus, len(rows))
    done = ray.data.from_items(rows, override_num_blocks=len(rows)).map(
        partial(_task_row, directory=directory, plan=plan), concurrency=at_once
    )
    total = sum(piece.text_bytes for piece in plan.pieces)
    results, text_bytes, tokens = [], 0, 0
    started = shown = time.monotonic()
    try:
        for row in done.iter_rows():
            results.append(row["result"])
            text_bytes += row["result"]["text_bytes"]
            tokens += row["result"]["tokens"]
            now = time.monotonic()
            if now - shown >= PROGRESS_EVERY_S and text_bytes < total:
                shown, seconds = now, now - started
                eta = (total - text_bytes) * seconds / max(1, text_bytes)
                log(
                    f"prepare {text_bytes / total:4.0%} | {amount(tokens)} tokens | "
                    f"{amount(tokens / seconds)} tok/s | eta {duration(eta)}"
                )
    except Exception as error:
        raise user_error_in(error) or error from None
    return results


def _task_row(row: dict[str, int], directory: Location, plan: Plan) -> dict[str, Any]:
    try:
        return {"result": run_task(directory, plan, row["task"])}
    except OSError as error:
        raise _storage_error(error, directory) from None


def _storage_error(error: OSError, directory: Location) -> DataError:
    if error.errno == errno.ENOSPC:
        disk = str(directory) if directory.is_local else tempfile.gettempdir()
        free = shutil.disk_usage(disk).free
        return DataError(
            f"no space left for shards in {disk} ({free} bytes free); finished shards are kept: "
            "make room and run the same command again"
        )
    return DataError(f"cannot write {directory}: {error.strerror or error}; choose another --out")
