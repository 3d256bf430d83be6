"""`export` and `import`: weights to and from Hugging Face directories."""

from __future__ import annotations

import argparse
from typing import Any, Literal

from raytrain_gpt.commands import flags
from raytrain_gpt.commands.flags import say
from raytrain_gpt.config.options import Options


class ExportOptions(Options):
    """How weights are written."""

    dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type of the tensors."""


class ImportOptions(Options):
    """What the imported files do not say, or say otherwise."""

    tokenizer: str | None = None
    """bytes or a tiktoken encoding (default: the directory's, else gpt2 or bytes by vocabulary size)."""
    num_heads: int | None = None
    """Attention heads per block, for a weights file (default: one per 64 channels)."""
    seq_len: int | None = None
    """Keep only the first positions, which shortens the context (tokens; default: all)."""


def add_parsers(commands: Any) -> None:
    """Add the parsers of these commands."""
    export = flags.add_command(
        commands,
        _export,
        "export",
        "write a checkpoint as a directory that transformers loads",
        options=[ExportOptions],
    )
    flags.add_checkpoint(export)
    export.add_argument("--out", required=True, metavar="DIR", help="A new local directory")
    importing = flags.add_command(
        commands,
        _import,
        "import",
        "make a checkpoint from GPT-2 weights of Hugging Face",
        options=[ImportOptions],
    )
    importing.add_argument(
        "source",
        metavar="DIR_OR_FILE",
        help="A Hugging Face directory, or a file of GPT-2 weights (.safetensors, .bin, .pt)",
    )
    importing.add_argument(
        "--out", required=True, metavar="CHECKPOINT", help="A new directory, or s3://bucket/prefix"
    )


def _export(args: argparse.Namespace) -> None:
    options = flags.options_of(args, ExportOptions)
    from raytrain_gpt.export.huggingface import export_checkpoint

    directory = export_checkpoint(args.checkpoint, args.out, options.dtype, say)
    say(f"next: AutoModelForCausalLM.from_pretrained({str(directory)!r})")


def _import(args: argparse.Namespace) -> None:
    options = flags.options_of(args, ImportOptions)
    from raytrain_gpt.export.huggingface import import_weights

    place, shape = import_weights(args.source, args.out, say, **options.model_dump())
    say(
        f"fine-tune: raytrain-gpt train --init_from {place} --num_layers {shape.num_layers} "
        f"--num_heads {shape.num_heads} --embd_size {shape.embd_size} --seq_len {shape.seq_len} "
        "--data_path DATA --run_name NAME"
    )
    say(f'next: raytrain-gpt sample {place} --prompt "Hello"')
