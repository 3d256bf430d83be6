"""Datasets of benchmarks: random ids of any number and vocabulary, or the standard library's text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tiktoken

from raytrain_gpt.data.preparation import finish, start
from raytrain_gpt.data.prepare_plan import make_plan
from raytrain_gpt.data.shards import (
    FORMAT_VERSION,
    ROW_GROUP_TOKENS,
    Manifest,
    ShardWriter,
    write_manifest,
)
from raytrain_gpt.data.tokenize import run_task
from raytrain_gpt.data.tokenizer import (
    EOT,
    TOKENIZER_FILE,
    load_tokenizer,
    tokenizer_json,
    vocab_hash,
)

WRITE_TOKENS = 2**20


def made_dataset(directory: Path, tokens: int, vocab_size: int, num_shards: int = 1) -> Manifest:
    """Ids with the frequencies of a natural vocabulary (Zipf), and some to validate with.

    Args:
        directory: Is made.
        tokens: To train on; rounded up.
        vocab_size: From 257 to 65536.
        num_shards: To train on.
    """
    encoding = made_encoding(vocab_size)
    generator = np.random.Generator(np.random.PCG64(0))
    directory.mkdir(parents=True, exist_ok=True)
    shards = []
    parts = [("train", i, -(-tokens // num_shards)) for i in range(num_shards)]
    for split, i, amount in [*parts, ("val", 0, 1)]:
        writer = ShardWriter(directory / f"{split}-{i:05d}.parquet", "uint16", ROW_GROUP_TOKENS)
        for _ in range(-(-amount // WRITE_TOKENS)):
            ids = generator.zipf(1.2, WRITE_TOKENS) % (vocab_size - 1)
            writer.add(ids.astype(np.uint32), 4 * len(ids))
        shards.append(writer.close(split))
    (directory / TOKENIZER_FILE).write_text(tokenizer_json(encoding))
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        tokenizer=encoding.name,
        vocab_hash=vocab_hash(encoding),
        vocab_size=vocab_size,
        eot_token=encoding.eot_token,
        dtype="uint16",
        row_group_tokens=ROW_GROUP_TOKENS,
        shards=tuple(shards),
        source={},
    )
    write_manifest(directory, manifest)
    return manifest


def stdlib_dataset(directory: Path) -> None:
    """The text of Python's standard library as bytes, prepared in this process."""
    encoding = load_tokenizer("bytes")
    plan = make_plan(["stdlib"], encoding)
    start(directory, plan, encoding)
    results = [run_task(directory, plan, task) for task in range(len(plan.tasks))]
    finish(directory, plan, results, {"sources": ["stdlib"]})


def made_encoding(vocab_size: int) -> tiktoken.Encoding:
    """The 256 bytes, pairs of them, and the special token that closes documents."""
    pairs = (bytes([a, b]) for a in range(256) for b in range(256))
    parts = [*(bytes([i]) for i in range(256)), *pairs]
    ranks = {part: rank for rank, part in enumerate(parts[: vocab_size - 1])}
    return tiktoken.Encoding(
        "made", pat_str=".", mergeable_ranks=ranks, special_tokens={EOT: vocab_size - 1}
    )
