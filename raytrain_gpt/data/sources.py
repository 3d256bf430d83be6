"""Sources of documents and token ids: files, cut into chunks for independent reading.

A source is a file, directory or glob on a disk, in an object store or on the HF hub; or `stdlib`, the source
code of the running Python's standard library. One rule lists files: names that begin with `.` or `_` are
skipped in directories and globs, unless the glob has them; of a directory, only known suffixes are read; what
is to be read, but cannot be, is an error. `documents` reads text, `imports` ids.
"""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from raytrain_gpt.config.call_options import PrepareOptions
from raytrain_gpt.data.documents import (
    COMPRESSIONS,
    LFS_BYTES,
    STDLIB,
    SourcePiece,
    refuse_lfs_pointer,
    stdlib_root,
)
from raytrain_gpt.data.imports import id_column, read_layout
from raytrain_gpt.data.shards import MANIFEST_FILE
from raytrain_gpt.data.tokenizer import TOKENIZER_FILE
from raytrain_gpt.errors import DataError, failure_as, reason
from raytrain_gpt.format import Log, count, listed
from raytrain_gpt.storage.location import Location

_TEXT = (".txt", ".jsonl", ".ndjson", ".jsonlines", ".jl")
_IDS = (".bin", ".npy")
_SUFFIXES = (*_TEXT, ".parquet", *_IDS)
_READ = (*(f"{one}{packed}" for one in (*_TEXT, ".json") for packed in COMPRESSIONS), *_SUFFIXES)
"""Suffixes of files to read in directories; ids only where they are not the smaller part."""
_HIDDEN = (".", "_")
_PACKED = r"\.(gz|zst|zstd|bz2|xz|lzma|lz4|br|z|snappy)"
_REFUSED = {
    rf"\.(zip|7z|rar|tar|tgz|tbz2?|txz|tzst|warc|wet|npz)({_PACKED})?": "an archive; unpack it",
    rf"\.(csv|tsv|tab|psv)({_PACKED})?": "a table; convert it: pyarrow.parquet.write_table(pyarrow.csv."
    "read_csv(FILE), 'table.parquet'), then name its column with --text_field",
    rf"\.(parquet|bin|npy){_PACKED}|(?!\.gz|\.zst\Z){_PACKED}": "compressed; decompress it",
}
"""Suffixes of what is no text -> what it is, and what to do."""
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
_JSONL_PIECE_BYTES = 2**23
_ID_PIECE_TOKENS = 2**22
_TEXT_PER_COMPRESSED_BYTE = 3
"""Estimate for web pages."""
_TEXT_BYTES_PER_ID = 4

_File = tuple[str, Location, int]
"""Name below the source, place and size."""


def find_pieces(
    sources: list[str], options: PrepareOptions, log: Log, skipped: list[str] | None = None
) -> list[SourcePiece]:
    """Find the chunks of all sources, in source order; files of a directory or glob are sorted.

    Raises:
        DataError: a source is missing or has no file, one cannot be read, or text and token ids are mixed.
    """
    pieces: list[SourcePiece] = []
    named = [name.strip(" .").lower() for name in (options.text_suffixes or "").split(",")]
    suffixes = (*_READ, *(f".{name}" for name in named if name))
    for source in sources:
        left = list[str]()
        pieces += _source_pieces(source, options.text_field, suffixes, left)
        if left:
            num_hidden = sum(_is_hidden(name.split("/")) for name in left)
            hidden = f"; {num_hidden} in names that begin with . or _" if num_hidden else ""
            log(
                f"skipped {count(len(left), 'file')} of {source}, such as {left[0]}; to read some as text, "
                f"list their suffixes, as in --text_suffixes .md,.rst{hidden}"
            )
        if skipped is not None:
            skipped += left
    if not any(piece.text_bytes for piece in pieces):
        raise DataError(f"no text in {' '.join(sources)}: all files are empty; add text")
    kinds = {piece.ids is None: piece.location for piece in pieces}
    if len(kinds) == 2:
        raise DataError(
            f"{kinds[True]} contains text, but {kinds[False]} token ids; select files of one kind, "
            "for instance with a glob"
        )
    # Repeated names are numbered: one-document files of the same name would all go to one split.
    numbers: dict[str, dict[Location, int]] = {}
    for i, piece in enumerate(pieces):
        same_name = numbers.setdefault(piece.name, {})
        if number := same_name.setdefault(piece.location, len(same_name)):
            # No relative path contains two slashes.
            pieces[i] = replace(piece, name=f"{number}//{piece.name}")
    return pieces


def _source_pieces(
    source: str, text_field: str, suffixes: tuple[str, ...], skipped: list[str]
) -> Iterator[SourcePiece]:
    """Yield the chunks of a source; adds hidden files and those with other suffixes to `skipped`."""
    if source == STDLIB and not Path(source).exists():
        for name in _stdlib_names():
            size = (stdlib_root() / name).stat().st_size
            yield SourcePiece(name, Location(f"{STDLIB}:{name}"), 0, size, size)
        return
    with failure_as(DataError, f"cannot read source {source}"):
        files, is_directory = _find_files(source, suffixes, skipped)
        if is_directory:
            texts = tuple(one for one in suffixes if one not in _IDS)
            sizes = [sum(f[2] for f in files if _ends(f[0], kind)) for kind in (texts, _IDS)]
            suffixes = texts if sizes[0] > sizes[1] else suffixes
            skipped += [name for name, _, _ in files if not _ends(name, suffixes)]
        read = [f for f in files if not is_directory or _ends(f[0], suffixes)]
        if not read:
            for _, file, _ in files:
                _refuse_kind(file)
            raise DataError(
                f"source {source} has no {', '.join(_SUFFIXES)} file, but {count(len(skipped), 'other')}; "
                "select text files with a glob, or by suffix with --text_suffixes"
                if skipped
                else f"source {source} does not exist, is a pipe or broken link, or has no file"
            )
        for name, file, size in read:
            yield from _file_pieces(file, size, name, text_field)


def _ends(name: str, suffixes: tuple[str, ...]) -> bool:
    return name.lower().endswith(suffixes)


def _refuse_kind(path: Location) -> None:
    for suffix, kind in _REFUSED.items():
        if re.search(rf"({suffix})\Z", path.name, re.IGNORECASE):
            raise DataError(f"source {path} is {kind}")


def _find_files(
    source: str, suffixes: tuple[str, ...], skipped: list[str]
) -> tuple[list[_File], bool]:
    """Find the sorted files of a path, URL or glob, and whether it is a directory.

    Links are followed; a file with several names has the first one. Adds hidden files to `skipped`.
    """
    wildcard = None if os.path.lexists(source) else re.search(r"[^/]*[*?[]", source)
    at = wildcard.start() if wildcard else len(source)
    pattern = Path(source[at:]).parts
    root = Location.of(source[:at] or ("." if wildcard else ""), is_source=True).pinned()
    if not pattern and root.is_file():
        return [(root.name, root, root.size_bytes())], False
    sizes = {} if root.is_local else dict(root.files())
    names = (name.split("/") for name in (_below(root, pattern) if root.is_local else sizes))
    found: dict[object, _File] = {}
    for parts in sorted(parts for parts in names if not pattern or _matches(parts, pattern)):
        file = root / (name := "/".join(parts))
        if _is_hidden(parts, pattern):
            skipped.append(name)
        elif not root.is_local:
            found[name] = name, file, sizes[name]
        elif (size := _size(path := file.path, bool(pattern) or _ends(name, suffixes))) is not None:
            # With its suffix: in the cache of the hub, links with one point to files without.
            found.setdefault((path.resolve(), path.suffix), (name, file, size))
    if not found:
        root.exists()  # raises if the bucket is missing
    return list(found.values()), not pattern


def _size(file: Path, is_read: bool) -> int | None:
    """Return a file's size, or None for a link in a loop; raises a DataError if it cannot be read."""
    try:
        size = file.stat().st_size
        if file.is_file():
            return size
        why = "it is a device, pipe or socket"
    except OSError as error:
        if error.errno == errno.ELOOP:
            return None
        why = f"its link to {file.readlink()} is broken" if file.is_symlink() else reason(error)
    if is_read:
        raise DataError(f"cannot read {file}: {why}; restore it or remove it from the source")
    return 0


def _below(root: Location, pattern: Sequence[str]) -> Iterator[str]:
    """Yield the files below a local directory, also in linked ones, but in no parent again."""
    depth = len(pattern) if pattern and "**" not in pattern else math.inf

    def refuse(error: OSError) -> None:
        is_there = not isinstance(error, FileNotFoundError | NotADirectoryError)
        if is_there and not _is_hidden(Path(error.filename).relative_to(root.path).parts):
            raise DataError(f"cannot read {error.filename}: {reason(error)}; allow it or omit it")

    for parent, names, files in os.walk(root.path, onerror=refuse, followlinks=True):
        here, parts = Path(parent), Path(parent).relative_to(root.path).parts
        is_deeper = len(parts) + 1 < depth
        for file in files:
            # A broken link without a suffix may have been one to a directory.
            if is_deeper and "." not in file and not _is_hidden((*parts, file)):
                _size(here / file, is_read=(here / file).is_symlink())
            yield "/".join((*parts, file))
        above = {path.resolve() for path in (here, *here.parents)}
        names[:] = [n for n in names if is_deeper and (here / n).resolve() not in above]
        if not pattern:
            names[:] = [name for name in names if not _is_dataset(here / name)]


def _is_dataset(directory: Path) -> bool:
    """Whether a directory is a dataset of `prepare`, complete or not."""
    is_one = (directory / MANIFEST_FILE).is_file() or (directory / "unfinished").is_dir()
    return is_one and (directory / TOKENIZER_FILE).is_file()


def _is_hidden(names: Sequence[str], pattern: Sequence[str] = ()) -> bool:
    """Whether a name begins with `.` or `_`, unless a part of the pattern that does matches it."""
    named = [part for part in pattern if part.startswith(_HIDDEN)]
    hidden = [name for name in names if name.startswith(_HIDDEN)]
    return not all(any(fnmatchcase(name, part) for part in named) for name in hidden)


def _matches(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Match a path like `glob`: `*` stays in one directory, `**` does not."""
    if not pattern or not names:
        return not pattern and not names
    (name, *below), (first, *rest) = names, pattern
    if first == "**":
        return _matches(names, rest or ["*"]) or (bool(below) and _matches(below, pattern))
    return fnmatchcase(name, first) and _matches(below, rest)


def _file_pieces(path: Location, size: int, name: str, text_field: str) -> Iterator[SourcePiece]:
    # The reader of text looks at the first bytes, which here would be a request.
    if size < LFS_BYTES and (path.is_local or _ends(path.name, (".parquet", *_IDS))):
        refuse_lfs_pointer(path)
    _refuse_kind(path)
    piece = SourcePiece(name, path, 0, size, size)
    if _ends(path.name, (".parquet",)):
        yield from _parquet_pieces(piece, text_field)
    elif _ends(path.name, _IDS):
        dtype, first = read_layout(path, size)
        for part in _cut(piece, first, _ID_PIECE_TOKENS * dtype.itemsize):
            tokens = part.text_bytes // dtype.itemsize
            text_bytes = tokens * _TEXT_BYTES_PER_ID
            yield replace(part, text_bytes=text_bytes, ids=dtype.str, tokens=tokens)
    elif _ends(path.name, tuple(COMPRESSIONS)):
        if size == 0:
            raise DataError(f"source {path} is empty, not a compressed file; download it again")
        yield replace(piece, text_bytes=size * _TEXT_PER_COMPRESSED_BYTE)
    elif _ends(path.name, (".jsonl", ".ndjson", ".jsonlines")):
        yield from _cut(piece, 0, _JSONL_PIECE_BYTES)
    else:
        yield piece


def _cut(piece: SourcePiece, first: int, step: int) -> Iterator[SourcePiece]:
    for start in range(first, piece.stop, step):
        stop = min(start + step, piece.stop)
        yield replace(piece, start=start, stop=stop, text_bytes=stop - start)


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
