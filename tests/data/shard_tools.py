"""Generated datasets, and plain readers of shards that share no code with the package's readers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from raytrain_gpt.config.call_options import PrepareOptions
from raytrain_gpt.data.duplicates import find_duplicates
from raytrain_gpt.data.preparation import finish, start, task_file
from raytrain_gpt.data.prepare_plan import Plan, make_plan
from raytrain_gpt.data.shards import (
    FORMAT_VERSION,
    ROW_GROUP_TOKENS,
    Manifest,
    Shard,
    ShardWriter,
    Split,
    write_manifest,
)
from raytrain_gpt.data.tokenize import hash_task, run_task
from raytrain_gpt.data.tokenizer import Tokenizer, load_tokenizer, token_dtype
from raytrain_gpt.data.tokenizer_file import TOKENIZER_FILE, read_tokenizer
from raytrain_gpt.format import Log
from raytrain_gpt.storage.location import LocationLike

TEXTS = {
    "ascii": "The quick brown fox.\n\tJumps!\r\n",
    "cjk": "統一碼,日本語のテキスト。한국어 텍스트입니다。",
    "emoji": "👩‍👩‍👧‍👦 🏳️‍🌈 é e\u0301 \U0001f600",
    "control": "\x00\x01\x7f\u200b\ufeff",
    "empty": "",
    "eot as text": "before <|endoftext|> after <|endoftext|>",
}


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "zero_bytes": lambda path: path.write_bytes(b""),
    "other_bytes": lambda path: path.write_bytes(b"x" * path.stat().st_size),
    "not_utf8": lambda path: path.write_bytes(b"\xff" * 100),
}
"""Ways to damage any file."""


def made_text(num_bytes: int, seed: int = 0) -> str:
    """Return about `num_bytes` of lines of random words, some of them CJK or emoji."""
    words = ["the", "model", "Ray", "0.5", "日本語", "😀", "naïve", "window", "(x)", "  "]
    draws = np.random.default_rng(seed).integers(0, len(words), num_bytes // 6)
    return "".join(words[d] + ("\n" if i % 11 == 10 else " ") for i, d in enumerate(draws))


def write_jsonl(path: Path, texts: Sequence[str], field: str = "text") -> str:
    """Write a `.jsonl` file with one text per line; return its path as a source."""
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts), "utf-8")
    return str(path)


def write_parquet(path: Path, texts: Sequence[str], rows: int, field: str = "text") -> str:
    """Write a parquet file with `rows` texts per row group; return its path as a source."""
    pq.write_table(pa.table({"id": range(len(texts)), field: texts}), path, row_group_size=rows)
    return str(path)


def all_tokens(directory: Path, manifest: Manifest, split: Split) -> np.ndarray[Any, Any]:
    shards = manifest.split_shards(split)
    return np.concatenate([pq.read_table(directory / s.path)["tokens"].to_numpy() for s in shards])


def row_groups(manifest: Manifest, split: Split) -> list[tuple[Shard, int, int]]:
    """Return (shard, index inside it, tokens) of every row group of a split, in manifest order."""
    size = manifest.row_group_tokens
    return [
        (shard, index, min(size, shard.tokens - start))
        for shard in manifest.split_shards(split)
        for index, start in enumerate(range(0, shard.tokens, size))
    ]


def documents(directory: Path, manifest: Manifest, split: Split) -> list[bytes]:
    """Return the bytes of a split's documents, decoded with the tokenizer stored in the dataset."""
    encoding = read_tokenizer(directory)
    tokens = all_tokens(directory, manifest, split)
    ends = np.flatnonzero(tokens == manifest.eot_token)
    assert ends[-1] == len(tokens) - 1, "the last document is not closed"
    parts = np.split(tokens, ends + 1)[:-1]
    return [encoding.decode_bytes(part[:-1].tolist()) for part in parts]


def files(directory: Path) -> dict[str, bytes]:
    """Return the content of every file in a directory, by name."""
    return {p.name: p.read_bytes() for p in directory.iterdir() if p.is_file()}


def write_dataset(
    directory: Path,
    *,
    train: Sequence[int],
    val: Sequence[int] = (40,),
    row_group_tokens: int = 33,
    vocab_size: int = 257,
    seed: int = 0,
) -> Manifest:
    """Write a dataset of random tokens.

    Args:
        directory: Created by this function.
        train: Number of tokens in each train shard.
        val: Number of tokens in each val shard.
        row_group_tokens: Tokens per row group.
        vocab_size: Token ids are uint32 above 2^16, else uint16.
        seed: Seed of the random tokens.
    """
    directory.mkdir(parents=True)
    encoding = load_tokenizer("bytes")
    (directory / TOKENIZER_FILE).write_text(encoding.files[TOKENIZER_FILE])
    dtype = token_dtype(vocab_size)
    generator = np.random.default_rng(seed)

    def write_shard(split: Split, index: int, tokens: int) -> Shard:
        writer = ShardWriter(directory / f"{split}-{index:05d}.parquet", dtype, row_group_tokens)
        writer.add(generator.integers(0, vocab_size, tokens).astype(np.uint32), tokens)
        return writer.close(split)

    manifest = Manifest(
        format_version=FORMAT_VERSION,
        tokenizer="bytes",
        vocab_hash=encoding.hash,
        vocab_size=vocab_size,
        eot_token=encoding.eot_token,
        dtype=dtype,
        row_group_tokens=row_group_tokens,
        shards=(
            *(write_shard("train", i, tokens) for i, tokens in enumerate(train)),
            *(write_shard("val", i, tokens) for i, tokens in enumerate(val)),
        ),
        source={},
    )
    write_manifest(directory, manifest)
    return manifest


def plan_of(sources: list[str], tokenizer: Tokenizer, log: Log = print, **options: Any) -> Plan:
    """Make a plan; `options` are those of PrepareOptions, and row_group_tokens."""
    size = options.pop("row_group_tokens", ROW_GROUP_TOKENS)
    return make_plan(sources, tokenizer, PrepareOptions(**options), log, size)


def prepare_here(
    sources: list[str], directory: LocationLike, tokenizer: str, **options: Any
) -> Manifest:
    """Prepare a dataset in this process, without Ray; `options` are those of `plan_of`."""
    encoding = load_tokenizer(tokenizer)
    plan = plan_of(sources, encoding, **options)
    manifest = start(directory, plan, encoding)
    if manifest is not None:
        return manifest
    max_bad, tasks = options.get("max_bad_documents", 0), range(len(plan.tasks))
    left_out: list[NDArray[np.bool_] | None] = [None] * len(tasks)
    if plan.dedupe:
        for task in tasks:
            hash_task(directory, plan, task, max_bad)
        left_out = [*find_duplicates([task_file(directory, task, ".hashes") for task in tasks])]
    results = [run_task(directory, plan, task, max_bad, left_out[task]) for task in tasks]
    return finish(directory, plan, results, {"sources": sources}, max_bad)
