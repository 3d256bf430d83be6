"""Sources of documents and token ids: files, cut into chunks for independent reading.

A source is a file, directory or glob on a disk, in an object store or on the HF hub; or `stdlib`, the source
code of the running Python's standard library. One rule lists files: names that begin with `.` or `_` are
skipped in directories and globs, unless the glob has them; of a directory, only known suffixes are read; what
is to be read, but cannot be, is an error. `documents` reads text, `imports` ids.
"""

from __future__ import annotations

import errno
import glob
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from raytrain_gpt.config.call_options import PrepareOptions
from raytrain_gpt.data.documents import COMPRESSIONS, LFS_BYTES, STDLIB, SourcePiece, stdlib_root
from raytrain_gpt.data.documents import refuse_lfs_pointer as refuse_lfs_pointer
from raytrain_gpt.data.imports import Layout, id_column, read_layout
from raytrain_gpt.errors import DataError, failure_as, reason
from raytrain_gpt.format import Log, count, listed
from raytrain_gpt.storage.location import Location, is_url

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
    text = next((piece for piece in pieces if piece.ids is None), None)
    ids = next((piece for piece in pieces if piece.ids is not None), None)
    if text is not None and ids is not None:
        raise DataError(
            f"{text.location} contains text, but {ids.location} token ids; select files of one kind, for "
            "instance with a glob"
        )
    return _with_unique_names(pieces)


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
    """Yield the chunks of a source; adds hidden files and those with other suffixes to `skipped`."""
    if source == STDLIB and not Path(source).exists():
        for name in _stdlib_names():
            size = (stdlib_root() / name).stat().st_size
            yield SourcePiece(name, Location(f"{STDLIB}:{name}"), 0, size, size)
        return
    with failure_as(DataError, f"cannot read source {source}"):
        if is_url(source):
            files, is_directory = _stored_files(source, skipped)
        else:
            files, is_directory = _local_files(source, suffixes, skipped)
        num_bytes = Counter[bool]()
        for name, _, file_bytes in files:
            num_bytes[_ends(name, _IDS)] += file_bytes * _ends(name, suffixes)
        if is_directory and num_bytes[False] > num_bytes[True]:
            suffixes = tuple(one for one in suffixes if one not in _IDS)
        read = [f for f in files if not is_directory or _ends(f[0], suffixes)]
        skipped += [name for name, _, _ in files if is_directory and not _ends(name, suffixes)]
        if not read:
            for _, file, _ in files:
                _refuse_kind(file)
            raise DataError(
                f"source {source} has no {', '.join(_SUFFIXES)} file, but {count(len(skipped), 'other')}; "
                "select text files with a glob, or by suffix with --text_suffixes"
                if skipped
                else f"source {source} does not exist or has no file; check the path"
            )
        for name, file, size in read:
            yield from _file_pieces(file, size, name, text_field)


def _ends(name: str, suffixes: tuple[str, ...]) -> bool:
    return name.lower().endswith(suffixes)


def _refuse_kind(path: Location) -> None:
    for suffix, kind in _REFUSED.items():
        if re.search(rf"({suffix})\Z", path.name, re.IGNORECASE):
            raise DataError(f"source {path} is {kind}")


def _local_files(
    source: str, suffixes: tuple[str, ...], skipped: list[str]
) -> tuple[list[_File], bool]:
    """Find the files of a path or glob, following links; a file with several names has the first one."""
    path = Path(source)
    if path.is_file():
        return [(path.name, Location.of(path), path.stat().st_size)], False
    fixed, pattern = (path.parts, []) if path.is_dir() else _cut_at_wildcard(path.parts)
    root = Path(*fixed)
    if not root.is_dir():
        if not pattern and os.path.lexists(root):
            _size(root, is_read=True)
        return [], not pattern
    found: dict[tuple[Path, str], _File] = {}
    names = _shown(_below(root, pattern), pattern, skipped)
    for name in sorted(names, key=lambda name: name.split("/"), reverse=True):
        file = root / name
        if (size := _size(file, bool(pattern) or _ends(name, suffixes))) is not None:
            # With its suffix: in the cache of the hub, links with one point to files without.
            found[file.resolve(), file.suffix] = name, Location.of(file), size
    return sorted(found.values(), key=lambda file: file[0].split("/")), not pattern


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


def _below(root: Path, pattern: list[str]) -> Iterator[str]:
    """Yield the files below a directory, also in linked ones, but not through a link to a parent."""
    depth = len(pattern) if pattern and "**" not in pattern else math.inf

    def refuse(error: OSError) -> None:
        if not _is_hidden(Path(error.filename).relative_to(root).parts):
            raise DataError(
                f"cannot read {error.filename}: {reason(error)}; allow it or leave it out"
            )

    for parent, names, files in os.walk(root, onerror=refuse, followlinks=True):
        here, parts = Path(parent), Path(parent).relative_to(root).parts
        is_deeper = len(parts) + 1 < depth
        for file in files:
            # A broken link without a suffix may have been one to a directory.
            if is_deeper and "." not in file and not _is_hidden((*parts, file)):
                _size(here / file, is_read=(here / file).is_symlink())
            yield "/".join((*parts, file))
        above = {path.resolve() for path in (here, *here.parents)}
        names[:] = [n for n in names if is_deeper and (here / n).resolve() not in above]


def _stored_files(source: str, skipped: list[str]) -> tuple[list[_File], bool]:
    """Find the files of a file, directory or glob in a store, named as on a disk."""
    scheme, _, key = source.partition("://")
    fixed, pattern = _cut_at_wildcard([name for name in key.split("/") if name])
    root = Location.of_source(f"{scheme}://{'/'.join(fixed)}").pinned()
    if not pattern and root.is_file():
        return [(root.name, root, root.size_bytes())], False
    sizes = dict(root.files())
    names = _shown(sizes, pattern, skipped)
    if not names:
        root.exists()  # raises if the bucket is missing
    return [(name, root / name, sizes[name]) for name in names], not pattern


def _shown(names: Iterable[str], pattern: list[str], skipped: list[str]) -> list[str]:
    """Return the names that match; those that do but for a hidden part are added to `skipped`."""
    shown: list[str] = []
    for name in names:
        parts = name.split("/")
        if _matches(parts, pattern) if pattern else not _is_hidden(parts):
            shown.append(name)
        elif not pattern or _matches(parts, pattern, hidden=True):
            skipped.append(name)
    return shown


def _is_hidden(names: Sequence[str]) -> bool:
    return any(name.startswith(_HIDDEN) for name in names)


def _matches(names: list[str], pattern: list[str], hidden: bool = False) -> bool:
    """Match a path like `glob`: `*` stays in one directory, `**` does not, hidden names are skipped."""
    if not pattern or not names:
        return not pattern and not names
    (name, *below), (first, *rest) = names, pattern
    is_shown = hidden or _is_hidden([first]) or not _is_hidden([name])
    if first == "**":
        return _matches(names, rest or ["*"], hidden) or (
            bool(below) and is_shown and _matches(below, pattern, hidden)
        )
    return is_shown and fnmatchcase(name, first) and _matches(below, rest, hidden)


def _cut_at_wildcard(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Cut the components of a path before its first wildcard."""
    at = next((i for i, name in enumerate(names) if glob.has_magic(name)), len(names))
    return list(names[:at]), list(names[at:])


def _file_pieces(path: Location, size: int, name: str, text_field: str) -> Iterator[SourcePiece]:
    # The reader of text looks at the first bytes, which here would be a request.
    if size < LFS_BYTES and (path.is_local or _ends(path.name, (".parquet", *_IDS))):
        refuse_lfs_pointer(path)
    _refuse_kind(path)
    piece = SourcePiece(name, path, 0, size, size)
    if _ends(path.name, (".parquet",)):
        yield from _parquet_pieces(piece, text_field)
    elif _ends(path.name, _IDS):
        yield from _id_pieces(piece, read_layout(path, size))
    elif _ends(path.name, tuple(COMPRESSIONS)):
        if size == 0:
            raise DataError(f"source {path} is empty, not a compressed file; download it again")
        yield replace(piece, text_bytes=size * _TEXT_PER_COMPRESSED_BYTE)
    elif _ends(path.name, (".jsonl", ".ndjson", ".jsonlines")):
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
