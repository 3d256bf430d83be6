"""The directory of a preparation, from its first task to the finished dataset.

    <dataset>/unfinished/plan         hash of the plan
    <dataset>/unfinished/00000.hashes hashes of a task's documents, with `dedupe`
    <dataset>/unfinished/00000.json   result of a task; valid only while its shards exist

`finish` writes the manifest last, so that it never vouches for missing data.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from raytrain_gpt.data.documents import BAD_FILE, BadDocuments
from raytrain_gpt.data.prepare_plan import Plan
from raytrain_gpt.data.shards import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    SPLITS,
    Manifest,
    Shard,
    read_manifest,
    write_manifest,
)
from raytrain_gpt.data.tokenizer import Tokenizer, token_dtype
from raytrain_gpt.data.tokenizer_file import read_tokenizer
from raytrain_gpt.data.verify import check_shards, check_tokenizer
from raytrain_gpt.errors import DataError
from raytrain_gpt.format import count, preview
from raytrain_gpt.parsing import parse_json
from raytrain_gpt.storage.location import UNFINISHED, Location, LocationLike

_NOTES_DIR = "unfinished"
_PLAN_FILE = "plan"
_UNFINISHED_SHARD = re.compile(
    rf"(train|val)-\d{{5,}}\.parquet\.[0-9a-f]{{8}}{re.escape(UNFINISHED)}"
)


def task_file(directory: LocationLike, task: int, suffix: Literal[".hashes", ".json"]) -> Location:
    return Location.of(directory) / _NOTES_DIR / f"{task:05d}{suffix}"


def read_result(directory: LocationLike, task: int) -> dict[str, Any] | None:
    """Read what `write_result` returned for a task, or None if the task must run."""
    directory = Location.of(directory)
    try:
        result: dict[str, Any] = parse_json(task_file(directory, task, ".json").read_bytes())
        shards = [Shard.model_validate(shard) for shard in result["shards"]]
        sizes = [(directory / shard.path).size_bytes() for shard in shards]
        is_done = result["task"] == task and sizes == [shard.file_bytes for shard in shards]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None  # not done, truncated by a crash, or damaged
    return result if is_done else None


def write_result(
    directory: LocationLike, task: int, shards: list[Shard], bad: BadDocuments, num_duplicates: int
) -> dict[str, Any]:
    """Record a finished task, after its last shard.

    Returns `task`, `documents`, `tokens` and `text_bytes` written, manifest entries `shards`, facts of the
    `bad` documents and the number of `duplicates`.
    """
    result = {
        "task": task,
        "documents": sum(shard.documents for shard in shards),
        "tokens": sum(shard.tokens for shard in shards),
        "text_bytes": sum(shard.text_bytes for shard in shards),
        "shards": [shard.model_dump() for shard in shards],
        "bad": bad.facts(),
        "duplicates": num_duplicates,
    }
    task_file(directory, task, ".json").write_text(json.dumps(result))
    return result


def prepared_tokenizer(directory: LocationLike, plan: Plan, name: str) -> Tokenizer | None:
    """Return the tokenizer of this name that an earlier preparation trained for the same plan, or None.

    The recorded hash of that plan includes the tokenizer's, so another one does not match.
    """
    directory = Location.of(directory)
    try:
        tokenizer = read_tokenizer(directory)
        if (directory / MANIFEST_FILE).exists():
            recorded = read_manifest(directory).source.get("plan_hash")
        else:
            recorded = (directory / _NOTES_DIR / _PLAN_FILE).read_bytes().decode(errors="replace")
    except (DataError, FileNotFoundError):
        return None
    is_same = replace(plan, vocab_hash=tokenizer.hash).hash == recorded
    return tokenizer if is_same and tokenizer.name == name else None


def start(directory: LocationLike, plan: Plan, tokenizer: Tokenizer) -> Manifest | None:
    """Make the directory ready for the tasks; returns the manifest if the dataset is finished, else None.

    Results of an interrupted preparation with the same plan are reused.

    Raises:
        DataError: the directory contains another or a damaged dataset, or other files.
    """
    directory = Location.of(directory)
    if (directory / MANIFEST_FILE).exists():
        manifest = read_manifest(directory)
        if manifest.source.get("plan_hash") != plan.hash:
            raise DataError(
                f"{directory} already contains another dataset; choose another --out or remove it"
            )
        check_tokenizer(directory, manifest)
        check_shards(directory, manifest, content=False)
        return manifest
    plan_file = directory / _NOTES_DIR / _PLAN_FILE
    if plan_file.is_file():
        if plan_file.read_bytes() != plan.hash.encode():
            raise DataError(
                f"{directory} has an unfinished preparation of other sources or options; choose another "
                "--out or remove it"
            )
    elif any(not name.startswith(".") for name in directory.names()):
        raise DataError(
            f"{directory} is not empty and not a dataset; choose another --out or empty it"
        )
    plan_file.write_text(plan.hash)
    for name, text in tokenizer.files.items():
        (directory / name).write_text(text)
    return None


def notices(plan: Plan, results: list[dict[str, Any]]) -> Iterator[str]:
    """Say what is odd in the results of all tasks, and how many files were read."""
    noticed, separator = Counter[str](), plan.document_separator
    for result in results:
        noticed.update({"documents": result["documents"], **result["bad"].get("noticed", {})})
    documents, empty = noticed["documents"], noticed["empty"]
    if plan.pieces[0].ids is not None and not noticed["ends"]:
        yield (
            "no document has an end: no id is the one that ends documents, so rows and files run into each "
            "other; add it to each document and prepare again"
        )
    if separator is not None and not noticed["separators"]:
        yield (
            f"document_separator {preview(separator, 40)} is in no text file, so each is one document; check "
            f"its spelling, and write newlines as $'\\n\\n'"
        )
    if 20 * empty > documents:
        yield f"{empty / documents:.0%} of {documents} documents are empty: is each a line?"
    files = count(len({piece.location for piece in plan.pieces}), "file")
    found = "" if separator is None else f", {count(noticed['separators'], 'separator')} found"
    yield f"read {files}, skipped {plan.num_skipped}{found}"


def finish(
    directory: LocationLike,
    plan: Plan,
    results: list[dict[str, Any]],
    source: dict[str, Any],
    max_bad_documents: int = 0,
) -> Manifest:
    """Write the report of bad documents, then the manifest, which completes the dataset.

    Raises a DataError if a split is empty, or too many documents could not be read.
    """
    directory = Location.of(directory)
    tokenizer = read_tokenizer(directory)
    results = sorted(results, key=lambda result: int(result["task"]))
    bad = BadDocuments(max_bad_documents)
    for result in results:
        bad.merge(result["bad"])
    skipped = {"bad_documents": bad.count}
    if plan.dedupe:
        skipped["duplicates"] = sum(result["duplicates"] for result in results)
    shards = [Shard.model_validate(shard) for result in results for shard in result["shards"]]
    for split in SPLITS:
        if not any(shard.split == split for shard in shards):
            raise DataError(
                f"the {split} split of {directory} would be empty; change val_fraction or add text"
            )
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        tokenizer=tokenizer.name,
        vocab_hash=plan.vocab_hash,
        vocab_size=tokenizer.n_vocab,
        eot_token=tokenizer.eot_token,
        dtype=token_dtype(tokenizer.n_vocab),
        row_group_tokens=plan.row_group_tokens,
        shards=tuple(sorted(shards, key=lambda shard: (SPLITS.index(shard.split), shard.path))),
        source={**source, **skipped, **plan.commits, "plan_hash": plan.hash},
    )
    if bad.count:
        report = "".join(json.dumps(one) + "\n" for one in bad.kept)
        (directory / BAD_FILE).write_text(report)
    for name in directory.names():
        if _UNFINISHED_SHARD.fullmatch(name):  # of a killed task
            (directory / name).remove()
    write_manifest(directory, manifest)
    (directory / _NOTES_DIR).remove()
    return manifest
