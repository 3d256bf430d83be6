"""Parsers made from declared options: what is shown, and what a value becomes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from raytrain_gpt.commands.flags import SECTIONS, Command, ConfigOptions
from raytrain_gpt.commands.inference import SampleOptions
from raytrain_gpt.commands.train import RunsOptions, tune
from raytrain_gpt.config.call_options import Options, SamplingOptions
from raytrain_gpt.config.schema import FIELDS
from raytrain_gpt.config.sections import EvalSection
from raytrain_gpt.errors import ConfigError
from tests.conftest import RaisesLine

RunCli = Callable[..., tuple[int, str, str]]


def parsed(kind: type[Options], *argv: str, config: bool = False) -> Any:
    """The options that arguments mean."""
    found: list[Any] = []

    def run(options: Any) -> None:
        """Do nothing."""
        found.append(options)

    parser = argparse.ArgumentParser(exit_on_error=False)
    Command("it", kind, SECTIONS if config else {}, run).add_parser(parser.add_subparsers())
    args = parser.parse_args(["it", *argv])
    args.command(args)
    return found[0]


def test_flags_have_the_type_and_default_of_their_field() -> None:
    options = parsed(SampleOptions, "runs/a", "--prompt", "null", "--top_k", "null", "--seed", "7")
    assert (options.checkpoint, options.prompt, options.seed) == ("runs/a", "null", 7)
    assert options.top_k is None, "null is no number"
    assert parsed(SampleOptions, "runs/a").top_k == EvalSection().top_k
    assert parsed(RunsOptions, "list", "--json").as_json
    assert parsed(RunsOptions, "show", "a", "b").runs == ["a", "b"]


def test_a_wrong_value_is_one_line_with_the_limit_and_the_help(raises_line: RaisesLine) -> None:
    with raises_line(ConfigError, "top_p='1.5': must be less than or equal to 1 (Sample from"):
        parsed(SampleOptions, "runs/a", "--top_p", "1.5")
    with raises_line(ConfigError, "action='shew': must be 'list', 'show'"):
        parsed(RunsOptions, "shew")
    with raises_line(ConfigError, "seed='x': must be an integer"):
        SamplingOptions(seed="x")
    with raises_line(ConfigError, "unknown option top_q; did you mean top_p?", "temperature"):
        SamplingOptions(top_q=0.9)


def test_fields_of_the_configuration_win_over_the_preset_and_make_the_same_train_command() -> None:
    argv = ["--preset", "quickstart", "--min_workers", "null", "--run_name", "a b"]
    options = parsed(ConfigOptions, *argv[:4], "--max_steps", "7", config=True)
    config = options.resolved()
    assert (config.train.max_steps, config.cluster.min_workers) == (7, None)
    command = parsed(ConfigOptions, *argv, config=True).train_command()
    assert command == ("raytrain-gpt train --preset quickstart --min_workers null --run_name 'a b'")


def test_the_help_of_train_shows_what_a_plain_train_uses(run_cli: RunCli) -> None:
    _, shown, _ = run_cli("train", "--help")
    shown = " ".join(shown.split())
    assert "extend a finished run (default: 250; in a file: 300)" in shown
    assert "Context length in tokens (default: 128)" in shown
    _, shown, _ = run_cli("sample", "--help")
    assert "in a file" not in shown


def test_a_dry_run_says_what_would_run(run_cli: RunCli, tmp_path: Path) -> None:
    data = tmp_path / "none"
    code, shown, _ = run_cli(
        "train", "--dry_run", "--max_steps", 7, "--num_workers", "auto", "--data_path", data
    )
    assert code == 0
    assert yaml.safe_load(shown)["train"]["max_steps"] == 7
    lines = [line.removeprefix("# ") for line in shown.splitlines()]
    start = lines.index(f'preset quickstart: data_path "{data}", max_steps 7, num_workers "auto"')
    model, batch, work, workers, there = lines[start + 1 : -1]
    assert " parameters: 4 layers" in model
    assert batch.startswith("batch    2,048 tokens a step")
    assert work.startswith("work     7 steps")
    assert workers.startswith("workers  auto: one for each GPU")
    assert there == f"data     {data} is not there; make it with raytrain-gpt prepare"


@pytest.mark.parametrize("command", ["train", "tune", "doctor", "estimate"])
def test_the_help_has_every_field_but_not_in_the_usage_line(command: str, run_cli: RunCli) -> None:
    code, shown, _ = run_cli(command, "--help")
    assert code == 0
    names = [name for fields in tune.groups.values() for name in fields]
    for name in names if command == "tune" else FIELDS:
        assert shown.count(f"  --{name} ") == 1, name
    assert len(shown.split("\n\n")[0]) < 200


def test_the_name_of_a_run_is_its_directory_in_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("runs/book", "runs/both", "both"):
        Path(path).mkdir(parents=True)
    for given, meant in (
        ("book", "runs/book"),
        ("both", "both"),
        ("other", "other"),
        ("runs/book", "runs/book"),
        ("s3://b/book", "s3://b/book"),
    ):
        assert parsed(SampleOptions, given).checkpoint == meant
