"""`prepare` and `data`: make a dataset, look at one."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from raytrain_gpt.commands.flags import json_flag, say

if TYPE_CHECKING:
    from raytrain_gpt.data.shards import Manifest
    from raytrain_gpt.storage.location import Location


def add_parsers(commands: Any) -> None:
    """Add the parsers of these commands."""
    prepare = commands.add_parser("prepare", help="make a dataset of text or of token ids")
    prepare.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="files, directories or globs, local, s3://…, gs://… or hf://datasets/OWNER/NAME/…, web "
        "addresses of files, or stdlib (Python's own source). Text: .txt, .jsonl(.gz, .zst), .parquet; "
        "token ids: .bin of nanoGPT or llm.c, .npy, .parquet with lists",
    )
    prepare.add_argument(
        "--out", required=True, metavar="DIR", help="where the dataset goes, or s3://bucket/prefix"
    )
    prepare.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="NAME",
        help="bytes, or a tiktoken encoding: gpt2, cl100k_base, …; of token ids the one that made them "
        "(default: bytes)",
    )
    prepare.add_argument(
        "--text_field",
        default="text",
        metavar="NAME",
        help="field of a JSON line, column of a parquet file (default: text; of token ids input_ids or "
        "tokens)",
    )
    split = prepare.add_mutually_exclusive_group()
    split.add_argument(
        "--val_fraction",
        type=float,
        metavar="F",
        help="share of documents that validate; of fewer than 100, the end of the text (default: 0.01; "
        "files of token ids with val in their name validate)",
    )
    split.add_argument(
        "--val_tokens",
        type=int,
        metavar="N",
        help="the first documents validate, about N tokens of them",
    )
    prepare.add_argument(
        "--shard_tokens",
        type=int,
        default=100_000_000,
        metavar="N",
        help="tokens of a shard, about (default: 100000000)",
    )
    prepare.add_argument(
        "--dedupe",
        choices=("none", "exact"),
        default="none",
        help="exact: of documents with the same text keep only the first (default: none)",
    )
    prepare.add_argument(
        "--max_bad_documents",
        type=int,
        default=0,
        metavar="N",
        help="leave out up to N documents that cannot be read: not UTF-8, no JSON, no text in the field "
        "(default: 0)",
    )
    prepare.set_defaults(command=_prepare)

    data = commands.add_parser("data", help="show a dataset, verify every byte of it, or count it")
    data.add_argument("action", choices=("show", "verify", "stats"))
    data.add_argument("directory", metavar="DIR", help="a dataset, or s3://bucket/prefix")
    data.add_argument(
        "--png",
        metavar="FILE",
        help="where stats draws the documents' lengths (default: DIR/document_lengths.png)",
    )
    json_flag(data, _data)


def _prepare(args: argparse.Namespace) -> None:
    from raytrain_gpt.data.describe import describe_dataset
    from raytrain_gpt.storage.location import Location
    from raytrain_gpt.train.launch import prepare_dataset

    out = Location.of(args.out)
    options = {"text_field": args.text_field, "val_fraction": args.val_fraction}
    options |= {"val_tokens": args.val_tokens, "shard_tokens": args.shard_tokens}
    options |= {"dedupe": args.dedupe == "exact", "max_bad_documents": args.max_bad_documents}
    manifest = prepare_dataset(args.sources, out, args.tokenizer, say, **options)
    describe_dataset(out, manifest, say)
    say(_train_line(args.out))


def _data(args: argparse.Namespace) -> None:
    from raytrain_gpt.data.describe import describe_dataset
    from raytrain_gpt.data.shards import read_manifest
    from raytrain_gpt.data.verify import check_shard, check_tokenizer
    from raytrain_gpt.storage.location import Location

    directory = Location.of(args.directory)
    manifest = read_manifest(directory)
    if args.action == "stats":
        _stats(args, directory, manifest)
        return
    if args.action == "verify":
        check_tokenizer(directory, manifest)
        for shard in manifest.shards:
            check_shard(directory, manifest, shard, content=True)
            if not args.json:
                say(f"{shard.path} ok: {shard.tokens} tokens, hash and ids checked")
        say(f"all {len(manifest.shards)} shards of {directory} are whole")
    facts = describe_dataset(directory, manifest, say)
    if args.json:
        say(json.dumps(facts | {"verified": args.action == "verify"}))
    else:
        say(_train_line(args.directory))


def _stats(args: argparse.Namespace, directory: Location, manifest: Manifest) -> None:
    from raytrain_gpt.data.describe import PICTURE_FILE, dataset_stats
    from raytrain_gpt.storage.location import Location

    picture = Location.of(args.png) if args.png else directory / PICTURE_FILE
    facts = dataset_stats(directory, manifest, picture, say)
    say(_train_line(args.directory))
    if args.json:
        say(json.dumps(facts))


def _train_line(directory: str) -> str:
    return f"next: raytrain-gpt train --data_path {directory} --run_name my-run"
