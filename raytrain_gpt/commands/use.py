"""`eval` and `sample`: use a checkpoint."""

from __future__ import annotations

import argparse
import json
from typing import Any

from raytrain_gpt.commands.flags import checkpoint_argument, json_flag, say


def add_parsers(commands: Any) -> None:
    """Add the parsers of these commands."""
    evaluate = commands.add_parser("eval", help="validation loss of a checkpoint")
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
    json_flag(evaluate, _eval)

    sample = commands.add_parser("sample", help="continue a prompt with a checkpoint")
    checkpoint_argument(sample)
    sample.add_argument("--prompt", required=True, metavar="TEXT")
    sample.add_argument(
        "--num_samples", type=int, default=5, metavar="N", help="continuations (default: 5)"
    )
    sample.add_argument(
        "--max_new_tokens", type=int, default=32, metavar="N", help="tokens of each (default: 32)"
    )
    sample.add_argument(
        "--top_k",
        type=int,
        default=50,
        metavar="K",
        help="draw from the k most likely tokens (default: 50)",
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
    from raytrain_gpt.runtime import show
    from raytrain_gpt.runtime.use import evaluate_checkpoint

    path, metrics = evaluate_checkpoint(args.checkpoint, args.data, args.eval_tokens)
    show.evaluation(path, metrics, say)
    if args.json:
        say(json.dumps({"checkpoint": str(path), **metrics}))


def _sample(args: argparse.Namespace) -> None:
    from raytrain_gpt.runtime.use import sample_checkpoint

    options = {
        n: getattr(args, n)
        for n in ("num_samples", "max_new_tokens", "top_k", "temperature", "seed")
    }
    for text in sample_checkpoint(args.checkpoint, args.prompt, say, **options):
        say(f"{text}\n{'-' * 40}")
    say(f"next: raytrain-gpt eval {args.checkpoint}")
