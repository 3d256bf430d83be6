"""`eval` and `sample`: use a checkpoint."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from raytrain_gpt.commands.flags import checkpoint_argument, json_flag, say
from raytrain_gpt.errors import ConfigError

if TYPE_CHECKING:
    from raytrain_gpt.storage.location import Location


def add_parsers(commands: Any) -> None:
    """Add the parsers of these commands."""
    evaluate = commands.add_parser("eval", help="validation loss and HellaSwag of a checkpoint")
    checkpoint_argument(evaluate)
    evaluate.add_argument(
        "--data", metavar="DIR", help="dataset (default: the one it was trained on)"
    )
    evaluate.add_argument(
        "--eval_tokens",
        type=int,
        metavar="N",
        help="upper limit of tokens (default: as in training)",
    )
    evaluate.add_argument(
        "--hellaswag",
        metavar="FILE|download",
        help="ask HellaSwag too: its .jsonl, or the public file (default: not asked)",
    )
    json_flag(evaluate, _eval)

    sample = commands.add_parser("sample", help="continue prompts with a checkpoint")
    checkpoint_argument(sample)
    prompts = sample.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", metavar="TEXT")
    prompts.add_argument(
        "--batch",
        metavar="FILE",
        help='JSON lines {"prompt": TEXT, …}, continued on all of a cluster',
    )
    sample.add_argument(
        "--out", metavar="FILE", help="the lines of --batch with their continuations (JSON lines)"
    )
    sample.add_argument(
        "--num_samples",
        type=int,
        metavar="N",
        help="continuations of a prompt (default: 5, with --batch 1)",
    )
    sample.add_argument(
        "--max_new_tokens",
        type=int,
        default=32,
        metavar="N",
        help="tokens of each, unless its text ends before (default: 32)",
    )
    sample.add_argument(
        "--top_k",
        type=int,
        default=50,
        metavar="K",
        help="draw from the k most likely tokens (default: 50)",
    )
    sample.add_argument(
        "--top_p",
        type=float,
        default=1.0,
        metavar="P",
        help="of them, from the most likely that have this probability together (default: 1.0)",
    )
    sample.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="0: always the most likely token (default: 1.0)",
    )
    sample.add_argument(
        "--seed", type=int, default=42, metavar="N", help="of the draws (default: 42)"
    )
    sample.set_defaults(command=_sample)


def _eval(args: argparse.Namespace) -> None:
    from raytrain_gpt.evaluate.inference import evaluate_checkpoint

    path, metrics = evaluate_checkpoint(
        args.checkpoint,
        say,
        data=args.data,
        eval_tokens=args.eval_tokens,
        hellaswag=args.hellaswag,
    )
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
    options = {
        name: getattr(args, name)
        for name in ("max_new_tokens", "top_k", "top_p", "temperature", "seed")
    }
    if args.batch is not None:
        from raytrain_gpt.export.batch_generation import sample_batch

        num = 1 if args.num_samples is None else args.num_samples
        sample_batch(args.checkpoint, args.batch, args.out, say, num_samples=num, **options)
        say(f"next: raytrain-gpt eval {args.checkpoint}")
        return
    from raytrain_gpt.evaluate.inference import sample_checkpoint

    num = 5 if args.num_samples is None else args.num_samples
    for text in sample_checkpoint(args.checkpoint, args.prompt, say, num_samples=num, **options):
        say(f"{text}\n{'-' * 40}")
    say(f"next: raytrain-gpt eval {args.checkpoint}")
