"""Exact duplicates: of documents with the same text, only the first in source order is kept.

A first pass over the text writes a 128-bit hash of every document, one file per task. These files alone
decide which documents are dropped, whoever wrote them and in whichever order.
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

PART_HASHES = 2**23
"""Hashes compared at a time, with about 70 bytes of memory each: 0.6 GB."""
HASH_BYTES = 16
_HASH = np.dtype([("high", "<u8"), ("low", "<u8")])
_READS_AT_ONCE = 16


def hash_texts(texts: Iterable[str]) -> bytes:
    """16 bytes for each text."""
    return b"".join(
        hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=HASH_BYTES).digest()
        for text in texts
    )


def only_first(
    read: Callable[[SourcePiece], Iterator[Document]],
) -> Callable[[SourcePiece], Iterator[Document]]:
    """A `read` that drops duplicates of earlier documents, however often a piece is read.

    It keeps a hash of every document in memory: meant for the documents that decide the split.
    """
    first: dict[bytes, tuple[int, int]] = {}

    def read_first(piece: SourcePiece) -> Iterator[Document]:
        for document in read(piece):
            # By identity: a file that is listed twice has equal pieces.
            place = (id(piece), document.position)
            if first.setdefault(hash_texts([document.text]), place) == place:
                yield document

    return read_first


def find_duplicates(
    files: list[Location], part_hashes: int = PART_HASHES, log: Log | None = None
) -> list[NDArray[np.bool_]]:
    """Which documents are equal to an earlier one; for each file bool (documents,).

    Takes one byte of memory for each document, and about 70 for each hash compared at a time.

    Args:
        files: The hashes of each task, in source order.
        part_hashes: Hashes compared at a time, roughly; each part is a pass over all files.
    """
    with ThreadPoolExecutor(_READS_AT_ONCE) as pool:
        counts = [size // HASH_BYTES for size in pool.map(Location.size_bytes, files)]
        starts = np.cumsum([0, *counts])
        is_duplicate = np.zeros(starts[-1], np.bool_)
        num_parts = max(1, -(-int(starts[-1]) // part_hashes))
        for part in range(num_parts):
            if log is not None and num_parts > 1:
                log(f"comparing {starts[-1]} hashes: pass {part + 1} of {num_parts}")

            def hashes_in_part(
                file: Location, start: int, part: int = part
            ) -> tuple[NDArray[np.void], NDArray[np.int64]]:
                hashes = np.frombuffer(file.read_bytes(), _HASH)
                at = np.flatnonzero(hashes["high"] % num_parts == part)
                return hashes[at], at + start

            found = list(pool.map(hashes_in_part, files, starts[:-1].tolist()))
            hashes = np.concatenate([hashes for hashes, _ in found])
            documents = np.concatenate([documents for _, documents in found])
            order = np.lexsort((hashes["low"], hashes["high"]))  # stable: source order in a group
            hashes, documents = hashes[order], documents[order]
            is_duplicate[documents[1:][hashes[1:] == hashes[:-1]]] = True
    return np.split(is_duplicate, starts[1:-1])
