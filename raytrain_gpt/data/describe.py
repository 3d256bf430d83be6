"""Contents of a dataset, as `prepare`, `data show` and `data verify` print them."""

from __future__ import annotations

import codecs
from typing import Any

from raytrain_gpt.data.documents import BAD_FILE
from raytrain_gpt.data.shards import SPLITS, Manifest, read_row_group
from raytrain_gpt.data.tokenizer import token_to_bytes
from raytrain_gpt.data.tokenizer_file import read_tokenizer
from raytrain_gpt.format import Log, amount, count, size
from raytrain_gpt.storage.location import Location

SAMPLE_TOKENS = 60


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
    encoding, decoder = read_tokenizer(directory), codecs.getincrementaldecoder("utf-8")("replace")
    # Without the bytes of an incomplete character at the end.
    sample = decoder.decode(b"".join(token_to_bytes(encoding, token) for token in tokens))
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
