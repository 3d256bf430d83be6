"""From documents to shards: one task per shard of a plan.

1. `preparation.start` makes the directory ready for a plan's tasks.
2. With `dedupe`, `hash_task` writes hashes of a task's documents; `find_duplicates` marks those to skip.
3. `run_task` tokenizes a task, writes at most one shard per split, then records its result, so that no
   finished task runs twice.
4. `preparation.finish` collects the results into the manifest, which it writes last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raytrain_gpt.data.documents import BadDocuments, Document, read_documents
from raytrain_gpt.data.duplicates import HASH_BYTES, hash_texts
from raytrain_gpt.data.imports import read_ids
from raytrain_gpt.data.preparation import read_result, task_file, write_result
from raytrain_gpt.data.prepare_plan import Plan
from raytrain_gpt.data.shards import SPLITS, ShardWriter, Split
from raytrain_gpt.data.tokenizer import Tokenizer, token_dtype
from raytrain_gpt.data.tokenizer_file import read_tokenizer
from raytrain_gpt.errors import DataError
from raytrain_gpt.storage.location import Location, LocationLike


def _documents(plan: Plan, task: int, bad: BadDocuments) -> Iterator[tuple[int, Document]]:
    """Yield (index in `pieces`, document) of a task."""
    for i in range(*plan.tasks[task]):
        piece, separator = plan.pieces[i], plan.document_separator
        for document in read_documents(piece, plan.text_field, bad, separator):
            yield i, document


def hash_task(directory: LocationLike, plan: Plan, task: int, max_bad_documents: int = 0) -> int:
    """Write the hashes of a task's documents unless they exist; returns their number. Raises DataError."""
    file = task_file(directory, task, ".hashes")
    if not file.exists() or file.size_bytes() % HASH_BYTES:
        documents = _documents(plan, task, BadDocuments(max_bad_documents))
        file.write_bytes(hash_texts(document.text for _, document in documents))
    return file.size_bytes() // HASH_BYTES


def run_task(
    directory: LocationLike,
    plan: Plan,
    task: int,
    max_bad_documents: int = 0,
    left_out: NDArray[np.bool_] | None = None,
) -> dict[str, Any]:
    """Write a task's shards unless they exist; returns the result as `write_result`, or raises a DataError.

    `left_out` is a mask of duplicates, bool (documents,).
    """
    directory = Location.of(directory)
    if (result := read_result(directory, task)) is not None:
        return result
    tokenizer = _tokenizer(directory, plan.vocab_hash)
    dtype = token_dtype(tokenizer.n_vocab)
    bad = BadDocuments(max_bad_documents)
    writers: dict[Split, ShardWriter] = {}
    try:
        if plan.pieces[0].ids is not None:
            runs = _imported(plan, task, tokenizer, bad)
        else:
            runs = _encoded(plan, task, tokenizer, bad, left_out)
        for run in runs:
            if run.split not in writers:
                path = directory / f"{run.split}-{task:05d}.parquet"
                writers[run.split] = ShardWriter(path, dtype, plan.row_group_tokens)
            writers[run.split].add(run.tokens, run.text_bytes, run.num_documents, run.token_bytes)
        shards = [writers[split].close(split) for split in SPLITS if split in writers]
    except BaseException:
        for writer in writers.values():
            writer.discard()
        raise
    num_duplicates = 0 if left_out is None else int(left_out.sum())
    return write_result(directory, task, shards, bad, num_duplicates)


@dataclass(frozen=True)
class _Tokens:
    """Token ids of a split, the bytes of their text and the number of documents that end in them."""

    split: Split
    tokens: NDArray[np.integer[Any]]
    text_bytes: int
    num_documents: int
    token_bytes: int | None = None


def _encoded(
    plan: Plan,
    task: int,
    tokenizer: Tokenizer,
    bad: BadDocuments,
    left_out: NDArray[np.bool_] | None,
) -> Iterator[_Tokens]:
    for number, (i, document) in enumerate(_documents(plan, task, bad)):
        if left_out is not None and left_out[number]:
            continue
        bad.noticed["empty"] += not document.text or document.text.isspace()
        for split, text in plan.split.parts(i, plan.pieces[i].name, document):
            try:
                tokens = tokenizer.encode_document(text)
            except DataError as error:
                bad.add(plan.pieces[i].location, f"document {document.position}", str(error))
                continue
            num_bytes = None if tokenizer.keeps_bytes else int(tokenizer.lengths[tokens].sum())
            yield _Tokens(split, tokens, len(text.encode()), 1, num_bytes)


def _imported(plan: Plan, task: int, tokenizer: Tokenizer, bad: BadDocuments) -> Iterator[_Tokens]:
    """Yield a task's token ids; ids after the last `eot` of a file also count as a document."""
    eot = tokenizer.eot_token
    num_bytes = tokenizer.lengths.astype(np.uint16)
    for i in range(*plan.tasks[task]):
        piece, last = plan.pieces[i], None
        for chunk in read_ids(piece, tokenizer):
            for split, ids in plan.split.id_parts(i, piece.name, chunk, eot):
                ended = int(np.count_nonzero(ids == eot))
                bad.noticed["ends"] += ended
                last = _Tokens(split, ids, int(num_bytes[ids].sum(dtype=np.int64)), ended)
                yield last
        following = [(other.location, other.start) for other in plan.pieces[i + 1 : i + 2]]
        is_files_last = (piece.location, piece.stop) not in following
        if is_files_last and last is not None and last.tokens[-1] != eot:
            yield _Tokens(last.split, last.tokens[:0], 0, 1)


@lru_cache(maxsize=1)
def _tokenizer(directory: Location, _vocab_hash: str) -> Tokenizer:
    """Read a tokenizer, cached: building 50,000 tokens takes as long as tokenizing a megabyte."""
    return read_tokenizer(directory)
