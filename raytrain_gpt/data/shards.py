"""A dataset on disk: parquet shards of token ids and a manifest.

    <dataset>/manifest.json        written last and atomically: without it the dataset is not finished
    <dataset>/tokenizer.json
    <dataset>/train-00000.parquet  one column `tokens` (uint16 or uint32), row groups of 2^18+1 tokens
    <dataset>/val-00000.parquet

A row group is the unit of reading; it holds (tokens − 1) // seq_len whole sequences, none of which
crosses into the next one. BYTE_STREAM_SPLIT with zstd takes 1.49 bytes a token, a raw file 2.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from raytrain_gpt.data.tokenizer import (
    MAX_NAME_LENGTH,
    MAX_VOCAB_SIZE,
    Dtype,
    Hash,
    Tokens,
    token_dtype,
)
from raytrain_gpt.errors import DataError, damage_as, reason
from raytrain_gpt.format import shell
from raytrain_gpt.parsing import parse_json
from raytrain_gpt.storage.location import Location, LocationLike, force_to_disk, unfinished_path
from raytrain_gpt.storage.row_group_cache import RowGroupCache
from raytrain_gpt.storage.stored_parquet import stored_shard

FORMAT_VERSION = 1
ROW_GROUP_TOKENS = 2**18 + 1
MANIFEST_FILE = "manifest.json"
COLUMN = "tokens"
_MAX_ROW_GROUPS = 2**24

Split = Literal["train", "val"]
SPLITS: tuple[Split, ...] = ("train", "val")


_Count = Annotated[int, Field(ge=0, lt=2**53)]


class Shard(BaseModel):
    """One parquet file."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    path: str = Field(pattern=r"^\w[\w.-]{0,99}$")
    split: Split
    tokens: _Count
    documents: _Count
    text_bytes: _Count
    file_bytes: _Count
    sha256: str


class Manifest(BaseModel):
    """The content of a dataset; two datasets with equal hashes train the same model."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    format_version: int
    tokenizer: str = Field(max_length=MAX_NAME_LENGTH)
    vocab_hash: Hash
    vocab_size: int = Field(ge=1, le=MAX_VOCAB_SIZE)
    eot_token: _Count
    dtype: Dtype
    row_group_tokens: int = Field(ge=1, le=2**27)
    shards: tuple[Shard, ...]
    source: dict[str, Any]

    @model_validator(mode="after")
    def _is_possible(self) -> Manifest:
        if not self.tokenizer.isprintable():
            raise ValueError("the name of its tokenizer has characters that cannot be printed")
        if self.dtype != token_dtype(self.vocab_size) or self.eot_token >= self.vocab_size:
            raise ValueError(
                f"eot_token={self.eot_token} and dtype={self.dtype} do not fit vocab_size={self.vocab_size}"
            )
        for split in SPLITS:
            if not self.split_shards(split):
                raise ValueError(f"the {split} split has no shards")
        if sum(shard.tokens for shard in self.shards) > _MAX_ROW_GROUPS * self.row_group_tokens:
            raise ValueError(
                f"row_group_tokens={self.row_group_tokens}: more than {_MAX_ROW_GROUPS} row groups"
            )
        for name in ("sources", "hub_commits"):
            TypeAdapter(list[str]).validate_python(self.source.get(name, []))
        for name in ("bad_documents", "duplicates"):
            TypeAdapter(int).validate_python(self.source.get(name, 0))
        return self

    @property
    def hash(self) -> str:
        """Hash of everything but the source, kept in every checkpoint."""
        content = json.dumps(
            self.model_dump(exclude={"source"}), sort_keys=True, separators=(",", ":")
        )
        return hashlib.sha256(content.encode()).hexdigest()

    def split_shards(self, split: Split) -> list[Shard]:
        """The shards of a split, in manifest order."""
        return [shard for shard in self.shards if shard.split == split]

    def split_tokens(self, split: Split) -> int:
        """Tokens in a split."""
        return sum(shard.tokens for shard in self.split_shards(split))

    def row_group_sequences(self, split: Split, seq_len: int) -> NDArray[np.int64]:
        """Whole sequences in every row group of a split, int64 (row groups,)."""
        tokens, counts = self._row_group_counts(split)
        sizes = np.full(counts.sum(), self.row_group_tokens, np.int64)
        last = np.cumsum(counts)[counts > 0] - 1
        sizes[last] = (tokens - (counts - 1) * self.row_group_tokens)[counts > 0]
        return (sizes - 1) // seq_len

    def find_row_groups(self, split: Split, numbers: NDArray[np.int64]) -> list[tuple[Shard, int]]:
        """(shard, index inside it) of row groups by their numbers, int64 (n,), in manifest order."""
        shards = self.split_shards(split)
        counts = self._row_group_counts(split)[1]
        ends = np.cumsum(counts)
        of_shard = np.searchsorted(ends, numbers, side="right")
        indices = numbers - (ends - counts)[of_shard]
        return [(shards[s], int(i)) for s, i in zip(of_shard, indices, strict=True)]

    def _row_group_counts(self, split: Split) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens and number of row groups of each shard, int64 (shards,) each."""
        tokens = np.array([shard.tokens for shard in self.split_shards(split)], np.int64)
        return tokens, -(-tokens // self.row_group_tokens)


class ShardWriter:
    """Writes one shard row group by row group, under another name until it is complete.

    A shard for an object store is written to the local disk first.
    """

    def __init__(self, path: LocationLike, dtype: Dtype, row_group_tokens: int) -> None:
        self._path = Location.of(path)
        if self._path.is_local:
            self._unfinished = unfinished_path(self._path.path)
        else:
            descriptor, name = tempfile.mkstemp(suffix=f"-{self._path.name}")
            os.close(descriptor)
            self._unfinished = Path(name)
        self._dtype = np.dtype(dtype)
        self._row_group_tokens = row_group_tokens
        schema = pa.schema([pa.field(COLUMN, pa.from_numpy_dtype(self._dtype), nullable=False)])
        self._file = pa.OSFile(str(self._unfinished), "wb")
        self._writer = pq.ParquetWriter(
            self._file,
            schema,
            compression="zstd",
            use_dictionary=False,
            column_encoding={COLUMN: "BYTE_STREAM_SPLIT"},
        )
        self._buffer: list[NDArray[np.integer[Any]]] = []
        self._buffered = 0
        self.tokens = self.documents = self.text_bytes = 0

    def add(
        self, tokens: NDArray[np.integer[Any]], text_bytes: int, num_documents: int = 1
    ) -> None:
        """Append token ids in which `num_documents` documents end."""
        self._buffer.append(tokens)
        self._buffered += len(tokens)
        self.tokens += len(tokens)
        self.documents += num_documents
        self.text_bytes += text_bytes
        if self._buffered >= self._row_group_tokens:
            self._write(whole_only=True)

    def _write(self, whole_only: bool) -> None:
        tokens = np.concatenate(self._buffer)
        size = self._row_group_tokens
        end = len(tokens) // size * size if whole_only else len(tokens)
        for start in range(0, end, size):
            group = tokens[start : min(start + size, end)].astype(self._dtype, copy=False)
            self._writer.write_table(pa.table({COLUMN: group}, schema=self._writer.schema))
        self._buffer, self._buffered = [tokens[end:]], len(tokens) - end

    def close(self, split: Split) -> Shard:
        """Finish the file, give it its name and return its manifest entry."""
        if self._buffered:
            self._write(whole_only=False)
        self._writer.close()
        self._file.close()
        sha256 = Location.of(self._unfinished).sha256()
        file_bytes = self._unfinished.stat().st_size
        if self._path.is_local:
            # The note or manifest that vouches for this shard must not reach the disk before it.
            force_to_disk(self._unfinished)
            self._unfinished.replace(self._path.path)
            force_to_disk(self._path.path.parent)
        else:
            self._path.upload(self._unfinished)
            self._unfinished.unlink()
        return Shard(
            path=self._path.name,
            split=split,
            tokens=self.tokens,
            documents=self.documents,
            text_bytes=self.text_bytes,
            file_bytes=file_bytes,
            sha256=sha256,
        )

    def discard(self) -> None:
        """Give up and leave no file."""
        with contextlib.suppress(OSError):  # a full disk refuses the footer, too
            self._writer.close()
        with contextlib.suppress(OSError):
            self._file.close()
        self._unfinished.unlink(missing_ok=True)


def repair_advice(directory: LocationLike, manifest: Manifest) -> str:
    """For messages: the command that restores missing shards, or the tokenizer, of a dataset."""
    sources = manifest.source.get("sources", [])
    source = "SOURCE …"
    if len(sources) == 1:
        source = shell(_at_commit(sources[0], manifest.source.get("hub_commits", [])))
    return (
        f"repeat the command that prepared it, with the same options: raytrain-gpt prepare "
        f"{source} {shell('--out', directory, '--tokenizer', manifest.tokenizer)}"
    )


def _at_commit(source: str, hub_commits: list[str]) -> str:
    """A source on the hub, pinned to its commit among `OWNER/NAME@COMMIT`."""
    for pinned in hub_commits:
        begin = f"hf://datasets/{pinned.partition('@')[0]}"
        rest = source.removeprefix(begin)
        if rest != source and rest[:1] in {"", "/", "@"}:
            _, slash, path = rest.partition("/")
            return f"hf://datasets/{pinned}{slash}{path}"
    return source


def write_manifest(directory: LocationLike, manifest: Manifest) -> None:
    """Write the manifest, which makes the directory a dataset."""
    content = {**manifest.model_dump(), "manifest_hash": manifest.hash}
    path = Location.of(directory) / MANIFEST_FILE
    path.write_text(json.dumps(content, indent=1) + "\n")
    if path.is_local:
        force_to_disk(path.path.parent)


def read_manifest(directory: LocationLike) -> Manifest:
    """The manifest of a dataset.

    Raises:
        DataError: there is no dataset, it has another format version, or its hash does not match.
    """
    directory = Location.of(directory)
    path = directory / MANIFEST_FILE
    prepare = f"make one with: raytrain-gpt prepare SOURCE --out {shell(directory)}"
    anew = f"remove {directory} and repeat the command that prepared it"
    if not directory.exists():
        raise DataError(f"data_path {directory} does not exist; {prepare}")
    if directory.is_file():
        raise DataError(
            f"data_path {directory} is a file, not a dataset; make one of it with: raytrain-gpt prepare "
            f"{shell(directory)} --out DIR"
        )
    if not path.exists():
        raise DataError(
            f"{directory} has no {MANIFEST_FILE}, so it is not a finished dataset; {prepare}"
        )
    with damage_as(DataError, path, f"; {anew}"):
        content = parse_json(path.read_bytes())
        version = content["format_version"]
        if version != FORMAT_VERSION:
            raise DataError(
                f"{path} has format version {version!r}, but this raytrain-gpt reads {FORMAT_VERSION}; "
                "upgrade raytrain-gpt or prepare the data in another directory"
            )
        stated = str(content.pop("manifest_hash"))
        manifest = Manifest.model_validate(content)
    if manifest.hash != stated:
        raise DataError(
            f"{path} was changed: its content has hash {manifest.hash[:12]} instead of {stated[:12]!r}; "
            f"{anew}"
        )
    return manifest


def read_row_group(
    directory: LocationLike,
    manifest: Manifest,
    shard: Shard,
    index: int,
    cache: RowGroupCache | None = None,
    since: float = math.inf,
) -> Tokens:
    """Token ids of row group `index` of a shard: uint16 or uint32 (tokens,), read-only.

    Args:
        cache: If there is one, it is asked first, and given what it lacks.
        since: Unix time: a file on a disk that changed later is compared with its hash.

    Raises:
        DataError: it cannot be read, contains an id outside the vocabulary, or is another file by now.
    """
    path = Location.of(directory) / shard.path
    kept = cache.get(shard.sha256, index) if cache else None
    if kept is not None:
        tokens: Tokens = np.frombuffer(kept, manifest.dtype)
        is_unchanged = True
    else:
        tokens, is_unchanged = _stored_row_group(path, shard, index, since)
    wanted = min(manifest.row_group_tokens, shard.tokens - index * manifest.row_group_tokens)
    if tokens.shape != (wanted,) or tokens.dtype != manifest.dtype:
        raise DataError(
            f"{path} has {tokens.dtype} {tokens.shape} in row group {index}, expected {manifest.dtype} "
            f"({wanted},); remove this file and {repair_advice(directory, manifest)}"
        )
    top = int(tokens.max(initial=0))
    if top >= manifest.vocab_size:
        at = int(tokens.argmax()) + index * manifest.row_group_tokens
        raise DataError(
            f"{path} has token id {top} at token {at} (row group {index}), but the vocabulary of "
            f"{manifest.tokenizer} ends at {manifest.vocab_size - 1}; remove this file and "
            f"{repair_advice(directory, manifest)}"
        )
    if not is_unchanged:
        raise DataError(
            f"shard {path} was changed: its size or SHA-256 differs from the "
            f"manifest's; remove this file and {repair_advice(directory, manifest)}"
        )
    if cache and kept is None:
        cache.put(shard.sha256, index, tokens.view(np.uint8).data)
    return tokens


def _stored_row_group(
    path: Location, shard: Shard, index: int, since: float
) -> tuple[Tokens, bool]:
    """Token ids, and whether the file is still the manifest's."""
    is_unchanged = True
    try:
        if path.is_local:
            with path.open() as source, pq.ParquetFile(source) as file:
                column = file.read_row_group(index, columns=[COLUMN])[COLUMN]
            is_unchanged = _is_unchanged(path, shard, since)
        else:
            column = stored_shard(path, shard.sha256).read_row_group(index, COLUMN)
        tokens: Tokens = column.combine_chunks().to_numpy()
        return tokens, is_unchanged
    except (OSError, pa.ArrowException, KeyError, IndexError) as error:
        raise DataError(f"cannot read row group {index} of {path}: {reason(error)}") from None


def _is_unchanged(path: Location, shard: Shard, since: float) -> bool:
    """Whether a file is still the manifest's; one look at the inode unless it changed `since`."""
    with damage_as(DataError, path):
        found = path.path.stat()
        if found.st_size != shard.file_bytes:
            return False
        # Not the time of modification, which a copy may keep.
        return (
            found.st_ctime <= since
            or _hash_of(path, found.st_ino, found.st_ctime_ns) == shard.sha256
        )


@lru_cache(maxsize=1024)
def _hash_of(path: Location, _inode: int, _changed_ns: int) -> str:
    return path.sha256()
