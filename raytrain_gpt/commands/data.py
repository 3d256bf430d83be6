"""`prepare` and `data`: make a dataset, look at one."""

from __future__ import annotations

import argparse
import json
from typing import Any, Literal

from raytrain_gpt.commands import flags
from raytrain_gpt.commands.flags import say
from raytrain_gpt.config.options import Options
from raytrain_gpt.errors import ConfigError


class PrepareOptions(Options):
    """How a dataset is made; the limits stand in `data.prepare_plan`."""

    tokenizer: str = "bytes"
    """bytes, or a tiktoken encoding: gpt2, cl100k_base, …; for token ids: the one that made them."""
    text_field: str = "text"
    """Field of a JSON line or column of a parquet file; for token ids: input_ids or tokens."""
    val_fraction: float | None = None
    """Fraction of documents for validation; of fewer than 100 documents: the end of the text
    (default: 0.01; files of token ids with val in their name)."""
    val_tokens: int | None = None
    """Use the first documents for validation, about this many tokens (default: val_fraction)."""
    shard_tokens: int = 100_000_000
    """Tokens per shard, approximately."""
    dedupe: Literal["none", "exact"] = "none"
    """exact: keep only the first of documents with the same text."""
    max_bad_documents: int = 0
    """Skip up to this many unreadable documents: not UTF-8, not JSON, or without the text field."""


class DataOptions(Options):
    """Where pictures go."""

    png: str | None = None
    """File for the plot of `stats` (default: document_lengths.png in DIR)."""


def add_parsers(commands: Any) -> None:
    """Add the parsers of these commands."""
    prepare = flags.add_command(
        commands,
        _prepare,
        "prepare",
        "make a dataset from text or token ids",
        "A stopped command continues where it was; the finished dataset is the same on any number of CPUs.",
        options=[PrepareOptions],
    )
    prepare.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="Files, directories or globs, local, s3://…, gs://… or hf://datasets/OWNER/NAME/…; URLs of "
        "files; or stdlib (Python's own source). Text: .txt, .jsonl(.gz, .zst), .parquet; token ids: .bin "
        "of nanoGPT or llm.c, .npy, .parquet with lists",
    )
    prepare.add_argument(
        "--out",
        required=True,
        metavar="DIR",
        help="New dataset: a directory or s3://bucket/prefix",
    )
    data = flags.add_command(
        commands,
        _data,
        "data",
        "show a dataset, verify all its bytes, or print its statistics",
        options=[DataOptions],
        json=True,
    )
    data.add_argument("action", choices=("show", "verify", "stats"))
    data.add_argument("directory", metavar="DIR", help="A dataset: directory or s3://bucket/prefix")


def _prepare(args: argparse.Namespace) -> None:
    options = flags.options_of(args, PrepareOptions)
    if options.val_fraction is not None and options.val_tokens is not None:
        raise ConfigError(
            "--val_fraction and --val_tokens exclude each other; leave one of them out"
        )
    from raytrain_gpt.data.describe import describe_dataset
    from raytrain_gpt.storage.location import Location
    from raytrain_gpt.train.launch import prepare_dataset

    out = Location.of(args.out)
    more = options.model_dump(exclude={"tokenizer"}) | {"dedupe": options.dedupe == "exact"}
    manifest = prepare_dataset(args.sources, out, options.tokenizer, say, **more)
    describe_dataset(out, manifest, say)
    say(_train_line(args.out))


def _data(args: argparse.Namespace) -> None:
    from raytrain_gpt.data.describe import PICTURE_FILE, dataset_stats, describe_dataset
    from raytrain_gpt.data.shards import read_manifest
    from raytrain_gpt.data.verify import check_shard, check_tokenizer
    from raytrain_gpt.storage.location import Location

    directory = Location.of(args.directory)
    manifest = read_manifest(directory)
    if args.action == "stats":
        png = flags.options_of(args, DataOptions).png
        picture = Location.of(png) if png else directory / PICTURE_FILE
        facts = dataset_stats(directory, manifest, picture, say)
    else:
        if args.action == "verify":
            check_tokenizer(directory, manifest)
            for shard in manifest.shards:
                check_shard(directory, manifest, shard, content=True)
                if not args.json:
                    say(f"{shard.path} ok: {shard.tokens} tokens, hash and ids checked")
            say(f"all {len(manifest.shards)} shards of {directory} are intact")
        facts = describe_dataset(directory, manifest, say) | {"verified": args.action == "verify"}
    say(_train_line(args.directory))
    if args.json:
        say(json.dumps(facts))


def _train_line(directory: str) -> str:
    return f"next: raytrain-gpt train --data_path {directory} --run_name my-run"
