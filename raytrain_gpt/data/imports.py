"""Imported token ids: read and checked, never cut.

    .bin      nanoGPT: uint16 ids without a header; llm.c: 256 int32 (magic, version, number of ids), then
              uint16 (GPT-2) or uint32 (LLaMA 3) ids
    .npy      a 1-D array of integers, as build-nanogpt writes them
    .parquet  lists of integers, row after row, in a column input_ids, tokens or --text_field

Ids are copied unchanged; documents end at `eot`, and none is added.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from tokenize import TokenError
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.lib import format as npy
from numpy.typing import NDArray

from raytrain_gpt.data.documents import SourcePiece
from raytrain_gpt.data.tokenizer import Tokenizer
from raytrain_gpt.errors import DataError, failure_as, reason
from raytrain_gpt.storage.location import Location

COLUMNS = ("input_ids", "tokens")
_HEADER_BYTES = 1024
_LLMC_KINDS = {20240520: "<u2", 20240801: "<u4"}
"""Magic number -> id dtype of GPT-2 and LLaMA 3 files. Source: llm.c, dev/data."""
_CHUNK_IDS = 2**22
_CHUNK_ROWS = 1024

Ids = NDArray[np.integer[Any]]
_Header = tuple[np.dtype[Any], int, int]
"""Dtype of a file's ids, the byte offset of the first, and their number."""


@dataclass(frozen=True)
class IdChunk:
    """Consecutive ids of a source chunk.

    Attributes:
        ids: Integers (n,).
        name: The file or row group in which `position` counts.
        position: Byte offset in the file, or index in the row group, of the first id.
        step: Difference between the positions of adjacent ids.
        offset: Ids of the source chunk before these.
        opens: Whether the first id certainly starts a document.
    """

    ids: Ids
    name: str
    position: int
    step: int
    offset: int = 0
    opens: bool = False


def read_layout(path: Location, size: int) -> tuple[np.dtype[Any], int]:
    """Return dtype and first byte of the ids, which fill the file; raises a DataError for damage."""
    read_header = _npy_header if path.name.lower().endswith(".npy") else _bin_header
    with failure_as(DataError, f"cannot read source {path}"), path.open() as file:
        dtype, start, num_ids = read_header(path, file, size)
    if size != (expected := start + num_ids * dtype.itemsize):
        raise DataError(
            f"source {path} has {size} bytes, but the {num_ids} ids in its header need {expected}; "
            "download or recreate it"
        )
    return dtype, start


def _bin_header(path: Location, file: pa.NativeFile, size: int) -> _Header:
    head = file.read(min(size, _HEADER_BYTES))
    numbers = np.frombuffer(head[: len(head) // 4 * 4], "<i4")
    magic = int(numbers[0]) if len(numbers) else 0
    if magic not in _LLMC_KINDS:
        if size % 2:
            raise DataError(
                f"source {path} has an odd number of bytes, {size}: it is truncated or does not contain "
                "uint16 ids; download or recreate it"
            )
        return np.dtype("<u2"), 0, size // 2
    num_ids = int(numbers[2]) if len(numbers) > 2 else 0
    return np.dtype(_LLMC_KINDS[magic]), _HEADER_BYTES, num_ids


def _npy_header(path: Location, file: pa.NativeFile, size: int) -> _Header:
    try:
        read_header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
        shape, _, dtype = read_header[npy.read_magic(file)](file)
    except (ValueError, KeyError, TokenError) as error:
        raise DataError(
            f"source {path} is not a .npy file of numbers: {reason(error)}; recreate it"
        ) from None
    if len(shape) != 1 or dtype.kind not in "ui":
        raise DataError(
            f"source {path} contains {dtype} of shape {shape}, not a 1-D array of integers; save the "
            "ids as numpy.uint16 (tokens,)"
        )
    return dtype, int(file.tell()), shape[0]


def id_column(schema: pa.Schema, text_field: str) -> str | None:
    """Return the token id column of a parquet file, or None without one."""
    columns = [text_field] if text_field in schema.names else COLUMNS
    for column in columns:
        kind: Any = schema.field(column).type if column in schema.names else None
        is_list = isinstance(kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType)
        if is_list and pa.types.is_integer(kind.value_type):
            return column
    return None


def read_ids(piece: SourcePiece, tokenizer: Tokenizer) -> Iterator[IdChunk]:
    """Yield a chunk's ids; raises a DataError if the file is damaged or an id is outside the vocabulary."""
    is_parquet = piece.location.name.lower().endswith(".parquet")
    chunks = _parquet_chunks if is_parquet else _flat_chunks
    num_ids = tokenizer.n_vocab
    offset, opens = 0, False
    for chunk in chunks(piece):
        _refuse_width(piece.location, chunk.ids, tokenizer)
        low, top = int(chunk.ids.min(initial=0)), int(chunk.ids.max(initial=0))
        if low < 0 or top >= num_ids:
            at = int(chunk.ids.argmin() if low < 0 else chunk.ids.argmax())
            raise DataError(
                f"{piece.location} has token id {chunk.ids[at]} at {chunk.position + at * chunk.step} of "
                f"{chunk.name}, but the vocabulary of {tokenizer.name} is 0 to {num_ids - 1}; set "
                "--tokenizer to the one that made the ids"
            )
        if len(chunk.ids):
            yield replace(chunk, offset=offset, opens=opens)
            offset, opens = offset + len(chunk.ids), bool(chunk.ids[-1] == tokenizer.eot_token)


def _refuse_width(path: Location, ids: Ids, tokenizer: Tokenizer) -> None:
    """Raise a DataError for ids of 16 bits that cannot be all, or are halves or quarters of wider ones."""
    width, num_ids, few = ids.dtype.itemsize, tokenizer.n_vocab, ids[:_CHUNK_ROWS]
    if width == 2 and num_ids > 2**16:
        why = f"{tokenizer.name} has {num_ids} ids"
    elif width <= 4 and len(few) >= 64 and sum(few[i::4].max() <= 1 for i in range(4)) > 1:
        why = "every second one is 0 or 1, which no text has"
    else:
        return
    raise DataError(
        f"{path} is read as {ids.dtype} ids, but {why}; if they are wider, save them as .npy: "
        f"numpy.save('ids.npy', numpy.fromfile('{path.name}', 'uint32')), or 'int64' for 64 bits"
    )


def _flat_chunks(piece: SourcePiece) -> Iterator[IdChunk]:
    dtype = np.dtype(piece.ids)
    step = _CHUNK_IDS * dtype.itemsize
    with failure_as(DataError, f"cannot read {piece.location}"), piece.location.open() as file:
        for start in range(piece.start, piece.stop, step):
            num_bytes = min(step, piece.stop - start)
            if len(content := file.read_at(num_bytes, start)) != num_bytes:
                raise DataError(
                    f"{piece.location} ends at byte {start + len(content)} instead of {piece.stop}: it "
                    "changed while it was read; run the command again"
                )
            yield IdChunk(np.frombuffer(content, dtype), piece.name, start, dtype.itemsize)


def _parquet_chunks(piece: SourcePiece) -> Iterator[IdChunk]:
    group, row = piece.start, 0
    try:
        with piece.location.open() as source, pq.ParquetFile(source) as file:
            for group in range(piece.start, piece.stop):
                position = row = 0
                for batch in file.iter_batches(_CHUNK_ROWS, [group], columns=[piece.ids]):
                    column = batch.column(0)
                    ids = column.flatten()
                    if column.null_count or ids.null_count:
                        raise TypeError(f"{piece.ids} is null in one of {len(batch)} rows")
                    yield IdChunk(ids.to_numpy(), f"{piece.name}:{group}", position, 1)
                    position += len(ids)
                    row += len(batch)
    except (OSError, pa.ArrowException, TypeError) as error:
        raise DataError(
            f"{piece.location} row group {group} from row {row}: {reason(error)}; fix the file"
        ) from None
