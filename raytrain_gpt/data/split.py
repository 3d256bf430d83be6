"""The train/val split: a rule derived from the sources before tokenization.

Files named for a split stay in it. Token ids are split like text: documents end at `eot`, and those that
cross a chunk boundary are trained on.
"""

from __future__ import annotations

import hashlib
import heapq
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from raytrain_gpt.config.call_options import PrepareOptions
from raytrain_gpt.data.documents import Document, SourcePiece
from raytrain_gpt.data.imports import IdChunk, Ids
from raytrain_gpt.data.shards import Split
from raytrain_gpt.data.tokenizer import Tokenizer
from raytrain_gpt.errors import DataError
from raytrain_gpt.format import Log, count

_TAIL_SPLIT_DOCUMENTS = 100
"""With fewer documents, the val split is the tail of the text."""
_VAL_FRACTION = 0.01
_MAX_BYTES_TO_LINE = 4096
"""Maximum distance of a cut from the start of its line, unless the share that is held out is larger."""
_EXACT_VAL_DOCUMENTS = 20
_LOOKED_AT_IDS = 2**28
"""Ids to search for documents; if they have hardly any, the data has no `eot`."""
_TRAIN_NAME = re.compile(r"(?<![a-z])(train|training)(?![a-z])", re.IGNORECASE)
_VAL_NAME = re.compile(r"(?<![a-z])(val|valid|validation|dev|test)(?![a-z])", re.IGNORECASE)

ReadDocuments = Callable[[SourcePiece], Iterator[Document]]
_ReadIds = Callable[[SourcePiece], Iterator[IdChunk]]


@dataclass(frozen=True)
class SplitRule:
    """The split of each document: by hash, by a cut in the sources, or by file name.

    Attributes:
        hash_below: Documents with a smaller 64-bit hash are held out.
        cut_piece: Index of the source chunk with the cut, or None without a cut.
        cut_position: Position in it of the document at the cut.
        cut_offset: Offset of the cut: for text in UTF-8 bytes of that document, for token ids in ids of the
            chunk.
        head_is_val: Hold out the text before the cut (`val_tokens`) instead of the text after it.
        by_name: Hold out files with a name such as `val.bin` or `valid.txt`.
    """

    hash_below: int = 0
    cut_piece: int | None = None
    cut_position: int = 0
    cut_offset: int = 0
    head_is_val: bool = False
    by_name: bool = False

    @property
    def _head_and_tail(self) -> tuple[Split, Split]:
        return ("val", "train") if self.head_is_val else ("train", "val")

    def parts(self, piece: int, name: str, document: Document) -> list[tuple[Split, str]]:
        """Return (split, text) of a document, two pairs at the cut."""
        if self.by_name:
            return [("val" if is_named_val(name) else "train", document.text)]
        if self.cut_piece is None:
            is_val = document_hash(name, document.position) < self.hash_below
            return [("val" if is_val else "train", document.text)]
        head, tail = self._head_and_tail
        here, cut = (piece, document.position), (self.cut_piece, self.cut_position)
        if here != cut or self.cut_offset == 0:
            return [(head if here < cut else tail, document.text)]
        text = document.text.encode()
        return [(head, text[: self.cut_offset].decode()), (tail, text[self.cut_offset :].decode())]

    def id_parts(self, piece: int, name: str, chunk: IdChunk, eot: int) -> list[tuple[Split, Ids]]:
        """Divide a chunk into non-empty (split, ids), in order."""
        ids = chunk.ids
        if self.by_name:
            parts: list[tuple[Split, Ids]] = [("val" if is_named_val(name) else "train", ids)]
        elif self.cut_piece is not None:
            cut = max(0, self.cut_offset - chunk.offset) if piece == self.cut_piece else 0
            cut = len(ids) if piece < self.cut_piece else cut
            head, tail = self._head_and_tail
            parts = [(head, ids[:cut]), (tail, ids[cut:])]
        else:
            parts, done = [], 0
            for start, stop in _complete_documents(chunk, eot):
                if _id_hash(chunk, start) < self.hash_below:
                    parts += [("train", ids[done:start]), ("val", ids[start:stop])]
                    done = stop
            parts.append(("train", ids[done:]))
        return [(split, split_ids) for split, split_ids in parts if len(split_ids)]


def document_hash(name: str, position: int) -> int:
    digest = hashlib.blake2b(f"{name}:{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def text_rule(
    pieces: list[SourcePiece],
    read: ReadDocuments,
    tokenizer: Tokenizer | None,
    options: PrepareOptions,
    log: Log,
) -> SplitRule:
    """Make the rule for text: by option, else by file names, else by _VAL_FRACTION.

    A fraction is exact for few documents, and by hash for many. `val_tokens` needs a tokenizer.
    """
    if options.val_tokens is not None:
        assert tokenizer is not None
        return _head_rule(pieces, read, tokenizer, options.val_tokens, log)
    # Every file is named for one split; `test` alone is in the names of many ordinary text files.
    kinds = {(bool(_TRAIN_NAME.search(piece.name)), is_named_val(piece.name)) for piece in pieces}
    if options.val_fraction is None and kinds == {(True, False), (False, True)}:
        return SplitRule(by_name=True)
    fraction = options.val_fraction or _VAL_FRACTION
    enough = max(_TAIL_SPLIT_DOCUMENTS, int(_EXACT_VAL_DOCUMENTS / fraction))
    hashes = []
    for piece in pieces:
        for document in read(piece):
            hashes.append(document_hash(piece.name, document.position))
            if len(hashes) > enough:
                return SplitRule(hash_below=int(fraction * 2**64))
    if len(hashes) >= _TAIL_SPLIT_DOCUMENTS:
        return _exact_rule(hashes, fraction)
    return _tail_rule(pieces, read, fraction)


def _exact_rule(hashes: list[int], fraction: float) -> SplitRule:
    num_val = max(1, round(fraction * len(hashes)))
    return SplitRule(hash_below=heapq.nsmallest(num_val, hashes)[-1] + 1)


def _tail_rule(pieces: list[SourcePiece], read: ReadDocuments, fraction: float) -> SplitRule:
    """Cut at the last newline before the final fraction of all text, or in a line if that is far away."""
    sizes = [
        (i, document.position, len(document.text.encode()))
        for i, piece in enumerate(pieces)
        for document in read(piece)
    ]
    total = sum(size for _, _, size in sizes)
    if total < 2:
        raise DataError(
            f"the sources have {total} bytes of text, too little for two splits; add text"
        )
    left = min(total - 1, max(1, int(total * (1 - fraction))))
    at, position, _ = sizes[0]
    for at, position, size in sizes:  # noqa: B007, ends at the document to cut
        if left < size:
            break
        left -= size
    cut = next(document for document in read(pieces[at]) if document.position == position)
    text = cut.text.encode()
    is_first = (at, position) == next((i, p) for i, p, size in sizes if size)
    offset = text.rfind(b"\n", 0, left) + 1
    if offset == 0 and is_first:
        offset = text.find(b"\n", left) + 1
    is_far = abs(left - offset) > max(_MAX_BYTES_TO_LINE, fraction * total)
    if is_far or (offset in (0, len(text)) and is_first):
        head = text[:left].decode(errors="ignore") or text.decode()[0]
        offset = len(head.encode())
        if offset == total:
            raise DataError("the sources have one character, too little for two splits; add text")
    return SplitRule(cut_piece=at, cut_position=position, cut_offset=offset)


def _head_rule(
    pieces: list[SourcePiece],
    read: ReadDocuments,
    tokenizer: Tokenizer,
    val_tokens: int,
    log: Log,
) -> SplitRule:
    """Hold out the first documents with `val_tokens` tokens in total; `log` receives the progress."""
    log(f"tokenizing up to val_tokens={val_tokens} on one core to find the end of the val split")
    tokens, documents = 0, 0
    for i, piece in enumerate(pieces):
        for document in read(piece):
            if tokens >= val_tokens:
                log(f"val split: {count(documents, 'document')}, {count(tokens, 'token')}")
                return SplitRule(cut_piece=i, cut_position=document.position, head_is_val=True)
            tokens += len(tokenizer.encode_document(document.text))
            documents += 1
    raise _nothing_to_train_on(val_tokens, tokens)


def _nothing_to_train_on(val_tokens: int, tokens: int) -> DataError:
    return DataError(
        f"val_tokens={val_tokens} leaves no document to train on (the sources have {tokens} tokens); "
        "set a smaller val_tokens or use val_fraction"
    )


def id_rule(
    pieces: list[SourcePiece], read: _ReadIds, eot: int, options: PrepareOptions
) -> SplitRule:
    """Make the rule for token ids: by option, else by file names, else by _VAL_FRACTION."""
    if options.val_tokens is not None:
        return _id_head_rule(pieces, read, eot, options.val_tokens)
    if options.val_fraction is None and len({is_named_val(piece.name) for piece in pieces}) == 2:
        next(read(pieces[0]), None)  # rejects ids of another tokenizer before any task starts
        return SplitRule(by_name=True)
    fraction = options.val_fraction or _VAL_FRACTION
    enough = max(_TAIL_SPLIT_DOCUMENTS, int(_EXACT_VAL_DOCUMENTS / fraction))
    hashes: list[int] = []
    counts: list[int] = []  # ids per source chunk
    num_ids = 0
    for piece in pieces:
        if num_ids > _LOOKED_AT_IDS:
            counts.append(piece.tokens)
            continue
        before = num_ids
        for chunk in read(piece):
            hashes += [_id_hash(chunk, start) for start, _ in _complete_documents(chunk, eot)]
            num_ids += len(chunk.ids)
            is_enough = num_ids > _LOOKED_AT_IDS and len(hashes) >= _TAIL_SPLIT_DOCUMENTS
            if len(hashes) > enough or is_enough:
                return SplitRule(hash_below=int(fraction * 2**64))
        counts.append(num_ids - before)
    if len(hashes) >= _TAIL_SPLIT_DOCUMENTS:
        return _exact_rule(hashes, fraction)
    return _id_tail_rule(counts, fraction)


def _id_tail_rule(counts: list[int], fraction: float) -> SplitRule:
    total = sum(counts)
    if total < 2:
        raise DataError(f"the sources have {total} token ids, too few for two splits; add some")
    left = min(total - 1, max(1, int(total * (1 - fraction))))
    at = 0
    while left > counts[at]:
        left -= counts[at]
        at += 1
    return SplitRule(cut_piece=at, cut_offset=left)


def _id_head_rule(
    pieces: list[SourcePiece], read: _ReadIds, eot: int, val_tokens: int
) -> SplitRule:
    """Hold out the first `val_tokens` ids, extended to the end of a document."""
    tokens = 0
    rule: SplitRule | None = None
    for i, piece in enumerate(pieces):
        for chunk in read(piece):
            if rule is not None:  # ids remain to train on
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
    """Whether a file name marks the val split, as in `val.bin` or `fineweb_val_000000.npy`."""
    return _VAL_NAME.search(name) is not None


def _complete_documents(chunk: IdChunk, eot: int) -> list[tuple[int, int]]:
    """Return [start, stop) of the documents that certainly start and end in a chunk."""
    stops = (np.flatnonzero(chunk.ids == eot) + 1).tolist()
    starts = [0, *stops] if chunk.opens else stops
    return list(zip(starts, stops if chunk.opens else stops[1:], strict=False))


def _id_hash(chunk: IdChunk, start: int) -> int:
    return document_hash(chunk.name, chunk.position + start * chunk.step)
