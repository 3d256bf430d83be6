"""`export` and `import`: weights to and from Hugging Face directories."""

from __future__ import annotations

import argparse
from typing import Any

from raytrain_gpt.commands.flags import checkpoint_argument, say


def add_parsers(commands: Any) -> None:
    """Add the parsers of these commands."""
    export = commands.add_parser(
        "export", help="write a checkpoint as a directory that transformers loads"
    )
    checkpoint_argument(export)
    export.add_argument("--out", required=True, metavar="DIR", help="a new local directory")
    export.add_argument(
        "--dtype", default="fp32", metavar="fp32|bf16", help="of the tensors (default: fp32)"
    )
    export.set_defaults(command=_export)

    importing = commands.add_parser(
        "import", help="make a checkpoint of GPT-2 weights from Hugging Face"
    )
    importing.add_argument(
        "source",
        metavar="DIR_OR_FILE",
        help="a Hugging Face directory, or a file of GPT-2's weights (.safetensors, .bin, .pt)",
    )
    importing.add_argument(
        "--out",
        required=True,
        metavar="CHECKPOINT",
        help="a new directory, or s3://bucket/prefix",
    )
    importing.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="bytes, or a tiktoken encoding (default: the directory's; without one gpt2 or bytes, by "
        "the size of the vocabulary)",
    )
    importing.add_argument(
        "--num_heads",
        type=int,
        metavar="N",
        help="heads of a block, for a file (default: one for every 64 channels)",
    )
    importing.add_argument(
        "--seq_len", type=int, metavar="N", help="keep the first N positions (default: all)"
    )
    importing.set_defaults(command=_import)


def _export(args: argparse.Namespace) -> None:
    from raytrain_gpt.export.huggingface import export_checkpoint

    directory = export_checkpoint(args.checkpoint, args.out, args.dtype, say)
    say(f"next: AutoModelForCausalLM.from_pretrained({str(directory)!r})")


def _import(args: argparse.Namespace) -> None:
    from raytrain_gpt.export.huggingface import import_weights

    options = {name: getattr(args, name) for name in ("tokenizer", "num_heads", "seq_len")}
    place, shape = import_weights(args.source, args.out, say, **options)
    say(
        f"fine-tune: raytrain-gpt train --init_from {place} --num_layers {shape.num_layers} "
        f"--num_heads {shape.num_heads} --embd_size {shape.embd_size} --seq_len {shape.seq_len} "
        "--data_path DATA --run_name NAME"
    )
    say(f'next: raytrain-gpt sample {place} --prompt "Hello"')
