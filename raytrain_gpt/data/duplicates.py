"""Exact duplicates: documents with the same text as an earlier one in source order.

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
from raytrain_gpt.storage.location import Location

HASH_BYTES = 16
_HASH = np.dtype([("high", "<u8"), ("low", "<u8")])
_READS_AT_ONCE = 16


def hash_texts(texts: Iterable[str]) -> bytes:
    """Concatenate 16-byte hashes of the texts."""
    return b"".join(
        hashlib.blake2b(text.encode(), digest_size=HASH_BYTES).digest() for text in texts
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
            # By identity: a file that is listed twice has the same chunks.
            key = (id(piece), document.position)
            if first.setdefault(hash_texts([document.text]), key) == key:
                yield document

    return read_first


def find_duplicates(files: list[Location]) -> list[NDArray[np.bool_]]:
    """Mark documents that duplicate an earlier one: a bool (documents,) array per file.

    `files` have the hashes of each task, in source order. Memory: about 70 bytes per document.
    """
    with ThreadPoolExecutor(_READS_AT_ONCE) as pool:
        parts = [np.frombuffer(content, _HASH) for content in pool.map(Location.read_bytes, files)]
    hashes = np.concatenate(parts)
    order = np.lexsort((hashes["low"], hashes["high"]))  # stable: duplicates stay in source order
    hashes = hashes[order]
    is_duplicate = np.zeros(len(hashes), np.bool_)
    is_duplicate[order[1:][hashes[1:] == hashes[:-1]]] = True
    return np.split(is_duplicate, np.cumsum([len(part) for part in parts])[:-1])
