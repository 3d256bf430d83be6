"""`serve`: a checkpoint behind an HTTP interface."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from raytrain_gpt.commands.flags import checkpoint_argument, say


def add_parsers(commands: Any) -> None:
    """Add the parser of this command."""
    serve = commands.add_parser(
        "serve",
        help="answer requests with a checkpoint, as OpenAI's completions, with a page to try it",
        description="Serve a checkpoint on this machine until Ctrl+C: POST /v1/completions as OpenAI's, "
        "and a page to try it. Another --host than a loopback address needs the API key that callers must "
        "send in RAYTRAIN_GPT_API_KEY.",
    )
    checkpoint_argument(serve)
    serve.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="to listen on (default: 127.0.0.1)"
    )
    numbers = (
        ("port", 8000, "to listen on (default: 8000)"),
        ("max_batch", 32, "sequences a replica continues at a time (default: 32)"),
        ("max_queue", 256, "sequences that may wait for a replica (default: 256)"),
        ("max_new_tokens", None, "most tokens of a continuation (default: what the context has)"),
        ("num_replicas", 1, "copies of the model, each on a GPU where there are any (default: 1)"),
    )
    for name, default, text in numbers:
        serve.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text)
    serve.add_argument(
        "--follow",
        action="store_true",
        help="of a run: serve its new best checkpoints as they come",
    )
    serve.set_defaults(command=_serve)


def _serve(args: argparse.Namespace) -> None:
    from raytrain_gpt.serve.server import ServeOptions, serve_checkpoint

    names = [field.name for field in dataclasses.fields(ServeOptions)]
    options = ServeOptions(**{name: getattr(args, name) for name in names})
    serve_checkpoint(args.checkpoint, options, say)
