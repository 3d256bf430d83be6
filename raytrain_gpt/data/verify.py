"""Checks of a dataset against its manifest."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq

from raytrain_gpt.data.shards import COLUMN, REPAIR, Manifest, Shard, read_row_group
from raytrain_gpt.data.tokenizer import vocab_hash
from raytrain_gpt.data.tokenizer_file import read_tokenizer
from raytrain_gpt.errors import DataError, failure_as
from raytrain_gpt.storage.location import Location, LocationLike

_CHECK_THREADS = 16
"""Shards of an object store checked concurrently, with three requests each."""


def check_tokenizer(directory: LocationLike, manifest: Manifest) -> None:
    """Raise a DataError if a dataset's tokenizer is missing, damaged or does not match its shards."""
    if vocab_hash(read_tokenizer(directory)) != manifest.vocab_hash:
        raise DataError(
            f"the tokenizer in {directory} does not match its shards ({manifest.tokenizer}); "
            f"{REPAIR}"
        )


def check_shards(directory: LocationLike, manifest: Manifest, content: bool) -> None:
    """Check every shard; raises the error of the first bad one in manifest order."""
    directory = Location.of(directory)
    with ThreadPoolExecutor(1 if directory.is_local else _CHECK_THREADS) as threads:
        check = partial(check_shard, directory, manifest, content=content)
        list(threads.map(check, manifest.shards))


def check_shard(directory: LocationLike, manifest: Manifest, shard: Shard, content: bool) -> None:
    """Compare a shard with its manifest entry; raises a DataError with expected and actual value.

    Without `content`, read only size and footer, whose statistics have the largest id of every row group.
    """
    path = Location.of(directory) / shard.path
    replace = f"remove this file and {REPAIR}"
    try:
        size = path.size_bytes()
    except FileNotFoundError:
        raise DataError(f"shard {path} is missing; {REPAIR}") from None
    if size != shard.file_bytes:
        raise DataError(f"shard {path} has {size} bytes, expected {shard.file_bytes}; {REPAIR}")
    problem = f"shard {path} is not a parquet file"
    with failure_as(DataError, problem, f"; {replace}", pa.ArrowException), path.open() as file:
        metadata = pq.read_metadata(file)
    field = metadata.schema.to_arrow_schema()
    if field.names != [COLUMN] or str(field.types[0]) != manifest.dtype:
        raise DataError(
            f"shard {path} has columns {dict(zip(field.names, map(str, field.types), strict=True))}, "
            f"expected {{{COLUMN!r}: {manifest.dtype!r}}}; {replace}"
        )
    groups = -(-shard.tokens // manifest.row_group_tokens)
    if (metadata.num_rows, metadata.num_row_groups) != (shard.tokens, groups):
        raise DataError(
            f"shard {path} has {metadata.num_rows} tokens in {metadata.num_row_groups} row groups, "
            f"expected {shard.tokens} in {groups}; {replace}"
        )
    for i in range(groups):
        statistics = metadata.row_group(i).column(0).statistics
        has_top = statistics is not None and statistics.has_min_max
        if has_top and statistics.max >= manifest.vocab_size:
            raise DataError(
                f"shard {path} has token id {statistics.max} in row group {i}, but the vocabulary of "
                f"{manifest.tokenizer} ends at {manifest.vocab_size - 1}; {replace}"
            )
    if content:
        if path.sha256() != shard.sha256:
            raise DataError(
                f"shard {path} was changed: its SHA-256 differs from the manifest's; {replace}"
            )
        for i in range(groups):
            read_row_group(directory, manifest, shard, i)
