"""Documents of text in a chunk of a source file.

A document is a JSON line, a row of a `.parquet` file, or any other file, cut at separators if there are any.
JSON lines are known by suffix, or by a first line that is an object. A document's file name and its position
in that file (0, row or byte offset in the text) decide its split.
"""

from __future__ import annotations

import io
import json
import math
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raytrain_gpt.data.tokenizer import valid_text
from raytrain_gpt.errors import DataError, reason
from raytrain_gpt.format import count, listed
from raytrain_gpt.storage.location import Location

STDLIB = "stdlib"
_JSON_LINES = re.compile(r"\.(jsonl?|ndjson|jsonlines)(\.txt)?(\.gz|\.zst)?\Z", re.IGNORECASE)
BAD_FILE = "bad_documents.jsonl"
MAX_KEPT_BAD = 100
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_OBJECT = re.compile(rb'(\xef\xbb\xbf)?\s*\{[ \t]*"([^"\\]|\\.)*"[ \t]*:')
"""Start of an object of JSON, with its first field on the same line."""
_HEAD_BYTES = 2**12
"""First bytes of a file's text, which show what it contains."""
_ENCODINGS = {"<u4": "UTF-32LE", ">u4": "UTF-32BE", "<u2": "UTF-16LE", ">u2": "UTF-16BE"}
LFS_BYTES = 2**10
_NO_CONTENT = {
    rb"version https://git-lfs.github.com/spec/": "a Git LFS pointer; run git lfs pull",
    rb"/annex/objects/": "a git-annex pointer; run git annex get",
    rb"PK\x03\x04|WARC/|(?s:.{257})ustar": "an archive; unpack it",
}
"""Pattern of a file's first bytes -> what it is, and what to do."""
_READ_BYTES = 2**23
"""Size of a store request."""
_PARQUET_BATCH_ROWS = 1024


@dataclass(frozen=True)
class Document:
    """The text of a document, and its position in its file."""

    position: int
    text: str


@dataclass(frozen=True)
class SourcePiece:
    """A range of a source file that one task can read independently.

    Attributes:
        name: The file's path relative to its source.
        location: The file; `stdlib:` and a relative path for the standard library.
        start: First byte (`.jsonl`, `.bin`, `.npy`) or row group (`.parquet`); 0 for an undivided file.
        stop: The end in the same unit; for a compressed file its size.
        text_bytes: Approximate bytes of its text, or of the text of its ids.
        ids: Dtype (`.bin`, `.npy`) or column (`.parquet`) of token ids, or None for text.
        tokens: Number of ids, for parquet an upper bound; 0 for text.
        num_documents: Number of documents to read, from the start, or None for all.
    """

    name: str
    location: Location
    start: int
    stop: int
    text_bytes: int
    ids: str | None = None
    tokens: int = 0
    num_documents: int | None = None


class BadDocuments:
    """Unreadable documents of one pass over the text: counted and sampled, an error above a limit.

    A bad document is not UTF-8, not JSON, lacks a string in its text field, or cannot be encoded by the
    tokenizer. A damaged file is always an error.

    Args:
        limit: None for no limit.

    Attributes:
        noticed: Counts of what is no error: `empty` documents, `separators` found, `ends` of imported ones.
    """

    def __init__(self, limit: int | None = 0) -> None:
        self.limit = limit
        self.count = 0
        self.kept: list[dict[str, str]] = []
        self.noticed = Counter[str]()

    def add(self, path: Location, place: str, why: str) -> None:
        """Record a skipped document; raises a DataError above the limit."""
        bad = {"path": str(path), "place": place, "why": " ".join(why.split())}
        self.merge({"count": 1, "kept": [bad]})

    def merge(self, facts: dict[str, Any]) -> None:
        """Add the `facts` of another pass; raises a DataError if the sum is above the limit."""
        self.count += facts["count"]
        self.noticed.update(facts.get("noticed", {}))
        self.kept += facts["kept"][: MAX_KEPT_BAD - len(self.kept)]
        if self.limit is not None and self.count > self.limit:
            example = "{path} at {place}: {why}".format(**(facts["kept"] or self.kept)[0])
            raise DataError(
                f"{count(self.count, 'document')} cannot be read, more than max_bad_documents={self.limit}, "
                f"such as {example}; fix them, set --text_field or raise --max_bad_documents"
            )

    def facts(self) -> dict[str, Any]:
        """Return the count, the first ones and what was noticed, as JSON types."""
        return {"count": self.count, "kept": self.kept, "noticed": dict(self.noticed)}


@cache
def stdlib_root() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def read_documents(
    piece: SourcePiece,
    text_field: str,
    bad: BadDocuments | None = None,
    separator: str | None = None,
) -> Iterator[Document]:
    """Yield the documents of a chunk of text, in order.

    Args:
        text_field: Field of a JSON object, or column of a parquet file; `meta.text` is text in meta.
        bad: Collects unreadable documents; without it, the first one is an error.
        separator: As in `Plan`.

    Raises:
        DataError: more bad documents than the limit, or a damaged file; gives file and position.
    """
    bad = bad or BadDocuments()
    if piece.location.url.startswith(f"{STDLIB}:"):
        path = stdlib_root() / piece.location.url.removeprefix(f"{STDLIB}:")
        piece = replace(piece, location=Location.of(path))
    if piece.location.name.lower().endswith(".parquet"):
        documents = _parquet_documents(piece, text_field, bad)
    else:
        documents = _file_documents(piece, text_field, bad, separator)
    yield from islice(documents, piece.num_documents)


def refuse_lfs_pointer(path: Path | Location, head: bytes | None = None) -> None:
    """Raise a DataError if a file, which starts with `head`, is a pointer or an archive."""
    file = Location.of(path)
    if head is None:
        head = file.read_bytes() if file.size_bytes() < LFS_BYTES else b""
    for start, what in _NO_CONTENT.items():
        if re.match(start, head):
            raise DataError(f"{file} is {what}")


def _file_documents(
    piece: SourcePiece, text_field: str, bad: BadDocuments, separator: str | None
) -> Iterator[Document]:
    path = piece.location
    try:
        with _opened(path) as file:
            head = b"" if piece.start else file.peek(_HEAD_BYTES)[:_HEAD_BYTES]
            refuse_lfs_pointer(path, head)
            _refuse_encoding(path, head)
            if _JSON_LINES.search(path.name) or _OBJECT.match(head):
                yield from _jsonl_documents(file, piece, text_field, bad)
                return
            for position, content in _split(file, separator, bad):
                try:
                    yield Document(position, content.decode("utf-8"))
                except UnicodeDecodeError as error:
                    bad.add(path, f"byte {position + error.start}", "not UTF-8")
    except OSError as error:
        is_long = "too much memory" in str(error)
        advice = "decompress it: zstd -d --long=31" if is_long else "fix the file"
        raise DataError(f"cannot read {path}: {reason(error)}; {advice}") from None


def _refuse_encoding(path: Location, head: bytes) -> None:
    """Raise a DataError for UTF-16 and UTF-32, known by spaces and newlines in the first bytes."""
    for dtype, name in _ENCODINGS.items() if b"\0" in head else ():
        units = np.frombuffer(head, dtype, len(head) // int(dtype[2]))
        if np.isin(units, (10, 32)).sum() > len(head) // 1024:
            raise DataError(f"{path} is likely {name}; convert it: iconv -f {name} -t UTF-8")


def _split(
    file: io.BufferedReader, separator: str | None, bad: BadDocuments
) -> Iterator[tuple[int, bytes]]:
    """Yield (position, content) between separators, stripped of newlines; holds one document at a time."""
    if separator is None:
        yield 0, file.read()
        return
    mark = separator.encode("utf-8", "surrogateescape")  # a flag that is not UTF-8 has surrogates
    longest = len(mark) + mark.count(b"\n")
    # A carriage return before the first newline is stripped from the content.
    pattern = re.compile(re.escape(mark[:1]) + re.escape(mark[1:]).replace(b"\\\n", b"\r?\n"))
    held, start, looked, is_end = bytearray(), 0, 0, False  # `held` starts at byte `start`
    while not is_end:
        if found := pattern.search(held, looked):
            stop, after = found.span()
            bad.noticed["separators"] += 1
        elif more := file.read(_READ_BYTES):
            looked = max(0, len(held) - longest + 1)
            held += more
            continue
        else:
            is_end, stop, after = True, len(held), len(held)
        with memoryview(held) as view:  # avoids a copy that may be as large as the file
            content = bytes(view[:stop]).lstrip(b"\r\n")
        if content.strip():
            yield start + stop - len(content), content.rstrip(b"\r\n")
        del held[:after]
        start, looked = start + after, 0


def _compression(path: Location) -> str | None:
    return COMPRESSIONS.get(Path(path.name).suffix.lower())


def _opened(path: Location) -> io.BufferedReader:
    compression = _compression(path)
    if path.is_local and compression is None:
        return path.path.open("rb")
    file = path.open()
    if compression is not None:  # unbuffered, each request to a store reads 64 KiB
        file = pa.input_stream(file, compression, 0 if path.is_local else _READ_BYTES)
    return io.BufferedReader(file, _READ_BYTES)


def text_in(content: object, field: str) -> str:
    """Return a field's text; `meta.text` is text in meta, unless a field has that very name.

    Raises a LookupError, which lists the fields, or a TypeError for a field without text.
    """
    if not isinstance(content, dict):
        raise TypeError(f"it is {_kind(content)}, not an object with the field {field}")
    value: object = content
    for key in [field] if field in content else field.split("."):
        if not isinstance(value, dict) or key not in value:
            raise LookupError(f"no field {field}; fields: {listed(content)}")
        value = value[key]
    if not isinstance(value, str):
        raise TypeError(f"field {field} is {_kind(value)}, not a string")
    return value


def _kind(value: object) -> str:
    names = {type(None): "null", dict: "an object", list: "a list", str: "a string"}
    return names.get(type(value), type(value).__name__)


def _jsonl_documents(
    file: io.BufferedReader, piece: SourcePiece, text_field: str, bad: BadDocuments
) -> Iterator[Document]:
    path, position = piece.location, 0
    # The length of compressed text is unknown until its end.
    stop = math.inf if _compression(path) else piece.stop
    if piece.start:  # the previous chunk reads the line that ends here
        position = file.seek(piece.start - 1)
        position += len(file.readline())
    while position < stop and (line := file.readline()):
        start, position = position, position + len(line)
        if line.isspace():
            continue
        try:
            text = text_in(json.loads(line), text_field)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            bad.add(path, f"byte {start}", str(error))
            continue
        yield Document(start, valid_text(text))


def _parquet_documents(
    piece: SourcePiece, text_field: str, bad: BadDocuments
) -> Iterator[Document]:
    position = 0
    try:
        with piece.location.open() as source, pq.ParquetFile(source) as file:
            position = sum(file.metadata.row_group(i).num_rows for i in range(piece.start))
            groups = list(range(piece.start, piece.stop))
            for batch in file.iter_batches(_PARQUET_BATCH_ROWS, groups, columns=[text_field]):
                name = batch.schema.names[0]
                for value in batch.column(0):
                    try:
                        text = text_in({name: value.as_py()}, text_field)
                    except (UnicodeDecodeError, LookupError, TypeError) as error:
                        bad.add(piece.location, f"row {position}", str(error))
                    else:
                        yield Document(position, text)
                    position += 1
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"{piece.location} row {position}: {reason(error)}; fix the file or set --text_field"
        ) from None
