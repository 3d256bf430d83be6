"""The commands `eval`, `sample`, `export` and `import`."""

from __future__ import annotations

from collections import ChainMap
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from raytrain_gpt.columns import own_scores
from raytrain_gpt.commands.flags import CheckpointOptions, Groups, JsonOptions, command
from raytrain_gpt.config.call_options import Metavar, Options, SamplingOptions
from raytrain_gpt.config.kinds import Registry
from raytrain_gpt.format import count, number, sample_command, shell
from raytrain_gpt.redact import say

if TYPE_CHECKING:
    from raytrain_gpt.storage.location import Location


class _EvalOptions(JsonOptions, CheckpointOptions):
    data: Annotated[str | None, Metavar("DIR")] = None
    """Dataset (default: the training run's)."""
    eval_tokens: int | None = Field(None, ge=1)
    """Maximum number of validation tokens (default: as in training)."""
    seq_len: int | None = Field(None, ge=1)
    """Tokens per validation sequence (default: as in training, or at most 2048 for an import)."""
    hellaswag: Annotated[str | None, Metavar("FILE|download")] = None
    """HellaSwag .jsonl file; download: the public file (default: not scored)."""
    evaluations: Annotated[str | None, Metavar("NAME,…")] = None
    """Comma-separated evaluations from --code, whose settings become flags (default: the training run's)."""
    fields: dict[str, str | None] = Field({}, exclude=True)


class SampleOptions(SamplingOptions, CheckpointOptions):
    prompt: Annotated[str, Metavar("TEXT")]
    """Text to continue."""
    num_samples: int = Field(5, ge=1)
    """Number of continuations."""
    max_new_tokens: int = Field(SamplingOptions.model_fields["max_new_tokens"].default, ge=1)
    """Tokens generated per sample (default: as in the run's evaluations)."""


def _settings(registry: Registry) -> Groups:
    own = [one.settings.model_fields for one in registry.known() if one.selector == "evaluations"]
    return {"eval": dict(ChainMap(*own))} if own else {}


@command("eval", _EvalOptions, _settings)
def evaluate(options: _EvalOptions) -> None:
    """Evaluate a checkpoint: validation loss, HellaSwag, and evaluations from --code."""
    from raytrain_gpt.evaluate.inference import evaluate_checkpoint

    how = options.model_dump(exclude={*CheckpointOptions.model_fields, "as_json"} - {"average"})
    how |= {"settings": options.fields, "registry": options.registry}
    place = options.find(options.checkpoint)
    path, metrics = evaluate_checkpoint(place, say, **how)
    _say_metrics(path, metrics, options.code_flags)
    options.say_json({"checkpoint": str(path), **metrics})


def _say_metrics(path: Location, metrics: dict[str, Any], flags: tuple[str, ...]) -> None:
    start = f"{path} | step {metrics['step']}"
    if "val/loss" in metrics:
        say(
            f"{start} | val loss {number(metrics['val/loss'], '.4f')} nats/token | "
            f"perplexity {number(metrics['val/perplexity'], '.2f')} | "
            f"{number(metrics['val/bits_per_byte'], '.4f')} bits/byte | "
            f"{count(metrics['val/tokens'], 'token')}"
        )
    for name in sorted(metrics):
        if name.startswith("val/loss/"):
            dataset = name.removeprefix("val/loss/")
            tokens = count(metrics[f"val/tokens/{dataset}"], "token")
            say(f"  {dataset} | val loss {number(metrics[name], '.4f')} nats/token | {tokens}")
    if "hellaswag/acc" in metrics:
        examples, num_cut = metrics["hellaswag/examples"], metrics["hellaswag/cut"]
        say(
            f"{start} | hellaswag acc_norm {_accuracy(metrics, 'acc_norm')} | "
            f"acc {_accuracy(metrics, 'acc')} | {count(examples, 'example')}, {num_cut} cut"
        )
    for name, score in own_scores(metrics).items():
        say(f"{start} | {name} {number(score, '.4f')}")
    say(f"next: {sample_command(path, *flags)}")


def _accuracy(metrics: dict[str, Any], name: str) -> str:
    value, stderr = metrics[f"hellaswag/{name}"], metrics[f"hellaswag/{name}_stderr"]
    return f"{value:.4f} ± {stderr:.4f}"


@command("sample", SampleOptions)
def sample(options: SampleOptions) -> None:
    """Continue a prompt with a checkpoint."""
    from raytrain_gpt.evaluate.inference import sample_checkpoint

    how = options.model_dump(include={*SamplingOptions.model_fields}, exclude_unset=True)
    how |= options.model_dump(include={"num_samples", "average"}) | {"registry": options.registry}
    place = options.find(options.checkpoint)
    for text in sample_checkpoint(place, options.prompt, say, **how):
        say(f"{text}\n{'-' * 40}")
    say(f"next: {shell('raytrain-gpt', 'eval', place, *options.code_flags)}")


class _ExportOptions(CheckpointOptions):
    out: Annotated[str, Metavar("DIR|FILE")]
    """New local directory; for gguf a new local file ending in .gguf, or a directory for RUN_NAME.gguf."""
    format: Literal["hf", "gguf"] = "hf"
    """Output format; hf: a directory for transformers; gguf: a file for llama.cpp and Ollama."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type of the tensors."""


class ImportOptions(Options):
    source: Annotated[str, Metavar("DIR_OR_FILE", positional=True)]
    """Hugging Face directory, or a file of GPT-2 weights (.safetensors)."""
    out: Annotated[str, Metavar("CHECKPOINT")]
    """New directory or s3://bucket/prefix."""
    tokenizer: Annotated[str | None, Metavar("NAME")] = None
    """Tokenizer: bytes, a tiktoken encoding or a checkpoint (default: the directory's, or by size)."""
    eot: Annotated[str | None, Metavar("TOKEN")] = None
    """Special token of a tokenizer.json that ends documents (default: its eos_token)."""


@command("export", _ExportOptions)
def export(options: _ExportOptions) -> None:
    """Export a checkpoint as a directory for transformers, or as a file for llama.cpp."""
    what = options.find(options.checkpoint), options.out, options.dtype, say
    if options.format == "gguf":
        from raytrain_gpt.export.gguf import export_gguf

        file = export_gguf(*what, average=options.average, registry=options.registry)
        say(f'next: {shell("llama-completion", "-m", file)} -no-cnv --prompt "Hello"')
    else:
        from raytrain_gpt.export.huggingface import export_checkpoint

        directory = export_checkpoint(*what, average=options.average, registry=options.registry)
        say(f"next: AutoModelForCausalLM.from_pretrained({str(directory)!r})")


@command("import", ImportOptions)
def import_(options: ImportOptions) -> None:
    """Make a checkpoint from Hugging Face weights of GPT-2, Llama, Mistral, Qwen2 or Qwen3."""
    from raytrain_gpt.evaluate.inference import IMPORT_SEQ_LEN
    from raytrain_gpt.export.huggingface import import_weights

    path, shape = import_weights(
        options.source, options.out, say, tokenizer=options.tokenizer, eot=options.eot
    )
    seq_len = min(shape.seq_len, IMPORT_SEQ_LEN)
    train = shell("raytrain-gpt", "train", "--init_from", path, "--seq_len", seq_len)
    say(f"fine-tune: {train} --data_path DATA --run_name NAME")
    say(f"next: {sample_command(path)}")
