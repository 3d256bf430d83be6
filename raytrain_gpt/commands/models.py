"""`export` and `import`: weights to and from Hugging Face directories."""

from __future__ import annotations

from typing import Annotated, Literal

from raytrain_gpt.commands.flags import CheckpointOptions, Metavar, command, say
from raytrain_gpt.config.call_options import Options


class ExportOptions(CheckpointOptions):
    """What is written, and where."""

    out: Annotated[str, Metavar("DIR")]
    """A new local directory."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type of the tensors."""


class ImportOptions(Options):
    """What is read, and what its files do not say."""

    source: Annotated[str, Metavar("DIR_OR_FILE", positional=True)]
    """A Hugging Face directory, or a file of GPT-2 weights (.safetensors, .bin, .pt)."""
    out: Annotated[str, Metavar("CHECKPOINT")]
    """A new directory, or s3://bucket/prefix."""
    tokenizer: Annotated[str | None, Metavar("NAME")] = None
    """bytes or a tiktoken encoding (default: the directory's, else gpt2 or bytes by vocabulary size)."""
    num_heads: int | None = None
    """Attention heads per block, for a weights file (default: one per 64 channels)."""
    seq_len: int | None = None
    """Keep only the first positions, which shortens the context (tokens; default: all)."""


@command("export", ExportOptions)
def export(options: ExportOptions) -> None:
    """Write a checkpoint as a directory that transformers loads."""
    from raytrain_gpt.export.huggingface import export_checkpoint

    directory = export_checkpoint(options.checkpoint, options.out, options.dtype, say)
    say(f"next: AutoModelForCausalLM.from_pretrained({str(directory)!r})")


@command("import", ImportOptions)
def import_(options: ImportOptions) -> None:
    """Make a checkpoint from GPT-2 weights of Hugging Face."""
    from raytrain_gpt.export.huggingface import import_weights

    more = options.model_dump(exclude={"source", "out"})
    place, shape = import_weights(options.source, options.out, say, **more)
    say(
        f"fine-tune: raytrain-gpt train --init_from {place} --num_layers {shape.num_layers} "
        f"--num_heads {shape.num_heads} --embd_size {shape.embd_size} --seq_len {shape.seq_len} "
        "--data_path DATA --run_name NAME"
    )
    say(f'next: raytrain-gpt sample {place} --prompt "Hello"')
