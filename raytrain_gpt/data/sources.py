"""Where documents come from: files, cut into pieces that can be read independently.

A `.txt` file, a line of a `.jsonl` file and a row of a `.parquet` file is a document. `stdlib` is the
text of the running Python's own standard library. Every document has a name (its file's) and a
position inside the file (0, the line's byte offset, the row), so that what becomes of it never
depends on who reads it, or on whether it came from a disk or an object store.
"""

from __future__ import annotations

import glob
import io
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from raytrain_gpt.data.storage import RETRY_FOR_S, Location, is_url
from raytrain_gpt.errors import DataError

STDLIB = "stdlib"
SUFFIXES = (".txt", ".jsonl", ".parquet")
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
_JSONL_PIECE_BYTES = 2**23
_PARQUET_BATCH_ROWS = 1024


@dataclass(frozen=True)
class Document:
    """One document: position in its file, and text."""

    position: int
    text: str


@dataclass(frozen=True)
class Piece:
    """A part of one source file that is read on its own.

    Attributes:
        name: The file's name below the source it was found in.
        path: Absolute path or URL; relative to the standard library for `stdlib`.
        start: First byte (`.jsonl`) or row group (`.parquet`); 0 for a whole `.txt` file.
        stop: The end, exclusive, in the same unit.
        text_bytes: About how much text it holds.
        endpoint: Of the object store it is in.
        retry_for_s: While that is out of reach.
    """

    name: str
    path: str
    start: int
    stop: int
    text_bytes: int
    endpoint: str | None = None
    retry_for_s: float = RETRY_FOR_S

    @property
    def location(self) -> Location:
        """The file."""
        return Location(self.path, self.retry_for_s, self.endpoint)


def find_pieces(sources: list[str], text_field: str) -> list[Piece]:
    """Everything the sources hold, in source order; files of a directory or glob are sorted.

    Raises:
        DataError: a source is missing, of an unknown kind, or holds no file.
    """
    pieces = [piece for source in sources for piece in _source_pieces(source, text_field)]
    if not any(piece.text_bytes for piece in pieces):
        raise DataError(
            f"no text in {' '.join(sources)}; expected {', '.join(SUFFIXES)} or {STDLIB}"
        )
    return pieces


def _source_pieces(source: str, text_field: str) -> Iterator[Piece]:
    if source == STDLIB and not Path(source).exists():
        for name in _stdlib_names():
            size = (_stdlib_root() / name).stat().st_size
            yield Piece(name, f"{STDLIB}:{name}", 0, size, size)
        return
    if is_url(source):
        yield from _stored_pieces(source, text_field)
        return
    root = Path(source)
    if root.is_dir():
        files = sorted(p for p in root.rglob("*") if p.is_file() and p.suffix in SUFFIXES)
    elif root.is_file():
        files, root = [root], root.parent
    else:
        files = sorted(Path(p) for p in glob.glob(source, recursive=True) if Path(p).is_file())
        root = _fixed_prefix(source)
    if not files:
        raise _nothing_in(source)
    for file in files:
        name = file.name if root not in file.parents else str(file.relative_to(root))
        path = Location(str(file.absolute()))
        yield from _file_pieces(path, file.stat().st_size, name, text_field)


def _nothing_in(source: str) -> DataError:
    return DataError(f"source {source} does not exist or has no {', '.join(SUFFIXES)} file")


def _stored_pieces(source: str, text_field: str) -> Iterator[Piece]:
    """Pieces of an object store's file, directory or glob, named as on a disk."""
    scheme, _, key = source.partition("://")
    parts = [part for part in key.split("/") if part]
    num_fixed = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    root = Location.of(f"{scheme}://{'/'.join(parts[:num_fixed])}")
    pattern = parts[num_fixed:]
    if not pattern and root.is_file():
        yield from _file_pieces(root, root.size_bytes(), root.name, text_field)
        return
    if pattern:
        files = [f for f in root.files() if _matches(f[0].split("/"), pattern)]
    else:
        files = [f for f in root.files() if Path(f[0]).suffix in SUFFIXES]
    if not files:
        root.exists()  # says so if it is the bucket that is missing
        raise _nothing_in(source)
    for name, size in files:
        yield from _file_pieces(root / name, size, name, text_field)


def _matches(parts: list[str], pattern: list[str]) -> bool:
    """As `glob` does it: a star stays in its directory, two do not, hidden names are left out."""
    if not pattern or not parts:
        return not pattern and not parts
    first, *rest = pattern
    hidden = parts[0].startswith(".") and not first.startswith(".")
    if first == "**":
        deeper = len(parts) > 1 and not hidden and _matches(parts[1:], pattern)
        return deeper or _matches(parts, rest or ["*"])
    return not hidden and fnmatchcase(parts[0], first) and _matches(parts[1:], rest)


def _fixed_prefix(pattern: str) -> Path:
    """The directory of a glob above its first wildcard."""
    parts = Path(pattern).parts
    fixed = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    return Path(*parts[:fixed])


def _file_pieces(path: Location, size: int, name: str, text_field: str) -> Iterator[Piece]:
    def piece(start: int, stop: int, text_bytes: int) -> Piece:
        return Piece(name, path.url, start, stop, text_bytes, path.endpoint, path.retry_for_s)

    suffix = Path(path.name).suffix
    if suffix == ".txt":
        yield piece(0, size, size)
    elif suffix == ".jsonl":
        for start in range(0, size, _JSONL_PIECE_BYTES):
            stop = min(start + _JSONL_PIECE_BYTES, size)
            yield piece(start, stop, stop - start)
    elif suffix == ".parquet":
        try:
            with path.open() as file:
                metadata = pq.read_metadata(file)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"source {path} is no parquet file: {error}") from None
        names = metadata.schema.to_arrow_schema().names
        if text_field not in names:
            raise DataError(
                f"source {path} has no column {text_field}, only {', '.join(names)}; set --text_field"
            )
        column = metadata.schema.to_arrow_schema().get_field_index(text_field)
        for i in range(metadata.num_row_groups):
            group = metadata.row_group(i)
            yield piece(i, i + 1, group.column(column).total_uncompressed_size)
    else:
        raise DataError(f"source {path} is of an unknown kind; expected {', '.join(SUFFIXES)}")


def _stdlib_root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _stdlib_names() -> list[str]:
    root = _stdlib_root()
    names = (p.relative_to(root) for p in root.rglob("*.py"))
    return sorted(str(n) for n in names if not _STDLIB_SKIPPED.intersection(n.parts))


def read_documents(piece: Piece, text_field: str) -> Iterator[Document]:
    """The documents of a piece, in their order.

    Raises:
        DataError: invalid UTF-8, a broken line or a missing field, with file and place.
    """
    if piece.path.startswith(f"{STDLIB}:"):
        path = _stdlib_root() / piece.path.removeprefix(f"{STDLIB}:")
        yield _text_document(Location.of(path))
    elif piece.path.endswith(".txt"):
        yield _text_document(piece.location)
    elif piece.path.endswith(".jsonl"):
        yield from _jsonl_documents(piece, text_field)
    else:
        yield from _parquet_documents(piece, text_field)


def _text_document(path: Location) -> Document:
    try:
        return Document(0, path.read_bytes().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 at byte {error.start}; convert it first") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


def _opened(path: Location) -> BinaryIO | io.BufferedReader:
    try:
        if path.is_local:
            return path.path.open("rb")
        return io.BufferedReader(path.open(), _JSONL_PIECE_BYTES)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


def _jsonl_documents(piece: Piece, text_field: str) -> Iterator[Document]:
    with _opened(piece.location) as file:
        if piece.start:
            # The line that began in the piece before belongs to that piece.
            file.seek(piece.start - 1)
            file.readline()
        while (position := file.tell()) < piece.stop and (line := file.readline()):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[text_field]
                if not isinstance(text, str):
                    raise TypeError(f"field {text_field} is {type(text).__name__}, not a string")
            except (ValueError, KeyError, TypeError) as error:
                why = f"no field {error}" if isinstance(error, KeyError) else str(error)
                raise DataError(
                    f"{piece.path} at byte {position}: {why}; mend the line or set --text_field"
                ) from None
            yield Document(position, text)


def _parquet_documents(piece: Piece, text_field: str) -> Iterator[Document]:
    position = 0
    try:
        with piece.location.open() as source, pq.ParquetFile(source) as file:
            position = sum(file.metadata.row_group(i).num_rows for i in range(piece.start))
            groups = list(range(piece.start, piece.stop))
            for batch in file.iter_batches(_PARQUET_BATCH_ROWS, groups, columns=[text_field]):
                for value in batch.column(0):
                    text = value.as_py()
                    if not isinstance(text, str):
                        raise TypeError(f"{text_field} is {type(text).__name__}, not text")
                    yield Document(position, text)
                    position += 1
    except (OSError, pa.ArrowException, UnicodeDecodeError, TypeError) as error:
        why = " ".join(str(error).split())
        raise DataError(
            f"{piece.path} row {position}: {why}; mend the file or set --text_field"
        ) from None
