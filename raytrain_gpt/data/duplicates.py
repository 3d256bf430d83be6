"""Exact duplicates: of documents with the same text, the first in source order stays.

A first pass over the text writes a 128-bit hash of every document, a file for each task. From these
files alone follows which documents go, whoever wrote them and in whichever order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from raytrain_gpt.data.documents import Document, Piece
from raytrain_gpt.storage.location import Location

PART_HASHES = 2**23
"""Hashes compared at a time; that takes about 70 bytes each, 0.6 GB."""
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
    read: Callable[[Piece], Iterator[Document]],
) -> Callable[[Piece], Iterator[Document]]:
    """A `read` that leaves out what is equal to a document read before, however often it reads a piece.

    It keeps a hash of every document, so it is for as many as decide the split, in source order.
    """
    first: dict[bytes, tuple[int, int]] = {}

    def read_first(piece: Piece) -> Iterator[Document]:
        for document in read(piece):
            # By the object: a file that is named twice has pieces that are equal.
            place = (id(piece), document.position)
            if first.setdefault(hash_texts([document.text]), place) == place:
                yield document

    return read_first


def find_duplicates(
    files: list[Location],
    part_hashes: int = PART_HASHES,
    log: Callable[[str], None] | None = None,
) -> list[NDArray[np.bool_]]:
    """Which documents are equal to an earlier one.

    Takes a byte of memory a document, and about 70 a hash compared at a time; every such part is a
    pass over all files.

    Args:
        files: The hashes of each task, in source order.
        part_hashes: Hashes compared at a time, about.
        log: Gets a line for each pass, if there is more than one.

    Returns:
        For each file: bool (documents,)
    """
    with ThreadPoolExecutor(_READS_AT_ONCE) as pool:
        counts = [size // HASH_BYTES for size in pool.map(Location.size_bytes, files)]
        starts = np.cumsum([0, *counts])
        is_duplicate = np.zeros(starts[-1], np.bool_)
        num_parts = max(1, -(-int(starts[-1]) // part_hashes))
        for part in range(num_parts):
            if log is not None and num_parts > 1:
                log(f"compare {starts[-1]} hashes: pass {part + 1} of {num_parts} over their files")

            def of_part(
                file: Location, start: int, part: int = part
            ) -> tuple[NDArray[np.void], NDArray[np.int64]]:
                hashes = np.frombuffer(file.read_bytes(), _HASH)
                at = np.flatnonzero(hashes["high"] % num_parts == part)
                return hashes[at], at + start

            found = list(pool.map(of_part, files, starts[:-1].tolist()))
            hashes = np.concatenate([hashes for hashes, _ in found])
            documents = np.concatenate([documents for _, documents in found])
            order = np.lexsort((hashes["low"], hashes["high"]))  # stable: source order in a group
            hashes, documents = hashes[order], documents[order]
            is_duplicate[documents[1:][hashes[1:] == hashes[:-1]]] = True
    return np.split(is_duplicate, starts[1:-1])
