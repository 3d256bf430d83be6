"""`eval`, `sample` and `serve`: use a checkpoint."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from pydantic import Field

from raytrain_gpt.commands import flags
from raytrain_gpt.commands.flags import say
from raytrain_gpt.config.options import Options, SamplingOptions
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.serve.options import ServeOptions

if TYPE_CHECKING:
    from raytrain_gpt.storage.location import Location


class EvalOptions(Options):
    """What a checkpoint is evaluated on."""

    data: str | None = None
    """Dataset (default: the one it was trained on)."""
    eval_tokens: int | None = Field(None, ge=1)
    """Validation tokens at most (default: as in training)."""
    hellaswag: str | None = None
    """HellaSwag .jsonl file, or download for the public one (default: not evaluated)."""


class NumSamples(Options):
    """How many texts are generated."""

    num_samples: int | None = Field(None, ge=1)
    """Continuations per prompt (default: 5; with --batch: 1)."""


def add_parsers(commands: Any) -> None:
    """Add the parsers of these commands."""
    evaluate = flags.add_command(
        commands,
        _eval,
        "eval",
        "validation loss and HellaSwag score of a checkpoint",
        options=[EvalOptions],
        json=True,
    )
    sample = flags.add_command(
        commands,
        _sample,
        "sample",
        "continue prompts with a checkpoint",
        options=[NumSamples, SamplingOptions],
    )
    prompts = sample.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", metavar="TEXT", help="Text to continue")
    prompts.add_argument(
        "--batch",
        metavar="FILE",
        help='JSON lines {"prompt": TEXT, …} to continue on all of a Ray cluster',
    )
    sample.add_argument(
        "--out", metavar="FILE", help="Where --batch writes its lines with their continuations"
    )
    serve = flags.add_command(
        commands,
        _serve,
        "serve",
        "serve a checkpoint over HTTP: OpenAI's completions API and a web page",
        "Runs on this machine until Ctrl+C. A --host that other machines can reach needs an API key in "
        "RAYTRAIN_GPT_API_KEY, which callers must send.",
        options=[ServeOptions],
    )
    for parser in (evaluate, sample, serve):
        flags.add_checkpoint(parser)


def _eval(args: argparse.Namespace) -> None:
    options = flags.options_of(args, EvalOptions)
    from raytrain_gpt.evaluate.inference import evaluate_checkpoint

    path, metrics = evaluate_checkpoint(args.checkpoint, say, **options.model_dump())
    _say_metrics(path, metrics)
    if args.json:
        say(json.dumps({"checkpoint": str(path), **metrics}))


def _say_metrics(path: Location, metrics: dict[str, Any]) -> None:
    start = f"{path} | step {metrics['step']}"
    if "val/loss" in metrics:
        say(
            f"{start} | val loss {metrics['val/loss']:.4f} nats/token | "
            f"perplexity {metrics['val/perplexity']:.2f} | "
            f"{metrics['val/bits_per_byte']:.4f} bits/byte | {metrics['val/tokens']} tokens"
        )
    for name in sorted(metrics):
        if name.startswith("val/loss/"):
            of_dataset = name.removeprefix("val/loss/")
            tokens = metrics[f"val/tokens/{of_dataset}"]
            say(f"  {of_dataset} | val loss {metrics[name]:.4f} nats/token | {tokens} tokens")
    if "hellaswag/acc" in metrics:
        of = {name: metrics[f"hellaswag/{name}"] for name in ("examples", "cut")}
        say(
            f"{start} | hellaswag acc_norm {_accuracy(metrics, 'acc_norm')} | "
            f"acc {_accuracy(metrics, 'acc')} | {of['examples']} examples, {of['cut']} cut"
        )
    say(f'next: raytrain-gpt sample {path} --prompt "Hello"')


def _accuracy(metrics: dict[str, Any], name: str) -> str:
    value, stderr = metrics[f"hellaswag/{name}"], metrics[f"hellaswag/{name}_stderr"]
    return f"{value:.4f} ± {stderr:.4f}"


def _sample(args: argparse.Namespace) -> None:
    if (args.batch is None) != (args.out is None):
        raise ConfigError(
            "--batch FILE and --out FILE belong together; give both, or --prompt TEXT"
        )
    options = flags.options_of(args, SamplingOptions).model_dump()
    num = flags.options_of(args, NumSamples).num_samples
    if args.batch is not None:
        from raytrain_gpt.export.batch_generation import sample_batch

        sample_batch(args.checkpoint, args.batch, args.out, say, num_samples=num or 1, **options)
    else:
        from raytrain_gpt.evaluate.inference import sample_checkpoint

        texts = sample_checkpoint(
            args.checkpoint, args.prompt, say, num_samples=num or 5, **options
        )
        for text in texts:
            say(f"{text}\n{'-' * 40}")
    say(f"next: raytrain-gpt eval {args.checkpoint}")


def _serve(args: argparse.Namespace) -> None:
    options = flags.options_of(args, ServeOptions)
    from raytrain_gpt.serve.server import serve_checkpoint

    serve_checkpoint(args.checkpoint, options, say)
