"""Which documents validate: a rule made from the sources alone, before anything is tokenized.

Token ids that were made elsewhere are dealt as text is, their documents being what `eot` ends. One of
which not all is in the same chunk trains.
"""

from __future__ import annotations

import hashlib
import heapq
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import tiktoken

from raytrain_gpt.data.documents import Document, SourcePiece
from raytrain_gpt.data.imports import IdChunk, Ids
from raytrain_gpt.data.shards import Split
from raytrain_gpt.data.tokenizer import encode_document
from raytrain_gpt.errors import DataError

TAIL_SPLIT_DOCUMENTS = 100
"""With fewer documents than this, the end of the text validates instead of whole documents."""
VAL_FRACTION = 0.01
_EXACT_VAL_DOCUMENTS = 20
_LOOKED_AT_IDS = 2**28
"""If there are hardly any documents in so many ids, these have no `eot`."""
_VAL_NAME = re.compile(r"(?<![a-z])(val|valid|validation|dev|test)(?![a-z])", re.IGNORECASE)

Read = Callable[[SourcePiece], Iterator[Document]]
"""Gives the documents of a piece."""
ReadIds = Callable[[SourcePiece], Iterator[IdChunk]]
"""Gives the ids of a piece."""


@dataclass(frozen=True)
class SplitRule:
    """Which split a document, or the part of it before and after a cut, belongs to.

    Attributes:
        hash_below: Validation is every document whose 64-bit hash is below this.
        cut_piece: Or the text is cut in the document of this piece …
        cut_position: … at this position …
        cut_offset: … before this byte of its UTF-8; 0: between documents.
            For token ids: in this piece, behind so many ids of it.
        head_is_val: The part before the cut validates (`val_tokens`), not the one behind it.
        by_name: Or files validate that are named for it.
    """

    hash_below: int = 0
    cut_piece: int | None = None
    cut_position: int = 0
    cut_offset: int = 0
    head_is_val: bool = False
    by_name: bool = False

    def parts(self, piece: int, name: str, document: Document) -> list[tuple[Split, str]]:
        """(split, text) of a document; two of them where it is cut."""
        if self.cut_piece is None:
            is_val = document_hash(name, document.position) < self.hash_below
            return [("val" if is_val else "train", document.text)]
        head: Split = "val" if self.head_is_val else "train"
        tail: Split = "train" if self.head_is_val else "val"
        here, cut = (piece, document.position), (self.cut_piece, self.cut_position)
        if here != cut or self.cut_offset == 0:
            return [(head if here < cut else tail, document.text)]
        text = document.text.encode("utf-8", "replace")
        before, behind = text[: self.cut_offset], text[self.cut_offset :]
        return [(head, before.decode()), (tail, behind.decode())]

    def id_parts(self, piece: int, name: str, chunk: IdChunk, eot: int) -> list[tuple[Split, Ids]]:
        """(split, ids) of all parts of a chunk, in their order; none is empty."""
        ids = chunk.ids
        if self.by_name:
            parts: list[tuple[Split, Ids]] = [("val" if is_named_val(name) else "train", ids)]
        elif self.cut_piece is not None:
            cut = max(0, self.cut_offset - chunk.offset) if piece == self.cut_piece else 0
            cut = len(ids) if piece < self.cut_piece else cut
            head: Split = "val" if self.head_is_val else "train"
            tail: Split = "train" if self.head_is_val else "val"
            parts = [(head, ids[:cut]), (tail, ids[cut:])]
        else:
            parts, done = [], 0
            for start, stop in _whole_documents(chunk, eot):
                if _id_hash(chunk, start) < self.hash_below:
                    parts += [("train", ids[done:start]), ("val", ids[start:stop])]
                    done = stop
            parts.append(("train", ids[done:]))
        return [(split, part) for split, part in parts if len(part)]


def document_hash(name: str, position: int) -> int:
    """64-bit hash that decides a document's split."""
    return int.from_bytes(
        hashlib.blake2b(f"{name}:{position}".encode(), digest_size=8).digest(), "big"
    )


def fraction_rule(pieces: list[SourcePiece], read: Read, fraction: float) -> SplitRule:
    """Few documents are counted and dealt exactly; many follow their hash."""
    enough = max(TAIL_SPLIT_DOCUMENTS, int(_EXACT_VAL_DOCUMENTS / fraction))
    hashes = []
    for piece in pieces:
        for document in read(piece):
            hashes.append(document_hash(piece.name, document.position))
            if len(hashes) > enough:
                return SplitRule(hash_below=int(fraction * 2**64))
    if len(hashes) >= TAIL_SPLIT_DOCUMENTS:
        num_val = max(1, round(fraction * len(hashes)))
        return SplitRule(hash_below=heapq.nsmallest(num_val, hashes)[-1] + 1)
    return _tail_rule(pieces, read, fraction)


def _tail_rule(pieces: list[SourcePiece], read: Read, fraction: float) -> SplitRule:
    """Cut at the line end nearest before the last fraction of all text."""
    sizes = [
        (i, document.position, len(document.text.encode("utf-8", "replace")))
        for i, piece in enumerate(pieces)
        for document in read(piece)
    ]
    total = sum(size for _, _, size in sizes)
    if total < 2:
        raise DataError(
            f"the sources give {total} bytes of text, too little for two splits; add text"
        )
    left = min(total - 1, max(1, int(total * (1 - fraction))))
    at, position, _ = sizes[0]
    for at, position, size in sizes:  # noqa: B007, the document where the loop ends is cut
        if left < size:
            break
        left -= size
    for document in read(pieces[at]):
        if document.position == position:
            text = document.text.encode("utf-8", "replace")
    is_first = (at, position) == next((i, p) for i, p, size in sizes if size)
    offset = text.rfind(b"\n", 0, left) + 1
    if offset == 0 and is_first:
        offset = text.find(b"\n", left) + 1
    if offset in (0, len(text)) and is_first:
        head = text[:left].decode(errors="ignore") or text.decode()[0]
        offset = len(head.encode())
        if offset == total:
            raise DataError("the sources hold one character, too little for two splits; add text")
    return SplitRule(cut_piece=at, cut_position=position, cut_offset=offset)


def head_rule(
    pieces: list[SourcePiece],
    read: Read,
    encoding: tiktoken.Encoding,
    val_tokens: int,
    log: Callable[[str], None] | None = None,
) -> SplitRule:
    """The first documents, until they have `val_tokens` tokens, validate; `log` hears of the counting."""
    if val_tokens < 1:
        raise _too_few_val_tokens(val_tokens)
    if log:
        log(f"tokenizing up to val_tokens={val_tokens} on one core, to find what validates")
    started, tokens, documents = time.monotonic(), 0, 0
    for i, piece in enumerate(pieces):
        for document in read(piece):
            if tokens >= val_tokens:
                if log:
                    seconds = time.monotonic() - started
                    log(
                        f"{documents} documents with {tokens} tokens validate, found in {seconds:.1f} s"
                    )
                return SplitRule(cut_piece=i, cut_position=document.position, head_is_val=True)
            tokens += len(encode_document(encoding, document.text))
            documents += 1
    raise _nothing_to_train_on(val_tokens, tokens)


def _too_few_val_tokens(val_tokens: int) -> DataError:
    return DataError(f"val_tokens={val_tokens} is below 1; set it to what validation should read")


def _nothing_to_train_on(val_tokens: int, tokens: int) -> DataError:
    return DataError(
        f"val_tokens={val_tokens} leaves no document to train on (the sources give {tokens} tokens); "
        "set a smaller val_tokens, or use val_fraction"
    )


def id_rule(
    pieces: list[SourcePiece],
    read: ReadIds,
    eot: int,
    val_fraction: float | None,
    val_tokens: int | None,
) -> SplitRule:
    """The rule for token ids: as asked for, else as the files are named, else VAL_FRACTION."""
    if val_tokens is not None:
        return _id_head_rule(pieces, read, eot, val_tokens)
    if val_fraction is None and len({is_named_val(piece.name) for piece in pieces}) == 2:
        return SplitRule(by_name=True)
    fraction = VAL_FRACTION if val_fraction is None else val_fraction
    enough = max(TAIL_SPLIT_DOCUMENTS, int(_EXACT_VAL_DOCUMENTS / fraction))
    hashes: list[int] = []
    counts: list[int] = []
    num_ids = 0
    for piece in pieces:
        if num_ids > _LOOKED_AT_IDS:
            counts.append(piece.tokens)
            continue
        before = num_ids
        for chunk in read(piece):
            hashes += [_id_hash(chunk, start) for start, _ in _whole_documents(chunk, eot)]
            num_ids += len(chunk.ids)
            is_enough = num_ids > _LOOKED_AT_IDS and len(hashes) >= TAIL_SPLIT_DOCUMENTS
            if len(hashes) > enough or is_enough:
                return SplitRule(hash_below=int(fraction * 2**64))
        counts.append(num_ids - before)
    if len(hashes) >= TAIL_SPLIT_DOCUMENTS:
        num_val = max(1, round(fraction * len(hashes)))
        return SplitRule(hash_below=heapq.nsmallest(num_val, hashes)[-1] + 1)
    return _id_tail_rule(counts, fraction)


def _id_tail_rule(counts: list[int], fraction: float) -> SplitRule:
    """The last fraction of all ids validates; `counts` has the ids of each piece."""
    total = sum(counts)
    if total < 2:
        raise DataError(f"the sources hold {total} token ids, too little for two splits; add some")
    left = min(total - 1, max(1, int(total * (1 - fraction))))
    at = 0
    while left > counts[at]:
        left -= counts[at]
        at += 1
    return SplitRule(cut_piece=at, cut_offset=left)


def _id_head_rule(pieces: list[SourcePiece], read: ReadIds, eot: int, val_tokens: int) -> SplitRule:
    """The first `val_tokens` ids validate, and what is left of their last document."""
    if val_tokens < 1:
        raise _too_few_val_tokens(val_tokens)
    tokens = 0
    rule: SplitRule | None = None
    for i, piece in enumerate(pieces):
        for chunk in read(piece):
            if rule is not None:  # there is something left to train on
                return rule
            cut = val_tokens - tokens
            if cut <= len(chunk.ids):
                ends = np.flatnonzero(chunk.ids[cut - 1 :] == eot)
                cut += int(ends[0]) if len(ends) else 0
                rule = SplitRule(cut_piece=i, cut_offset=chunk.offset + cut, head_is_val=True)
                if cut < len(chunk.ids):
                    return rule
            tokens += len(chunk.ids)
    raise _nothing_to_train_on(val_tokens, tokens)


def is_named_val(name: str) -> bool:
    """Whether a file is named for validation, as `val.bin` or `fineweb_val_000000.npy`."""
    return _VAL_NAME.search(name) is not None


def _whole_documents(chunk: IdChunk, eot: int) -> list[tuple[int, int]]:
    """[start, stop) of those that end in a chunk and, as far as can be seen, begin in it."""
    stops = (np.flatnonzero(chunk.ids == eot) + 1).tolist()
    starts = [0, *stops] if chunk.opens else stops
    return list(zip(starts, stops if chunk.opens else stops[1:], strict=False))


def _id_hash(chunk: IdChunk, start: int) -> int:
    return document_hash(chunk.name, chunk.position + start * chunk.step)
