"""`serve`: a checkpoint behind an HTTP interface."""

from __future__ import annotations

import argparse
from typing import Any

from raytrain_gpt.commands.flags import CHECKPOINT_HELP, add_command, add_options, options_of, say
from raytrain_gpt.serve.options import ServeOptions


def add_parsers(commands: Any) -> None:
    """Add the parser of this command."""
    serve = add_command(
        commands,
        "serve",
        _serve,
        "serve a checkpoint over HTTP: OpenAI's completions API and a web page",
        "Runs on this machine until Ctrl+C. A --host that other machines can reach needs an API key in "
        "RAYTRAIN_GPT_API_KEY, which callers must send.",
    )
    serve.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT_HELP)
    add_options(serve, ServeOptions, without=["follow"])
    serve.add_argument(
        "--follow", action="store_true", help=ServeOptions.model_fields["follow"].description
    )


def _serve(args: argparse.Namespace) -> None:
    options = options_of(args, ServeOptions)
    from raytrain_gpt.serve.server import serve_checkpoint

    serve_checkpoint(args.checkpoint, options, say)
