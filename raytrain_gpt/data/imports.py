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
import tiktoken
from numpy.typing import NDArray

from raytrain_gpt.data.documents import SourcePiece
from raytrain_gpt.errors import DataError, failure_as, reason
from raytrain_gpt.storage.location import Location

COLUMNS = ("input_ids", "tokens")
_HEADER_BYTES = 1024
_LLMC_KINDS = {20240520: "<u2", 20240801: "<u4"}
"""Magic number -> id dtype of GPT-2 and LLaMA 3 files. Source: llm.c, dev/data."""
_CHUNK_IDS = 2**22
_CHUNK_ROWS = 1024

Ids = NDArray[np.integer[Any]]
Layout = tuple[np.dtype[Any], int]
"""Dtype of a file's ids, and the byte offset of the first; they extend to the end of the file."""


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


def read_layout(path: Location, size: int) -> Layout:
    """Read the layout of a `.bin` or `.npy` file of `size` bytes; raises a DataError for a damaged file."""
    with failure_as(DataError, f"cannot read source {path}"), path.open() as file:
        if path.name.lower().endswith(".npy"):
            return _npy_layout(path, file, size)
        return _bin_layout(path, file.read(min(size, _HEADER_BYTES)), size)


def _bin_layout(path: Location, head: bytes, size: int) -> Layout:
    numbers = np.frombuffer(head[: len(head) // 4 * 4], "<i4")
    magic = int(numbers[0]) if len(numbers) else 0
    if magic not in _LLMC_KINDS:
        if size % 2:
            raise DataError(
                f"source {path} has an odd number of bytes, {size}: it is truncated or does not contain "
                "uint16 ids; download or recreate it"
            )
        return np.dtype("<u2"), 0
    dtype = np.dtype(_LLMC_KINDS[magic])
    num_ids = int(numbers[2]) if len(numbers) > 2 else 0
    _check_size(path, size, num_ids, _HEADER_BYTES + num_ids * dtype.itemsize)
    return dtype, _HEADER_BYTES


def _npy_layout(path: Location, file: pa.NativeFile, size: int) -> Layout:
    try:
        version = np.lib.format.read_magic(file)
        read_header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, _, dtype = read_header(file)
    except (ValueError, KeyError, TokenError) as error:
        raise DataError(
            f"source {path} is not a .npy file of numbers: {reason(error)}; recreate it"
        ) from None
    if len(shape) != 1 or dtype.kind not in "ui":
        raise DataError(
            f"source {path} contains {dtype} of shape {shape}, not a 1-D array of integers; save the "
            "ids as numpy.uint16 (tokens,)"
        )
    start = int(file.tell())
    _check_size(path, size, shape[0], start + shape[0] * dtype.itemsize)
    return dtype, start


def _check_size(path: Location, size: int, num_ids: int, expected: int) -> None:
    if size != expected:
        raise DataError(
            f"source {path} has {size} bytes, but the {num_ids} ids in its header need {expected}; "
            "download or recreate it"
        )


def id_column(schema: pa.Schema, text_field: str) -> str | None:
    """Return the token id column of a parquet file, or None without one."""
    columns = [text_field] if text_field in schema.names else COLUMNS
    present = [column for column in columns if column in schema.names]
    return next((column for column in present if _is_id_list(schema.field(column).type)), None)


def _is_id_list(kind: pa.DataType) -> bool:
    checks = pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list
    return any(check(kind) for check in checks) and bool(pa.types.is_integer(kind.value_type))


def read_ids(piece: SourcePiece, encoding: tiktoken.Encoding) -> Iterator[IdChunk]:
    """Yield a chunk's ids; raises a DataError if the file is damaged or an id is outside the vocabulary."""
    is_parquet = piece.location.name.lower().endswith(".parquet")
    chunks = _parquet_chunks if is_parquet else _flat_chunks
    num_ids = encoding.max_token_value + 1
    offset, opens = 0, False
    for chunk in chunks(piece):
        _refuse_width(piece.location, chunk.ids, encoding)
        low, top = int(chunk.ids.min(initial=0)), int(chunk.ids.max(initial=0))
        if low < 0 or top >= num_ids:
            at = int(chunk.ids.argmin() if low < 0 else chunk.ids.argmax())
            raise DataError(
                f"{piece.location} has token id {chunk.ids[at]} at {chunk.position + at * chunk.step} of "
                f"{chunk.name}, but the vocabulary of {encoding.name} is 0 to {num_ids - 1}; set --tokenizer "
                "to the one that made the ids"
            )
        if len(chunk.ids):
            yield replace(chunk, offset=offset, opens=opens)
            offset, opens = offset + len(chunk.ids), bool(chunk.ids[-1] == encoding.eot_token)


def _refuse_width(path: Location, ids: Ids, encoding: tiktoken.Encoding) -> None:
    """Raise a DataError for ids of 16 bits that cannot be all, or are halves or quarters of wider ones."""
    width, num_ids, few = ids.dtype.itemsize, encoding.max_token_value + 1, ids[:_CHUNK_ROWS]
    if width == 2 and num_ids > 2**16:
        why = f"{encoding.name} has {num_ids} ids"
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
