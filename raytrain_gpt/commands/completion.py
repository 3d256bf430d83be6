"""The command `completion`."""

from __future__ import annotations

import argparse
import re
from typing import Annotated, Any, Literal

from raytrain_gpt.commands.flags import Command, command
from raytrain_gpt.config.call_options import Metavar, Options
from raytrain_gpt.config.load import preset_names

_TYPES = {"bool", "float", "int", "null", "str"}
"""Type names in metavars, which are not values."""


class CompletionOptions(Options):
    shell: Annotated[Literal["bash", "zsh", "fish"], Metavar(positional=True)]
    """Shell that reads the script."""


def completion(parser: argparse.ArgumentParser) -> Command[CompletionOptions]:
    """Make the command for a parser's command lines."""

    @command("completion", CompletionOptions)
    def run(options: CompletionOptions) -> None:
        """Print a script that completes commands, flags and files.

        bash: eval "$(raytrain-gpt completion bash)" in ~/.bashrc. zsh: the same in ~/.zshrc, after compinit.
        fish: raytrain-gpt completion fish > ~/.config/fish/completions/raytrain-gpt.fish
        """
        import shtab

        _add_values(parser, shtab.FILE)
        print(shtab.complete(parser, options.shell))

    return run


def _add_values(parser: argparse.ArgumentParser, files: Any) -> None:
    """Tell shtab which words or files complete each argument."""
    for action in parser._actions:
        words = str(action.metavar or "").split("|")
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                _add_values(subparser, files)
        elif action.dest == "preset":
            action.choices = preset_names()
        elif any(re.search("FILE|DIR|SOURCE|CHECKPOINT|RUN", word) for word in words):
            completed: Any = action  # shtab's attribute
            completed.complete = files
        elif len(words) > 1:
            action.choices = [word for word in words if word not in _TYPES]
