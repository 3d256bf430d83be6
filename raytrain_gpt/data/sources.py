"""Sources of documents and token ids: files, cut into pieces that can be read independently.

A source is a file, a directory or a glob, on a disk, in an object store or on the HF hub; a file of a
web server; or `stdlib`, the text of the running Python's standard library. A file that is named, or fits
a glob, is read whatever its ending; of a directory those with known endings are. `documents` reads text,
`imports` reads token ids.
"""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

from raytrain_gpt.data.documents import (
    COMPRESSIONS,
    MAX_LISTED_DEPTH,
    STDLIB,
    SourcePiece,
    stdlib_root,
)
from raytrain_gpt.data.imports import COLUMNS, Layout, id_column, read_layout
from raytrain_gpt.errors import DataError, failure_as
from raytrain_gpt.format import Log, listed
from raytrain_gpt.storage.location import Location, is_url
from raytrain_gpt.storage.web_files import without_query

_TEXT = (".txt", ".txt.gz", ".txt.zst")
_JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst")
SUFFIXES = (*_TEXT, *_JSON_LINES, ".parquet", ".bin", ".npy")
"""What is read of a directory."""
_SHOWN_ENDINGS = 5
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
_JSONL_PIECE_BYTES = 2**23
_ID_PIECE_TOKENS = 2**22
_TEXT_PER_COMPRESSED_BYTE = 3
"""Roughly, for web pages."""
_TEXT_BYTES_PER_ID = 4


class _Endings:
    """Which files of a directory are read, by the ends of their names; counts the others."""

    def __init__(self, more: tuple[str, ...]) -> None:
        self._read = (*SUFFIXES, *more)
        self._left_out = Counter[str]()

    def fit(self, name: str) -> bool:
        """Whether a file of this name is read."""
        if name.endswith(self._read):
            return True
        whole = Path(name)
        endings = whole.suffixes[-2:] if whole.suffix in COMPRESSIONS else [whole.suffix]
        self._left_out["".join(endings) or "without an ending"] += 1
        return False

    def left_out(self) -> str:
        """`3 .md, 1 .pdf`; empty if all were read."""
        most = self._left_out.most_common(_SHOWN_ENDINGS)
        rest = self._left_out.total() - sum(number for _, number in most)
        return ", ".join(
            f"{number} {ending}" for ending, number in [*most, ("others", rest)] if number
        )


def find_pieces(
    sources: list[str],
    text_field: str,
    text_suffixes: tuple[str, ...] = (),
    log: Log | None = None,
) -> list[SourcePiece]:
    """All pieces of the sources, in source order; files of a directory or glob are sorted.

    Args:
        text_suffixes: Further ends of names of files that are read as text, of directories.
        log: Says which files of a directory are left out.

    Raises:
        DataError: a source is missing, or has no file; or some contain text and others token ids.
    """
    pieces: list[SourcePiece] = []
    for source in sources:
        endings = _Endings(text_suffixes)
        pieces += _source_pieces(source, text_field, endings)
        if log and (left_out := endings.left_out()):
            log(
                f"left out of {without_query(source)}: {left_out}; --text_suffixes .md,.rst reads files that "
                "end so, too"
            )
    if not any(piece.text_bytes for piece in pieces):
        raise DataError(
            f"no text in {' '.join(map(without_query, sources))}: the files are empty; give others"
        )
    text = next((piece for piece in pieces if piece.ids is None), None)
    ids = next((piece for piece in pieces if piece.ids is not None), None)
    if text is not None and ids is not None:
        raise DataError(
            f"{text.location} contains text but {ids.location} token ids; give files of one kind, for "
            "instance by a glob"
        )
    return _told_apart(pieces)


def _told_apart(pieces: list[SourcePiece]) -> list[SourcePiece]:
    """The pieces, with a number before the name for each further file of the same name.

    A document's split follows from its file's name and its position: without the number, one-document
    files that share a name would all go to one split.
    """
    numbers: dict[str, dict[Location, int]] = {}
    told_apart = []
    for piece in pieces:
        same_name = numbers.setdefault(piece.name, {})
        number = same_name.setdefault(piece.location, len(same_name))
        # No relative path contains two slashes.
        told_apart.append(replace(piece, name=f"{number}//{piece.name}") if number else piece)
    return told_apart


def _source_pieces(source: str, text_field: str, endings: _Endings) -> Iterator[SourcePiece]:
    if source == STDLIB and not Path(source).exists():
        for name in _stdlib_names():
            size = (stdlib_root() / name).stat().st_size
            yield SourcePiece(name, Location(f"{STDLIB}:{name}"), 0, size, size)
        return
    find = _local_pieces
    if is_url(source):
        find = _web_pieces if source.startswith(("http://", "https://")) else _stored_pieces
    with failure_as(DataError, f"cannot read source {without_query(source)}"):
        yield from find(source, text_field, endings)


def _local_pieces(source: str, text_field: str, endings: _Endings) -> Iterator[SourcePiece]:
    root = Path(source)
    found: Iterable[Path]
    if root.is_dir():
        found = (p for p in _files(root, ["**"], set(), hidden=True) if endings.fit(p.name))
    elif root.is_file():
        found, root = [root], root.parent
    else:
        root = _fixed_prefix(source)
        found = _files(root, [*Path(source).parts[len(root.parts) :]], set())
    # The first name of each file: others are links to it.
    files = sorted({path.resolve(): path for path in sorted(found, reverse=True)}.values())
    if not files:
        raise _nothing_in(source, endings)
    for file in files:
        name = file.name if root not in file.parents else str(file.relative_to(root))
        yield from _file_pieces(Location.of(file), file.stat().st_size, name, text_field)


def _files(
    directory: Path, pattern: list[str], seen: set[tuple[Path, int]], hidden: bool = False
) -> Iterator[Path]:
    """The files below a directory that match the parts of a glob, through links as well.

    Every directory is looked at once for the same rest of the pattern: links may lead in circles.
    """
    if not directory.is_dir() or (state := (directory.resolve(), len(pattern))) in seen:
        return
    seen.add(state)
    first, *rest = pattern
    if not glob.has_magic(first):
        entries = [directory / first]
    else:
        entries = [path for path in directory.iterdir() if _fits(path.name, first) or hidden]
        entries.sort(key=lambda path: (path.is_symlink(), path.name))  # own names before a link's
    if first == "**" and rest:
        yield from _files(directory, rest, seen)
    for path in entries:
        if path.is_dir() and (first == "**" or rest):
            yield from _files(path, pattern if first == "**" else rest, seen, hidden)
        elif not rest and path.is_file():
            yield path


def _fits(name: str, part: str) -> bool:
    """Whether a name matches a part of a glob, which for hidden ones begins with a dot, too."""
    return name.startswith(".") == part.startswith(".") and fnmatchcase(name, part)


def _nothing_in(source: str, endings: _Endings) -> DataError:
    if left_out := endings.left_out():
        return DataError(
            f"source {without_query(source)} has no {', '.join(SUFFIXES)} file, but {left_out}; name those "
            "that are text by a glob, or their endings with --text_suffixes"
        )
    return DataError(
        f"source {without_query(source)} does not exist or has no file; check the path"
    )


def _web_pieces(source: str, text_field: str, endings: _Endings) -> Iterator[SourcePiece]:
    file = Location.of_source(source)
    if glob.has_magic(urlsplit(source).path):
        raise DataError(
            f"source {file} has a wildcard, but web servers do not list files; give each address"
        )
    if not file.is_file():
        raise _nothing_in(source, endings)
    yield from _file_pieces(file, file.size_bytes(), file.name, text_field)


def _stored_pieces(source: str, text_field: str, endings: _Endings) -> Iterator[SourcePiece]:
    """The pieces of a store's file, directory or glob, with the same names as on a disk."""
    scheme, _, key = source.partition("://")
    parts = [part for part in key.split("/") if part]
    num_fixed = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    root = Location.of_source(f"{scheme}://{'/'.join(parts[:num_fixed])}").pinned()
    pattern = parts[num_fixed:]
    if not pattern and root.is_file():
        yield from _file_pieces(root, root.size_bytes(), root.name, text_field)
        return
    if pattern:
        files = [f for f in root.files() if _matches(f[0].split("/"), pattern)]
    else:
        files = [f for f in root.files() if endings.fit(f[0])]
    if not files:
        root.exists()  # raises if it is the bucket that is missing
        raise _nothing_in(source, endings)
    for name, size in files:
        yield from _file_pieces(root / name, size, name, text_field)


def _matches(parts: list[str], pattern: list[str]) -> bool:
    """Match like `glob`: `*` stays in one directory, `**` does not, hidden names are skipped."""
    if not pattern or not parts:
        return not pattern and not parts
    first, *rest = pattern
    if first == "**":
        deeper = len(parts) > 1 and _fits(parts[0], first) and _matches(parts[1:], pattern)
        return deeper or _matches(parts, rest or ["*"])
    return _fits(parts[0], first) and _matches(parts[1:], rest)


def _fixed_prefix(pattern: str) -> Path:
    """The directory of a glob above its first wildcard."""
    parts = Path(pattern).parts
    fixed = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    return Path(*parts[:fixed])


def _file_pieces(path: Location, size: int, name: str, text_field: str) -> Iterator[SourcePiece]:
    whole = SourcePiece(name, path, 0, size, size)
    in_parts = path.has_ranges()
    if path.name.endswith(".parquet"):
        yield from _parquet_pieces(whole, text_field, in_parts)
    elif path.name.endswith((".bin", ".npy")):
        yield from _id_pieces(whole, read_layout(path, size), in_parts)
    elif path.name.endswith(tuple(COMPRESSIONS)):
        if size == 0:
            raise DataError(f"source {path} is empty, not a compressed file; download it again")
        yield replace(whole, text_bytes=size * _TEXT_PER_COMPRESSED_BYTE)
    elif path.name.endswith(".jsonl") and in_parts:
        for start in range(0, size, _JSONL_PIECE_BYTES):
            stop = min(start + _JSONL_PIECE_BYTES, size)
            yield replace(whole, start=start, stop=stop, text_bytes=stop - start)
    else:
        yield whole


def _id_pieces(whole: SourcePiece, layout: Layout, in_parts: bool) -> Iterator[SourcePiece]:
    dtype, first = layout
    step = _ID_PIECE_TOKENS * dtype.itemsize if in_parts else max(1, whole.stop - first)
    for start in range(first, whole.stop, step):
        stop = min(start + step, whole.stop)
        tokens = (stop - start) // dtype.itemsize
        text_bytes = tokens * _TEXT_BYTES_PER_ID
        yield replace(
            whole, start=start, stop=stop, text_bytes=text_bytes, ids=dtype.str, tokens=tokens
        )


def _parquet_pieces(whole: SourcePiece, text_field: str, in_parts: bool) -> Iterator[SourcePiece]:
    path = whole.location
    what = f"source {path} is not a parquet file"
    with failure_as(DataError, what, "; download it again", pa.ArrowException):
        with path.open() as file:
            metadata = pq.read_metadata(file)
        schema = metadata.schema.to_arrow_schema()
    paths = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    names = (text_field, *COLUMNS)
    if twice := [n for n in names if schema.names.count(n) > 1 or paths.count(n) > 1]:
        raise DataError(f"source {path} has two columns {twice[0]}; rename or remove one of them")
    ids = None if "." in text_field and text_field in paths else id_column(schema, text_field)
    if ids is None and not _has_column(schema, text_field):
        raise DataError(
            f"source {path} has no column {text_field}, only {listed(_columns(schema))}; set "
            "--text_field"
        )
    column = text_field if ids is None else ids
    leaf = next(i for i, p in enumerate(paths) if p == column or p.startswith(f"{column}."))
    step = 1 if in_parts else max(1, metadata.num_row_groups)
    for start in range(0, metadata.num_row_groups, step):
        stop = min(start + step, metadata.num_row_groups)
        chunks = [metadata.row_group(i).column(leaf) for i in range(start, stop)]
        if ids is None:
            tokens, text_bytes = 0, sum(chunk.total_uncompressed_size for chunk in chunks)
        else:
            tokens = sum(chunk.num_values for chunk in chunks)
            text_bytes = tokens * _TEXT_BYTES_PER_ID
        yield replace(whole, start=start, stop=stop, text_bytes=text_bytes, ids=ids, tokens=tokens)


def _has_column(schema: pa.Schema, field: str) -> bool:
    """Whether a parquet file has a column of this name, or a field inside struct columns."""
    if field in schema.names:
        return True
    fields = pa.struct(schema)
    for key in field.split("."):
        if not pa.types.is_struct(fields) or fields.get_field_index(key) < 0:
            return False
        fields = fields.field(key).type
    return True


def _columns(schema: Iterable[pa.Field], depth: int = 1) -> Iterator[str]:
    """Names of columns, and of the fields inside struct columns, as `meta.text`."""
    for one in schema:
        if pa.types.is_struct(one.type) and depth < MAX_LISTED_DEPTH:
            yield from (f"{one.name}.{inner}" for inner in _columns(one.type, depth + 1))
        else:
            yield one.name


def _stdlib_names() -> list[str]:
    names: list[str] = []
    for directory, subdirectories, files in os.walk(root := stdlib_root()):
        # Pruned: site-packages alone has many times the files of the library.
        subdirectories[:] = set(subdirectories) - _STDLIB_SKIPPED
        below = Path(directory).relative_to(root)
        names += [str(below / file) for file in files if file.endswith(".py")]
    return sorted(names)
