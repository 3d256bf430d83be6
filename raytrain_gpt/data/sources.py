"""Sources of documents and token ids: files, cut into chunks for independent reading.

A source is a file, directory or glob on a disk, in an object store or on the HF hub; or `stdlib`, the source
code of the running Python's standard library. Named files and matches of a glob are read whatever their
suffix, files in directories by known suffixes. `documents` reads text, `imports` ids.
"""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from raytrain_gpt.config.call_options import PrepareOptions
from raytrain_gpt.data.documents import (
    COMPRESSIONS,
    STDLIB,
    SourcePiece,
    stdlib_root,
)
from raytrain_gpt.data.imports import COLUMNS, Layout, id_column, read_layout
from raytrain_gpt.errors import DataError, failure_as
from raytrain_gpt.format import Log, listed
from raytrain_gpt.storage.location import Location, is_url

_TEXT = (".txt", ".txt.gz", ".txt.zst")
_JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst")
_SUFFIXES = (*_TEXT, *_JSON_LINES, ".parquet", ".bin", ".npy")
"""Suffixes of files to read in directories."""
_SHOWN_SUFFIXES = 5
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
_JSONL_PIECE_BYTES = 2**23
_ID_PIECE_TOKENS = 2**22
_TEXT_PER_COMPRESSED_BYTE = 3
"""Estimate for web pages."""
_TEXT_BYTES_PER_ID = 4


class _SuffixFilter:
    """Selection of a directory's files by suffix, with `more` as in text_suffixes; counts skipped ones."""

    def __init__(self, more: str) -> None:
        names = [name.strip(" .") for name in more.split(",")]
        self._read = (*_SUFFIXES, *(f".{name}" for name in names if name))
        self._skipped = Counter[str]()

    def match(self, name: str) -> bool:
        if name.endswith(self._read):
            return True
        path = Path(name)
        suffixes = path.suffixes[-2:] if path.suffix in COMPRESSIONS else [path.suffix]
        self._skipped["".join(suffixes) or "without a suffix"] += 1
        return False

    def skipped(self) -> str:
        """Return counts such as `3 .md, 1 .pdf`, or nothing."""
        most = self._skipped.most_common(_SHOWN_SUFFIXES)
        rest = self._skipped.total() - sum(number for _, number in most)
        return ", ".join(f"{n} {suffix}" for suffix, n in [*most, ("others", rest)] if n)


def find_pieces(sources: list[str], options: PrepareOptions, log: Log) -> list[SourcePiece]:
    """Find the chunks of all sources, in source order; files of a directory or glob are sorted.

    Raises:
        DataError: a source is missing or has no file, or text and token ids are mixed.
    """
    pieces: list[SourcePiece] = []
    for source in sources:
        suffixes = _SuffixFilter(options.text_suffixes or "")
        pieces += _source_pieces(source, options.text_field, suffixes)
        if skipped := suffixes.skipped():
            log(
                f"skipped in {source}: {skipped}; to read some as text, list their suffixes, "
                "as in --text_suffixes .md,.rst"
            )
    if not any(piece.text_bytes for piece in pieces):
        raise DataError(f"no text in {' '.join(sources)}: all files are empty; add text")
    text = next((piece for piece in pieces if piece.ids is None), None)
    ids = next((piece for piece in pieces if piece.ids is not None), None)
    if text is not None and ids is not None:
        raise DataError(
            f"{text.location} contains text but {ids.location} token ids; select files of one kind, for "
            "instance by a glob"
        )
    return _with_unique_names(pieces)


def _with_unique_names(pieces: list[SourcePiece]) -> list[SourcePiece]:
    """Number repeated file names: one-document files of equal names would all go to one split."""
    numbers: dict[str, dict[Location, int]] = {}
    named = []
    for piece in pieces:
        same_name = numbers.setdefault(piece.name, {})
        number = same_name.setdefault(piece.location, len(same_name))
        # No relative path contains two slashes.
        named.append(replace(piece, name=f"{number}//{piece.name}") if number else piece)
    return named


def _source_pieces(source: str, text_field: str, suffixes: _SuffixFilter) -> Iterator[SourcePiece]:
    if source == STDLIB and not Path(source).exists():
        for name in _stdlib_names():
            size = (stdlib_root() / name).stat().st_size
            yield SourcePiece(name, Location(f"{STDLIB}:{name}"), 0, size, size)
        return
    find = _stored_pieces if is_url(source) else _local_pieces
    with failure_as(DataError, f"cannot read source {source}"):
        yield from find(source, text_field, suffixes)


def _local_pieces(source: str, text_field: str, suffixes: _SuffixFilter) -> Iterator[SourcePiece]:
    root = Path(source)
    paths: Iterable[Path]
    if root.is_dir():
        paths = (p for p in _files(root, ["**"], set(), hidden=True) if suffixes.match(p.name))
    elif root.is_file():
        paths, root = [root], root.parent
    else:
        fixed, pattern = _cut_at_wildcard(Path(source).parts)
        root = Path(*fixed)
        paths = _files(root, pattern, set())
    # The first name of each file; the others are links to it.
    files = sorted({path.resolve(): path for path in sorted(paths, reverse=True)}.values())
    if not files:
        raise _nothing_in(source, suffixes)
    for file in files:
        name = file.name if root not in file.parents else str(file.relative_to(root))
        yield from _file_pieces(Location.of(file), file.stat().st_size, name, text_field)


def _files(
    directory: Path, pattern: list[str], seen: set[tuple[Path, int]], hidden: bool = False
) -> Iterator[Path]:
    """Yield the files below a directory that match the components of a glob, following links.

    Links may form cycles, so each directory is searched once per rest of the pattern.
    """
    if not directory.is_dir() or (state := (directory.resolve(), len(pattern))) in seen:
        return
    seen.add(state)
    first, *rest = pattern
    if not glob.has_magic(first):
        entries = [directory / first]
    else:
        entries = [
            path for path in directory.iterdir() if _matches_name(path.name, first) or hidden
        ]
        entries.sort(key=lambda path: (path.is_symlink(), path.name))  # links last
    if first == "**" and rest:
        yield from _files(directory, rest, seen)
    for path in entries:
        if path.is_dir() and (first == "**" or rest):
            yield from _files(path, pattern if first == "**" else rest, seen, hidden)
        elif not rest and path.is_file():
            yield path


def _matches_name(name: str, pattern: str) -> bool:
    """Match one path component like `glob`: hidden names need a pattern that starts with a dot."""
    return name.startswith(".") == pattern.startswith(".") and fnmatchcase(name, pattern)


def _nothing_in(source: str, suffixes: _SuffixFilter) -> DataError:
    if skipped := suffixes.skipped():
        return DataError(
            f"source {source} has no {', '.join(_SUFFIXES)} file, but {skipped}; select text files with a "
            "glob, or by suffix with --text_suffixes"
        )
    return DataError(f"source {source} does not exist or has no file; check the path")


def _stored_pieces(source: str, text_field: str, suffixes: _SuffixFilter) -> Iterator[SourcePiece]:
    """Yield the chunks of a file, directory or glob in a store, named as on a disk."""
    scheme, _, key = source.partition("://")
    fixed, pattern = _cut_at_wildcard([name for name in key.split("/") if name])
    root = Location.of_source(f"{scheme}://{'/'.join(fixed)}").pinned()
    if not pattern and root.is_file():
        yield from _file_pieces(root, root.size_bytes(), root.name, text_field)
        return
    if pattern:
        files = [f for f in root.files() if _matches(f[0].split("/"), pattern)]
    else:
        files = [f for f in root.files() if suffixes.match(f[0])]
    if not files:
        root.exists()  # raises if the bucket is missing
        raise _nothing_in(source, suffixes)
    for name, size in files:
        yield from _file_pieces(root / name, size, name, text_field)


def _matches(names: list[str], pattern: list[str]) -> bool:
    """Match a path like `glob`: `*` stays in one directory, `**` does not, hidden names are skipped."""
    if not pattern or not names:
        return not pattern and not names
    first, *rest = pattern
    if first == "**":
        deeper = len(names) > 1 and _matches_name(names[0], first) and _matches(names[1:], pattern)
        return deeper or _matches(names, rest or ["*"])
    return _matches_name(names[0], first) and _matches(names[1:], rest)


def _cut_at_wildcard(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Cut the components of a path before its first wildcard."""
    at = next((i for i, name in enumerate(names) if glob.has_magic(name)), len(names))
    return list(names[:at]), list(names[at:])


def _file_pieces(path: Location, size: int, name: str, text_field: str) -> Iterator[SourcePiece]:
    piece = SourcePiece(name, path, 0, size, size)
    if path.name.endswith(".parquet"):
        yield from _parquet_pieces(piece, text_field)
    elif path.name.endswith((".bin", ".npy")):
        yield from _id_pieces(piece, read_layout(path, size))
    elif path.name.endswith(tuple(COMPRESSIONS)):
        if size == 0:
            raise DataError(f"source {path} is empty, not a compressed file; download it again")
        yield replace(piece, text_bytes=size * _TEXT_PER_COMPRESSED_BYTE)
    elif path.name.endswith(".jsonl"):
        for start in range(0, size, _JSONL_PIECE_BYTES):
            stop = min(start + _JSONL_PIECE_BYTES, size)
            yield replace(piece, start=start, stop=stop, text_bytes=stop - start)
    else:
        yield piece


def _id_pieces(piece: SourcePiece, layout: Layout) -> Iterator[SourcePiece]:
    dtype, first = layout
    step = _ID_PIECE_TOKENS * dtype.itemsize
    for start in range(first, piece.stop, step):
        stop = min(start + step, piece.stop)
        tokens = (stop - start) // dtype.itemsize
        text_bytes = tokens * _TEXT_BYTES_PER_ID
        yield replace(
            piece, start=start, stop=stop, text_bytes=text_bytes, ids=dtype.str, tokens=tokens
        )


def _parquet_pieces(piece: SourcePiece, text_field: str) -> Iterator[SourcePiece]:
    path = piece.location
    problem = f"source {path} is not a parquet file"
    with failure_as(DataError, problem, "; download it again", pa.ArrowException):
        with path.open() as file:
            metadata = pq.read_metadata(file)
        schema = metadata.schema.to_arrow_schema()
    paths = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    names = (text_field, *COLUMNS)
    if twice := [n for n in names if schema.names.count(n) > 1 or paths.count(n) > 1]:
        raise DataError(f"source {path} has two columns {twice[0]}; rename or remove one")
    ids = None if "." in text_field and text_field in paths else id_column(schema, text_field)
    if ids is None and not _has_column(schema, text_field):
        raise DataError(
            f"source {path} has no column {text_field}, only {listed(schema.names)}; set "
            "--text_field"
        )
    column = text_field if ids is None else ids
    leaf = next(i for i, p in enumerate(paths) if p == column or p.startswith(f"{column}."))
    for i in range(metadata.num_row_groups):
        chunk = metadata.row_group(i).column(leaf)
        tokens, text_bytes = 0, chunk.total_uncompressed_size
        if ids is not None:
            tokens, text_bytes = chunk.num_values, chunk.num_values * _TEXT_BYTES_PER_ID
        yield replace(piece, start=i, stop=i + 1, text_bytes=text_bytes, ids=ids, tokens=tokens)


def _has_column(schema: pa.Schema, field: str) -> bool:
    """Whether a parquet file has a column, or a field inside struct columns, of this name."""
    if field in schema.names:
        return True
    fields = pa.struct(schema)
    for key in field.split("."):
        if not pa.types.is_struct(fields) or fields.get_field_index(key) < 0:
            return False
        fields = fields.field(key).type
    return True


def _stdlib_names() -> list[str]:
    names: list[str] = []
    for directory, subdirectories, files in os.walk(root := stdlib_root()):
        # Pruned: site-packages has many times the files of the library.
        subdirectories[:] = set(subdirectories) - _STDLIB_SKIPPED
        below = Path(directory).relative_to(root)
        names += [str(below / file) for file in files if file.endswith(".py")]
    return sorted(names)
