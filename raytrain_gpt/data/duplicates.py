"""Exact duplicates: documents whose text equals that of an earlier one in source order.

A first pass over the text writes a 128-bit hash of every document, one file per task. Only these files
decide which documents are dropped, so workers may write them in any order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from raytrain_gpt.data.documents import Document, SourcePiece
from raytrain_gpt.format import Log
from raytrain_gpt.storage.location import Location

_PART_HASHES = 2**23
"""Hashes per comparison, at about 70 bytes each: 0.6 GB."""
HASH_BYTES = 16
_HASH = np.dtype([("high", "<u8"), ("low", "<u8")])
_READS_AT_ONCE = 16


def hash_texts(texts: Iterable[str]) -> bytes:
    """Concatenate 16-byte hashes of the texts."""
    return b"".join(
        hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=HASH_BYTES).digest()
        for text in texts
    )


def only_first(
    read: Callable[[SourcePiece], Iterator[Document]],
) -> Callable[[SourcePiece], Iterator[Document]]:
    """Wrap `read` to drop duplicates of earlier documents, also when a chunk is read repeatedly.

    It keeps a hash per document in memory, so use it only for the documents that decide the split.
    """
    first: dict[bytes, tuple[int, int]] = {}

    def read_first(piece: SourcePiece) -> Iterator[Document]:
        for document in read(piece):
            # By identity: a file that is listed twice has equal chunks.
            key = (id(piece), document.position)
            if first.setdefault(hash_texts([document.text]), key) == key:
                yield document

    return read_first


def find_duplicates(
    files: list[Location], part_hashes: int = _PART_HASHES, log: Log | None = None
) -> list[NDArray[np.bool_]]:
    """Mark documents that equal an earlier one: a bool (documents,) array per file.

    `files` have the hashes of each task, in source order. Memory: one byte per document, and about 70 for
    each of the `part_hashes` (approximately) compared in one pass over all files.
    """
    with ThreadPoolExecutor(_READS_AT_ONCE) as pool:
        counts = [size // HASH_BYTES for size in pool.map(Location.size_bytes, files)]
        starts = np.cumsum([0, *counts])
        is_duplicate = np.zeros(starts[-1], np.bool_)
        num_passes = max(1, -(-int(starts[-1]) // part_hashes))
        for number in range(num_passes):
            if log is not None and num_passes > 1:
                log(f"comparing {starts[-1]} hashes: pass {number + 1} of {num_passes}")

            def select(
                file: Location, start: int, number: int = number
            ) -> tuple[NDArray[np.void], NDArray[np.int64]]:
                hashes = np.frombuffer(file.read_bytes(), _HASH)
                at = np.flatnonzero(hashes["high"] % num_passes == number)
                return hashes[at], at + start

            selected = list(pool.map(select, files, starts[:-1].tolist()))
            hashes = np.concatenate([hashes for hashes, _ in selected])
            documents = np.concatenate([documents for _, documents in selected])
            # Stable: equal hashes stay in source order.
            order = np.lexsort((hashes["low"], hashes["high"]))
            hashes, documents = hashes[order], documents[order]
            is_duplicate[documents[1:][hashes[1:] == hashes[:-1]]] = True
    return np.split(is_duplicate, starts[1:-1])
