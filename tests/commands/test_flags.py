"""Parsers generated from declared options: their help texts and parsed values."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from raytrain_gpt.commands.flags import Command, ConfigOptions, RunsOptions, section_fields
from raytrain_gpt.commands.inference import SampleOptions
from raytrain_gpt.commands.train import ReportOptions, tune
from raytrain_gpt.config.call_options import Options, SamplingOptions
from raytrain_gpt.config.kinds import BUILT_IN
from raytrain_gpt.config.sections import EvalSection
from raytrain_gpt.errors import ConfigError
from tests.conftest import RunCli, raises_line


def parsed(kind: type[Options], *argv: str, config: bool = False) -> Any:
    found: list[Any] = []

    def run(options: Any) -> None:
        """Do nothing."""
        found.append(options)

    parser = argparse.ArgumentParser(exit_on_error=False)
    groups = section_fields if config else lambda _: {}
    Command("it", kind, groups, run).add_parser(parser.add_subparsers(), BUILT_IN)
    args = parser.parse_args(["it", *argv])
    args.command(args)
    return found[0]


def test_flags_have_the_type_and_default_of_their_field() -> None:
    options = parsed(SampleOptions, "runs/a", "--prompt", "null", "--top_k", "null", "--seed", "7")
    assert (options.checkpoint, options.prompt, options.seed) == ("runs/a", "null", 7)
    assert options.top_k is None, "null must be parsed as None"
    assert parsed(SampleOptions, "runs/a", "--prompt", "a").top_k == EvalSection().top_k
    assert parsed(RunsOptions, "--json").as_json
    assert parsed(ReportOptions, "a", "b").runs == ["a", "b"]


def test_a_wrong_value_is_one_line_with_the_limit_and_the_help() -> None:
    with raises_line(ConfigError, "top_p='1.5': must be less than or equal to 1 (Sample from"):
        parsed(SampleOptions, "runs/a", "--prompt", "a", "--top_p", "1.5")
    with raises_line(ConfigError, "seed='x': must be an integer"):
        SamplingOptions(seed="x")
    with raises_line(ConfigError, "unknown option top_q; did you mean top_p?", "temperature"):
        SamplingOptions(top_q=0.9)


def test_fields_of_the_configuration_win_over_the_preset_and_make_the_same_train_command() -> None:
    argv = ["--preset", "quickstart", "--min_workers", "null", "--run_name", "a b"]
    options = parsed(ConfigOptions, *argv[:4], "--max_steps", "7", config=True)
    config, _ = options.resolved()
    assert (config.train.max_steps, config.cluster.min_workers) == (7, None)
    command = parsed(ConfigOptions, *argv, config=True).train_command()
    assert command == ("raytrain-gpt train --preset quickstart --min_workers null --run_name 'a b'")


def test_the_help_shows_one_default_for_each_field(run_cli: RunCli) -> None:
    shown = " ".join(run_cli.succeeds("train", "--help").split())
    assert "extend a finished run (default: 300)" in shown
    assert "Context length in tokens (default: 128)" in shown
    assert "in a file" not in shown


@pytest.mark.slow
def test_a_dry_run_says_what_would_run(run_cli: RunCli, tmp_path: Path) -> None:
    data = tmp_path / "none"
    shown = run_cli.succeeds(
        "train", "--dry_run", "--max_steps", 7, "--num_workers", "auto", "--data_path", data
    )
    assert yaml.safe_load(shown)["train"]["max_steps"] == 7
    lines = [line.removeprefix("# ") for line in shown.splitlines()]
    start = lines.index(f'defaults: data_path "{data}", max_steps 7')
    model, batch, work, workers, there = lines[start + 1 : -1]
    assert " parameters: 4 layers" in model
    assert batch.startswith("batch    4,096 tokens per step")
    assert work.startswith("work     7 steps")
    assert workers.startswith("workers  auto: one per GPU")
    assert there == f"data     {data} does not exist; create it with raytrain-gpt prepare"


def test_a_dry_run_prints_the_warnings_of_a_start(run_cli: RunCli, tmp_path: Path) -> None:
    flags = ("--dry_run", "--preset", "quickstart", "--num_workers", 8, "--data_path", tmp_path)
    _, plain, _ = run_cli("train", *flags, "--micro_batch_sequences", 1)
    assert "# warning" not in plain
    flags += ("--micro_batch_sequences", 4)
    _, shown, _ = run_cli("train", *flags, "--storage_path", "s3://bucket/runs")
    assert [line for line in shown.splitlines() if line.startswith("# warning")] == [
        "# warning  MLflow is off: its SQLite file cannot be in an object store; set mlflow_uri",
        "# warning  micro_batch_sequences 4 -> 2, to divide the 2 sequences per worker and step",
    ]


@pytest.mark.parametrize("command", ["train", "tune"])
def test_the_help_has_every_field_but_not_in_the_usage_line(command: str, run_cli: RunCli) -> None:
    shown = run_cli.succeeds(command, "--help")
    names = [name for fields in tune.groups(BUILT_IN).values() for name in fields]
    for name in names if command == "tune" else BUILT_IN.fields:
        assert shown.count(f"  --{name} ") == 1, name
    assert len(shown.split("\n\n")[0]) < 200


@pytest.mark.parametrize(
    "words",
    [
        *("runs show RUN", "runs checkpoints RUN", "runs report RUN", "runs why RUN"),
        *("runs diff RUN --setting seed=1", "data at RUN --step 1", "data find text RUN"),
        *("sample RUN --prompt a --max_new_tokens 1", "eval RUN", "export RUN --out out"),
    ],
)
def test_a_command_takes_a_run_of_its_storage_before_a_directory_of_the_same_name(
    words: str, run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for directory in ("store/book", "book", "twin"):
        Path(directory).mkdir(parents=True)
    storage = ("--storage_path", "store")
    _, shown, _ = run_cli(*words.replace("RUN", "book").split(), *storage)
    book = f"{tmp_path}/store/book"
    assert shown.splitlines() == [f"book is run {book}; for {tmp_path}/book write ./book"]
    for path in ("./book", "twin"):
        code, shown, error = run_cli(*words.replace("RUN", path).split(), *storage)
        assert (code, shown) == (2, "")
        assert f"{tmp_path / path} is " in error
    no_run = f"no run gone in {tmp_path}/store, which has book, and no {tmp_path}/gone; "
    assert no_run in run_cli.refuses(*words.replace("RUN", "gone").split(), *storage)


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (("data", "find"), {"--json", "--data", "--storage_path"}),
        (("runs", "list"), {"--json", "--storage_path"}),
    ],
)
def test_an_action_has_help_with_its_own_flags(
    words: tuple[str, str], flags: set[str], run_cli: RunCli
) -> None:
    shown = run_cli.succeeds(*words, "--help")
    assert shown.startswith(f"usage: raytrain-gpt {' '.join(words)} [-h] ")
    assert set(re.findall(r"^  (--[a-z_]+)", shown, re.MULTILINE)) == flags
    _, shown, _ = run_cli(words[0], "--help")
    assert re.search(rf"^    {words[1]}\b", shown, re.MULTILINE)
    assert "--json" not in shown, "flags are shown in the help of each action"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("trian",), "unknown command trian; did you mean train? (available: prepare, data,"),
        (("runs",), "required: ACTION; see: raytrain-gpt runs --help"),
        (("runs", "show"), "required: RUN; see: raytrain-gpt runs show --help"),
        (("runs", "show", "a", "b"), "unknown argument b of raytrain-gpt runs show; see: "),
        (("train", "--accept_changed_code=true"), "ignored explicit argument 'true'"),
        (("data", "at", "a", "--setp=3"), "unknown argument --setp of raytrain-gpt data at; did "),
    ],
)
def test_a_wrong_command_is_one_line(argv: tuple[str, ...], said: str, run_cli: RunCli) -> None:
    assert said in run_cli.refuses(*argv)


@pytest.mark.parametrize("quiet", [False, True])
def test_quiet_gives_a_run_and_a_sweep_no_place_to_print(
    quiet: bool, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(*_: object, log: Any = None, **__: object) -> Any:
        (log or _[-1])("progress")
        raise ConfigError("it fails")

    monkeypatch.setattr("raytrain_gpt.train.launch.train", run)
    monkeypatch.setattr("raytrain_gpt.sweep.tune.run_sweep", run)
    flags = ["--quiet"] * quiet
    monkeypatch.setattr("raytrain_gpt.scaling.study.run_study", run)
    scale = "scale", "scale_configs/quickstart.yaml"
    for argv in (("train",), ("tune", "tune_configs/quickstart.yaml"), scale):
        code, shown, errors = run_cli(*argv, *flags)
        assert (code, errors) == (2, "error: it fails\n")
        assert shown.splitlines()[-1:] == ([] if quiet else ["progress"])
