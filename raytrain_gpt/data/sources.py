"""Sources of documents and token ids: files, cut into chunks for independent reading.

A source is a file, directory or glob on a disk, in an object store or on the HF hub; or `stdlib`, the source
code of the running Python's standard library. Named files and matches of a glob are read whatever their
suffix, files in directories only with a known one. `documents` reads text, `imports` ids.
"""

from __future__ import annotations

import glob
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from raytrain_gpt.config.call_options import PrepareOptions
from raytrain_gpt.data.documents import COMPRESSIONS, STDLIB, SourcePiece, stdlib_root
from raytrain_gpt.data.imports import Layout, id_column, read_layout
from raytrain_gpt.errors import DataError, failure_as
from raytrain_gpt.format import Log, count, listed
from raytrain_gpt.storage.location import Location, is_url

_TEXT = (".txt", ".txt.gz", ".txt.zst")
_JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst")
_IDS = (".bin", ".npy")
_SUFFIXES = (*_TEXT, *_JSON_LINES, ".parquet", *_IDS)
"""Suffixes of files to read in directories; ids only where they are not the smaller part."""
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
_JSONL_PIECE_BYTES = 2**23
_ID_PIECE_TOKENS = 2**22
_TEXT_PER_COMPRESSED_BYTE = 3
"""Estimate for web pages."""
_TEXT_BYTES_PER_ID = 4

_POINTER_BYTES = 1024
"""Git LFS keeps its pointers below this size."""
_POINTERS = {
    b"version https://git-lfs.github.com/spec/": "a Git LFS pointer; run git lfs pull",
    b"/annex/objects/": "a git-annex pointer; run git annex get",
}

_File = tuple[str, Location, int]
"""Name below the source, place and size."""


def find_pieces(sources: list[str], options: PrepareOptions, log: Log) -> list[SourcePiece]:
    """Find the chunks of all sources, in source order; files of a directory or glob are sorted.

    Raises:
        DataError: a source is missing or has no file, or text and token ids are mixed.
    """
    pieces: list[SourcePiece] = []
    named = [name.strip(" .") for name in (options.text_suffixes or "").split(",")]
    suffixes = (*_SUFFIXES, *(f".{name}" for name in named if name))
    for source in sources:
        skipped: list[str] = []
        pieces += _source_pieces(source, options.text_field, suffixes, skipped)
        if skipped:
            log(
                f"skipped {count(len(skipped), 'file')} of {source}, such as {skipped[0]}; to read some as "
                "text, list their suffixes, as in --text_suffixes .md,.rst"
            )
    if not any(piece.text_bytes for piece in pieces):
        raise DataError(f"no text in {' '.join(sources)}: all files are empty; add text")
    text = next((piece for piece in pieces if piece.ids is None), None)
    ids = next((piece for piece in pieces if piece.ids is not None), None)
    if text is not None and ids is not None:
        raise DataError(
            f"{text.location} contains text, but {ids.location} token ids; select files of one kind, for "
            "instance with a glob"
        )
    return _with_unique_names(pieces)


def refuse_lfs_pointer(path: Path | Location, size: int | None = None) -> None:
    """Raise a DataError if a file of `size` bytes only names a content that is not here."""
    file = Location.of(path)
    if (file.size_bytes() if size is None else size) < _POINTER_BYTES:
        content = file.read_bytes()
        for start, what in _POINTERS.items():
            if content.startswith(start):
                raise DataError(f"{file} is {what}")


def _with_unique_names(pieces: list[SourcePiece]) -> list[SourcePiece]:
    """Number repeated file names: one-document files of the same name would all go to one split."""
    numbers: dict[str, dict[Location, int]] = {}
    named = []
    for piece in pieces:
        same_name = numbers.setdefault(piece.name, {})
        number = same_name.setdefault(piece.location, len(same_name))
        # No relative path contains two slashes.
        named.append(replace(piece, name=f"{number}//{piece.name}") if number else piece)
    return named


def _source_pieces(
    source: str, text_field: str, suffixes: tuple[str, ...], skipped: list[str]
) -> Iterator[SourcePiece]:
    """Yield the chunks of a source; adds a directory's files with other suffixes to `skipped`."""
    if source == STDLIB and not Path(source).exists():
        for name in _stdlib_names():
            size = (stdlib_root() / name).stat().st_size
            yield SourcePiece(name, Location(f"{STDLIB}:{name}"), 0, size, size)
        return
    find = _stored_files if is_url(source) else _local_files
    with failure_as(DataError, f"cannot read source {source}"):
        files, is_directory = find(source)
        num_bytes = Counter[bool]()
        for name, _, file_bytes in files:
            num_bytes[name.endswith(_IDS)] += file_bytes * name.endswith(suffixes)
        if is_directory and num_bytes[False] > num_bytes[True]:
            suffixes = tuple(one for one in suffixes if one not in _IDS)
        read = [f for f in files if not is_directory or f[0].endswith(suffixes)]
        skipped += [name for name, _, _ in files if is_directory and not name.endswith(suffixes)]
        if not read:
            raise DataError(
                f"source {source} has no {', '.join(_SUFFIXES)} file, but {count(len(skipped), 'other')}; "
                "select text files with a glob, or by suffix with --text_suffixes"
                if skipped
                else f"source {source} does not exist or has no file; check the path"
            )
        for name, file, size in read:
            yield from _file_pieces(file, size, name, text_field)


def _local_files(source: str) -> tuple[list[_File], bool]:
    """Find the files of a path or glob, following links; a file with several names has the first one."""
    path = Path(source)
    if path.is_file():
        return [(path.name, Location.of(path), path.stat().st_size)], False
    fixed, pattern = (path.parts, []) if path.is_dir() else _cut_at_wildcard(path.parts)
    root, depth = Path(*fixed), len(pattern) if pattern and "**" not in pattern else math.inf
    found: dict[tuple[Path, str], str] = {}
    for name in sorted(_below(root, depth), key=lambda name: name.split("/"), reverse=True):
        file = root / name
        if file.is_file() and (not pattern or _matches(name.split("/"), pattern)):
            # With its suffix: in the cache of the hub, links with one point to files without.
            found[file.resolve(), file.suffix] = name
    names = sorted(found.values(), key=lambda name: name.split("/"))
    files = [(name, Location.of(root / name), (root / name).stat().st_size) for name in names]
    return files, not pattern


def _below(root: Path, depth: float) -> Iterator[str]:
    """Yield the files below a directory, also in linked ones, but not through a link to a parent."""
    for parent, names, files in os.walk(root, followlinks=True):
        here = Path(parent)
        yield from (str((here / file).relative_to(root)) for file in files)
        above = {path.resolve() for path in (here, *here.parents)}
        is_deeper = len(here.relative_to(root).parts) + 1 < depth
        names[:] = [n for n in names if is_deeper and (here / n).resolve() not in above]


def _stored_files(source: str) -> tuple[list[_File], bool]:
    """Find the files of a file, directory or glob in a store, named as on a disk."""
    scheme, _, key = source.partition("://")
    fixed, pattern = _cut_at_wildcard([name for name in key.split("/") if name])
    root = Location.of_source(f"{scheme}://{'/'.join(fixed)}").pinned()
    if not pattern and root.is_file():
        return [(root.name, root, root.size_bytes())], False
    found = root.files()
    if pattern:
        found = [file for file in found if _matches(file[0].split("/"), pattern)]
    if not found:
        root.exists()  # raises if the bucket is missing
    return [(name, root / name, size) for name, size in found], not pattern


def _matches(names: list[str], pattern: list[str]) -> bool:
    """Match a path like `glob`: `*` stays in one directory, `**` does not, hidden names are skipped."""
    if not pattern or not names:
        return not pattern and not names
    (name, *below), (first, *rest) = names, pattern
    is_match = name.startswith(".") == first.startswith(".") and fnmatchcase(name, first)
    if first == "**":
        return (bool(below) and is_match and _matches(below, pattern)) or _matches(
            names, rest or ["*"]
        )
    return is_match and _matches(below, rest)


def _cut_at_wildcard(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Cut the components of a path before its first wildcard."""
    at = next((i for i, name in enumerate(names) if glob.has_magic(name)), len(names))
    return list(names[:at]), list(names[at:])


def _file_pieces(path: Location, size: int, name: str, text_field: str) -> Iterator[SourcePiece]:
    refuse_lfs_pointer(path, size)
    piece = SourcePiece(name, path, 0, size, size)
    if path.name.endswith(".parquet"):
        yield from _parquet_pieces(piece, text_field)
    elif path.name.endswith(_IDS):
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
    ids = None if "." in text_field and text_field in paths else id_column(schema, text_field)
    column = text_field if ids is None else ids
    leaves = [i for i, p in enumerate(paths) if p == column or p.startswith(f"{column}.")]
    if not leaves:
        raise DataError(
            f"source {path} has no column {text_field}, only {listed(paths)}; set --text_field"
        )
    for i in range(metadata.num_row_groups):
        chunk = metadata.row_group(i).column(leaves[0])
        tokens, text_bytes = 0, chunk.total_uncompressed_size
        if ids is not None:
            tokens, text_bytes = chunk.num_values, chunk.num_values * _TEXT_BYTES_PER_ID
        yield replace(piece, start=i, stop=i + 1, text_bytes=text_bytes, ids=ids, tokens=tokens)


def _stdlib_names() -> list[str]:
    names: list[str] = []
    for directory, subdirectories, files in os.walk(root := stdlib_root()):
        # Pruned: site-packages has many times the files of the library.
        subdirectories[:] = set(subdirectories) - _STDLIB_SKIPPED
        below = Path(directory).relative_to(root)
        names += [str(below / file) for file in files if file.endswith(".py")]
    return sorted(names)
