"""A dataset on disk: parquet shards of token ids and a manifest.

    <dataset>/manifest.json        written last and atomically; without it the dataset is unfinished
    <dataset>/tokenizer.json
    <dataset>/train-00000.parquet  one column `tokens` (uint16 or uint32), row groups of 2^18+1 tokens
    <dataset>/val-00000.parquet

A row group is the unit of reading and holds (tokens − 1) // seq_len complete sequences. BYTE_STREAM_SPLIT
with zstd takes 1.49 bytes per token, a raw file 2.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
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
from raytrain_gpt.errors import DataError, damage_as, failure_as
from raytrain_gpt.format import shell
from raytrain_gpt.parsing import parse_json
from raytrain_gpt.storage.location import Location, LocationLike, force_to_disk, unfinished_path
from raytrain_gpt.storage.stored_parquet import stored_shard

FORMAT_VERSION = 1
ROW_GROUP_TOKENS = 2**18 + 1
MANIFEST_FILE = "manifest.json"
COLUMN = "tokens"
REPAIR = "remove the dataset and repeat the command that prepared it"
_MAX_ROW_GROUPS = 2**24

Split = Literal["train", "val"]
SPLITS: tuple[Split, ...] = ("train", "val")

_Count = Annotated[int, Field(ge=0, lt=2**53)]


class Shard(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    path: str = Field(pattern=r"^\w[\w.-]{0,99}$")
    split: Split
    tokens: _Count
    documents: _Count
    text_bytes: _Count
    token_bytes: _Count | None = None
    """Bytes of the tokens where they differ from those of the text, as after NFC normalization."""
    file_bytes: _Count
    sha256: str


class Manifest(BaseModel):
    """Content of a dataset; datasets with the same hash train the same model."""

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
            raise ValueError("its tokenizer name has unprintable characters")
        if self.dtype != token_dtype(self.vocab_size) or self.eot_token >= self.vocab_size:
            raise ValueError(
                f"eot_token={self.eot_token} and dtype={self.dtype} do not fit vocab_size={self.vocab_size}"
            )
        for split in SPLITS:
            if not self.split_shards(split):
                raise ValueError(f"the {split} split has no shards")
        if sum(shard.tokens for shard in self.shards) > _MAX_ROW_GROUPS * self.row_group_tokens:
            raise ValueError(
                f"row_group_tokens={self.row_group_tokens} gives more than {_MAX_ROW_GROUPS} row groups"
            )
        for name in ("bad_documents", "duplicates"):
            TypeAdapter(int).validate_python(self.source.get(name, 0))
        return self

    @property
    def hash(self) -> str:
        """Hash of everything but the source, stored in every checkpoint."""
        fields = self.model_dump(exclude={"source"}, exclude_none=True)
        content = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(content.encode()).hexdigest()

    def split_shards(self, split: Split) -> list[Shard]:
        return [shard for shard in self.shards if shard.split == split]

    def split_tokens(self, split: Split) -> int:
        return sum(shard.tokens for shard in self.split_shards(split))

    def text_share(self, split: Split) -> float:
        """Return the bytes of a split's text per byte of its tokens."""
        shards = self.split_shards(split)
        of_tokens = sum(s.text_bytes if s.token_bytes is None else s.token_bytes for s in shards)
        return sum(shard.text_bytes for shard in shards) / of_tokens if of_tokens else 1.0

    def row_group_sequences(self, split: Split, seq_len: int) -> NDArray[np.int64]:
        """Count the complete sequences of each row group of a split, int64 (row groups,)."""
        tokens, counts = self._row_group_counts(split)
        sizes = np.full(counts.sum(), self.row_group_tokens, np.int64)
        last = np.cumsum(counts)[counts > 0] - 1
        sizes[last] = (tokens - (counts - 1) * self.row_group_tokens)[counts > 0]
        return (sizes - 1) // seq_len

    def find_row_groups(self, split: Split, numbers: NDArray[np.int64]) -> list[tuple[Shard, int]]:
        """Return (shard, index in it) of row groups by their `numbers` in manifest order, int64 (n,)."""
        shards = self.split_shards(split)
        counts = self._row_group_counts(split)[1]
        ends = np.cumsum(counts)
        at = np.searchsorted(ends, numbers, side="right")
        indices = numbers - (ends - counts)[at]
        return [(shards[s], int(i)) for s, i in zip(at, indices, strict=True)]

    def _row_group_counts(self, split: Split) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return tokens and row groups of each shard, int64 (shards,) each."""
        tokens = np.array([shard.tokens for shard in self.split_shards(split)], np.int64)
        return tokens, -(-tokens // self.row_group_tokens)


class ShardWriter:
    """Writer of one shard, under a temporary name on a local disk until it is complete."""

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
        self.tokens = self.documents = self.text_bytes = self.token_bytes = 0

    def add(
        self,
        tokens: NDArray[np.integer[Any]],
        text_bytes: int,
        num_documents: int = 1,
        token_bytes: int | None = None,
    ) -> None:
        """Append token ids in which `num_documents` documents end; their bytes may differ from the text's."""
        self._buffer.append(tokens)
        self._buffered += len(tokens)
        self.tokens += len(tokens)
        self.documents += num_documents
        self.text_bytes += text_bytes
        self.token_bytes += text_bytes if token_bytes is None else token_bytes
        if self._buffered >= self._row_group_tokens:
            self._write(full_only=True)

    def _write(self, full_only: bool) -> None:
        tokens = np.concatenate(self._buffer)
        size = self._row_group_tokens
        end = len(tokens) // size * size if full_only else len(tokens)
        for start in range(0, end, size):
            group = tokens[start : start + size].astype(self._dtype, copy=False)
            self._writer.write_table(pa.table({COLUMN: group}, schema=self._writer.schema))
        self._buffer, self._buffered = [tokens[end:]], len(tokens) - end

    def close(self, split: Split) -> Shard:
        """Complete and rename the file; returns its manifest entry."""
        if self._buffered:
            self._write(full_only=False)
        self._writer.close()
        self._file.close()
        sha256 = Location.of(self._unfinished).sha256()
        file_bytes = self._unfinished.stat().st_size
        if self._path.is_local:
            # The shard must reach the disk before the result or manifest that lists it.
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
            token_bytes=None if self.token_bytes == self.text_bytes else self.token_bytes,
            file_bytes=file_bytes,
            sha256=sha256,
        )

    def discard(self) -> None:
        with contextlib.suppress(OSError):  # a full disk also refuses the footer
            self._writer.close()
        with contextlib.suppress(OSError):
            self._file.close()
        self._unfinished.unlink(missing_ok=True)


def write_manifest(directory: LocationLike, manifest: Manifest) -> None:
    content = {**manifest.model_dump(exclude_none=True), "manifest_hash": manifest.hash}
    path = Location.of(directory) / MANIFEST_FILE
    path.write_text(json.dumps(content, indent=1) + "\n")
    if path.is_local:
        force_to_disk(path.path.parent)


def read_manifest(directory: LocationLike) -> Manifest:
    """Read a manifest; raises a DataError if it is missing or damaged, or its format is unknown."""
    directory = Location.of(directory)
    path = directory / MANIFEST_FILE
    prepare = f"make one with: raytrain-gpt prepare SOURCE --out {shell(directory)}"
    if not directory.exists():
        raise DataError(f"data_path {directory} does not exist; {prepare}")
    if not path.is_file():
        raise DataError(
            f"{directory} has no {MANIFEST_FILE}, so it is not a finished dataset; {prepare}"
        )
    with damage_as(DataError, path, f"; {REPAIR}"):
        content = parse_json(path.read_bytes())
        if (version := content["format_version"]) != FORMAT_VERSION:
            raise DataError(
                f"{path} has format version {version!r}, but this raytrain-gpt reads {FORMAT_VERSION}; "
                "upgrade raytrain-gpt or prepare the data in another directory"
            )
        stated = str(content.pop("manifest_hash"))
        manifest = Manifest.model_validate(content)
    if manifest.hash != stated:
        raise DataError(
            f"{path} was changed: its content has hash {manifest.hash[:12]} instead of {stated[:12]!r}; "
            f"{REPAIR}"
        )
    return manifest


def read_row_group(directory: LocationLike, manifest: Manifest, shard: Shard, index: int) -> Tokens:
    """Read row group `index` of a shard; returns token ids, uint16 or uint32 (tokens,), read-only.

    Raises a DataError if reading fails, or finds an id outside the vocabulary.
    """
    path = Location.of(directory) / shard.path
    num = min(manifest.row_group_tokens, shard.tokens - index * manifest.row_group_tokens)
    tokens = _stored_row_group(path, shard, index, num)
    if tokens.dtype != manifest.dtype:
        raise DataError(
            f"{path} has {tokens.dtype} in row group {index}, expected {manifest.dtype}; {REPAIR}"
        )
    if (top := int(tokens.max(initial=0))) >= manifest.vocab_size:
        at = int(tokens.argmax()) + index * manifest.row_group_tokens
        raise DataError(
            f"{path} has token id {top} at token {at} (row group {index}), but the vocabulary of "
            f"{manifest.tokenizer} ends at {manifest.vocab_size - 1}; {REPAIR}"
        )
    return tokens


def _stored_row_group(path: Location, shard: Shard, index: int, num: int) -> Tokens:
    problem = f"cannot read row group {index} of {path}"
    with failure_as(DataError, problem, "", pa.ArrowException, KeyError, IndexError):
        with contextlib.ExitStack() as opened:
            if path.is_local:
                file = opened.enter_context(pq.ParquetFile(opened.enter_context(path.open())))
            else:
                file = stored_shard(path, shard.sha256).open()
            if (rows := file.metadata.row_group(index).num_rows) != num:  # before they are decoded
                raise DataError(
                    f"{path} has {rows} tokens in row group {index}, expected {num}; {REPAIR}"
                )
            column = file.read_row_group(index, columns=[COLUMN], use_threads=False)[COLUMN]
        tokens: Tokens = column.combine_chunks().to_numpy()
        return tokens
