"""Datasets of the benchmarks, prepared in this process."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from raytrain_gpt.config.call_options import PrepareOptions
from raytrain_gpt.data.preparation import finish, start
from raytrain_gpt.data.prepare_plan import make_plan
from raytrain_gpt.data.shards import (
    FORMAT_VERSION,
    ROW_GROUP_TOKENS,
    Manifest,
    Shard,
    ShardWriter,
    write_manifest,
)
from raytrain_gpt.data.tokenize import run_task
from raytrain_gpt.data.tokenizer import EOT, TOKENIZER_FILE, load_tokenizer, make_tiktoken

WRITE_TOKENS = 2**20


def stdlib_dataset(directory: Path) -> None:
    """Prepare Python's standard library as bytes."""
    encoding = load_tokenizer("bytes")
    plan = make_plan(["stdlib"], encoding, PrepareOptions(), print)
    start(directory, plan, encoding)
    results = [run_task(directory, plan, task) for task in range(len(plan.tasks))]
    finish(directory, plan, results, {"sources": ["stdlib"]})


def made_dataset(directory: Path, tokens: int, vocab_size: int) -> Manifest:
    """Write ids with Zipf frequencies, as in a natural vocabulary, and a few for validation.

    Args:
        directory: Directory to create.
        tokens: Training tokens, rounded up.
        vocab_size: 257 to 65536.
    """
    pairs = (bytes([a, b]) for a in range(256) for b in range(256))
    token_bytes = [*(bytes([i]) for i in range(256)), *pairs][: vocab_size - 1]
    ranks = {value: rank for rank, value in enumerate(token_bytes)}
    encoding = make_tiktoken("made", "(?s).", ranks, {EOT: vocab_size - 1})
    generator = np.random.Generator(np.random.PCG64(0))
    directory.mkdir(parents=True, exist_ok=True)
    shards = []
    for split, amount in [("train", tokens), ("val", 1)]:
        writer = ShardWriter(directory / f"{split}-00000.parquet", "uint16", ROW_GROUP_TOKENS)
        for _ in range(-(-amount // WRITE_TOKENS)):
            ids = generator.zipf(1.2, WRITE_TOKENS) % (vocab_size - 1)
            writer.add(ids.astype(np.uint32), 4 * len(ids))
        shards.append(writer.close(split))
    (directory / TOKENIZER_FILE).write_text(encoding.files[TOKENIZER_FILE])
    manifest = made_manifest(shards, vocab_size, encoding.hash)
    write_manifest(directory, manifest)
    return manifest


def made_manifest(shards: list[Shard], vocab_size: int, vocab: str = "") -> Manifest:
    """Return a manifest of made shards."""
    return Manifest(
        format_version=FORMAT_VERSION,
        tokenizer="made",
        vocab_hash=vocab,
        vocab_size=vocab_size,
        eot_token=vocab_size - 1,
        dtype="uint16",
        row_group_tokens=ROW_GROUP_TOKENS,
        shards=tuple(shards),
        source={},
    )
