"""Contents of a dataset, and checks of it against its manifest."""

from __future__ import annotations

import codecs
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from raytrain_gpt.data.documents import BAD_FILE
from raytrain_gpt.data.shards import REPAIR, SPLITS, Manifest, Shard, read_row_group
from raytrain_gpt.data.tokenizer_file import read_tokenizer
from raytrain_gpt.errors import DataError
from raytrain_gpt.format import Log, amount, count, size
from raytrain_gpt.storage.location import Location, LocationLike

SAMPLE_TOKENS = 60
_CHECK_THREADS = 16
"""Shards of an object store checked concurrently, with three requests each."""


def check_tokenizer(directory: LocationLike, manifest: Manifest) -> None:
    """Raise a DataError if a dataset's tokenizer is missing, damaged or does not match its shards."""
    if read_tokenizer(directory).hash != manifest.vocab_hash:
        raise DataError(
            f"the tokenizer in {directory} does not match its shards ({manifest.tokenizer}); {REPAIR}"
        )


def check_shards(directory: LocationLike, manifest: Manifest, content: bool) -> None:
    """Check every shard; raises the error of the first bad one in manifest order."""
    directory = Location.of(directory)
    with ThreadPoolExecutor(1 if directory.is_local else _CHECK_THREADS) as threads:
        check = partial(check_shard, directory, manifest, content=content)
        list(threads.map(check, manifest.shards))


def check_shard(directory: LocationLike, manifest: Manifest, shard: Shard, content: bool) -> None:
    """Compare a shard with its manifest entry; raises a DataError with expected and actual value.

    Without `content`, look only at its size.
    """
    path = Location.of(directory) / shard.path
    try:
        num_bytes = path.size_bytes()
    except FileNotFoundError:
        raise DataError(f"shard {path} is missing; {REPAIR}") from None
    if num_bytes != shard.file_bytes:
        raise DataError(
            f"shard {path} has {num_bytes} bytes, expected {shard.file_bytes}; {REPAIR}"
        )
    if content:
        if path.sha256() != shard.sha256:
            raise DataError(
                f"shard {path} was changed: its SHA-256 differs from the manifest's; {REPAIR}"
            )
        for i in range(-(-shard.tokens // manifest.row_group_tokens)):
            read_row_group(directory, manifest, shard, i)


def describe_dataset(directory: Location, manifest: Manifest, say: Log) -> dict[str, Any]:
    """Print the contents of a dataset, and return them as JSON types."""
    splits: dict[str, Any] = {}
    for split in SPLITS:
        shards = manifest.split_shards(split)
        splits[split] = {
            "shards": len(shards),
            "tokens": manifest.split_tokens(split),
            "documents": sum(shard.documents for shard in shards),
            "text_bytes": sum(shard.text_bytes for shard in shards),
            "file_bytes": sum(shard.file_bytes for shard in shards),
        }
    say(
        f"dataset {directory} | tokenizer {manifest.tokenizer}, {manifest.vocab_size} ids, {manifest.dtype}"
    )
    for name, one in splits.items():
        say(
            f"  {name:5} {amount(one['tokens'])} tokens in {count(one['documents'], 'document')}, "
            f"{one['text_bytes'] / max(1, one['tokens']):.2f} bytes/token, {count(one['shards'], 'shard')}, "
            f"{size(one['file_bytes'])}"
        )
    skipped = {name: manifest.source.get(name, 0) for name in ("bad_documents", "duplicates")}
    if skipped["bad_documents"]:
        say(f"  skipped: {skipped['bad_documents']} unreadable, see {directory / BAD_FILE}")
    if skipped["duplicates"]:
        say(f"  skipped: {count(skipped['duplicates'], 'duplicate')}")
    first = manifest.split_shards("train")[0]
    tokens = read_row_group(directory, manifest, first, 0)[:SAMPLE_TOKENS].tolist()
    tokenizer, decoder = read_tokenizer(directory), codecs.getincrementaldecoder("utf-8")("replace")
    # Without the bytes of an incomplete character at the end.
    sample = decoder.decode(tokenizer.decode_bytes(tokens))
    say(f"  starts with {sample!r}")
    return {
        "path": str(directory),
        "tokenizer": manifest.tokenizer,
        "vocab_size": manifest.vocab_size,
        "dtype": manifest.dtype,
        "manifest_hash": manifest.hash,
        "splits": splits,
        "left_out": skipped,
        "sample": sample,
    }
