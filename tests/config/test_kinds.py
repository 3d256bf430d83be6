"""Kinds of the user's code: registered by executing it, found by name, with settings like other fields."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from raytrain_gpt.config.built_in import AdamWSettings
from raytrain_gpt.config.code import Code
from raytrain_gpt.config.kinds import Registry
from raytrain_gpt.config.load import describe, load_preset
from raytrain_gpt.config.schema import (
    Config,
    changed_fields,
    changes_math,
    check_kinds,
    parse_config,
)
from raytrain_gpt.errors import ConfigError
from tests.conftest import RunCli, raises_line
from tests.made_runs import own_config

OWN = """
from raytrain_gpt.extend import AdamWSettings, Field, Settings, optimizer, schedule, tracker

class LionSettings(Settings):
    lion_beta: float = Field(0.99, gt=0, lt=1)
    '''Decay rate of the momentum.'''

@optimizer("lion", LionSettings)
def lion(parameters, settings, peak_lr): ...

@optimizer("decayed", AdamWSettings)
def decayed(parameters, settings, peak_lr): ...

@schedule("flat")
def flat(step, max_steps, settings):
    return 1.0

class CsvSettings(Settings):
    csv_file: str = "rows.csv"

@tracker("csv", CsvSettings)
class Csv: ...
"""
LION = {"optimizer": "lion", "lion_beta": "0.95"}
REGISTRY = Registry(Code("my.py", OWN))


def test_settings_are_fields_of_the_section_of_their_selector() -> None:
    config = load_preset("quickstart", REGISTRY).updated(LION)
    assert config.field_values()["lion_beta"] == 0.95
    assert REGISTRY.fields["lion_beta"][0] == "optim"
    written = yaml.safe_load(config.to_yaml())
    assert written["optim"]["lion_beta"] == 0.95
    assert parse_config(written, "config.yaml", REGISTRY) == config
    assert "lion_beta 0.95" in describe("defaults", Config(), config)


def test_another_choice_drops_the_settings_of_the_one_before() -> None:
    preset = load_preset("quickstart", REGISTRY).updated({"weight_decay": 0.3})
    lion = preset.updated(LION)
    assert not {"weight_decay", "beta1", "beta2"} & {*lion.field_values()}
    assert lion.updated({"optimizer": "muon"}).optim.settings(AdamWSettings) == AdamWSettings()
    shared = preset.updated({"optimizer": "decayed"})
    assert shared.optim.settings(AdamWSettings).weight_decay == 0.3


def test_a_setting_of_a_kind_that_is_not_chosen_is_refused_unless_it_is_the_default() -> None:
    words = ["beta1=0.8 applies only to optimizer adamw", "or remove beta1"]
    with raises_line(ConfigError, *words):
        own_config(OWN, optimizer="lion", beta1=0.8)
    with raises_line(ConfigError, "lion_beta=0.5 applies only to optimizer lion"):
        own_config(OWN, lion_beta=0.5)
    assert own_config(OWN, optimizer="lion", beta1="0.9").optim.optimizer == "lion"
    words = ["lion_beta='2': must be less than 1", "Decay rate of the momentum"]
    with raises_line(ConfigError, *words):
        own_config(OWN, optimizer="lion", lion_beta="2")


def test_files_of_earlier_versions_have_fields_of_kinds_that_they_did_not_choose() -> None:
    model = {
        "num_kv_heads": None,
        "mlp_size": None,
        "tied_embeddings": True,
        "rope_theta": 10_000.0,
    }
    optim = {"schedule": "constant", "decay_fraction": 1.0}
    config = parse_config({"model": model, "optim": optim}, "state.json")
    assert config == parse_config({"optim": {"schedule": "constant"}}, "state.json")
    with raises_line(ConfigError, "num_kv_heads=2 applies only to architecture llama or"):
        parse_config({"model": model | {"num_kv_heads": 2}}, "config.yaml")
    with raises_line(ConfigError, "decay_fraction=0.3 applies only to schedule wsd"):
        config.updated({"decay_fraction": 0.3})


def test_a_configuration_is_read_where_its_code_is_absent() -> None:
    config = own_config(OWN, **LION, trackers="csv", csv_file="a.csv")
    read = parse_config(config.model_dump(), "state.json")
    assert read.field_values() == config.field_values()
    assert read.updated({"max_steps": 7}).field_values()["lion_beta"] == 0.95
    with raises_line(ConfigError, "optimizer='lion'", "'adamw' or 'muon'", "--code FILE"):
        check_kinds(read)
    assert changes_math("lion_beta", read)
    assert not changes_math("csv_file", read)


def test_the_code_travels_with_a_pickled_configuration_and_runs_at_the_first_look_up() -> None:
    config = own_config(f"import sys\nsys.stderr.write('executed ')\n{OWN}", **LION)
    script = (
        "import pickle, sys\n"
        "config = pickle.load(sys.stdin.buffer)\n"
        "print(config.optim.optimizer, config.field_values()['lion_beta'], config.code.file_name)\n"
        "sys.stderr.write('read ')\n"
        "config.registry.kind('optimizer', 'muon'), config.registry.field('beta1')\n"
        "sys.stderr.write('built-in ')\n"
        "kind = config.optim.registry.kind('optimizer', 'lion')\n"
        "print(kind.settings.__name__, kind.implementation.__module__, config.updated({'seed': 3}).code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=pickle.dumps(config), capture_output=True, check=True
    )
    out, err = done.stdout.decode(), done.stderr.decode()
    assert out.startswith("lion 0.95 my.py")
    assert "LionSettings raytrain_gpt_code_" in out
    assert "Code(" in out
    assert err.split() == ["read", "built-in", "executed"]


def test_a_dump_and_a_file_never_have_the_code() -> None:
    config = own_config(OWN, **LION)
    assert config.code is not None
    assert "registered" not in config.to_yaml()
    assert "code" not in str(config.model_dump().keys())
    with raises_line(ConfigError, "unknown configuration key"):
        parse_config({"_code": {"text": "1"}}, "config.yaml")


def test_changed_text_declares_its_own_kinds_and_the_first_text_its_own_again() -> None:
    """As in a notebook, where a cell is edited and run again."""
    first, second = REGISTRY, Registry(Code("my.py", OWN.replace("lion_beta", "lion_decay")))
    for one, name in ((first, "lion_beta"), (second, "lion_decay"), (first, "lion_beta")):
        assert [*one.kind("optimizer", "lion").settings.model_fields] == [name]
        assert name in one.fields
    assert "lion_decay" not in first.fields


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\ny = (", ["my.py: SyntaxError", "line 2"]),
        ("import raytrain_gpt\nfrom .near import x", ["line 2: Import"]),
        ("import not_installed_here", ["line 1", "ModuleNotFoundError", "not_installed_here"]),
        ("def f():\n    return 1 / 0\n\nf()", ["line 2", "ZeroDivisionError"]),
        ("raise SystemExit(3)", ["line 1", "SystemExit"]),
        (OWN.replace('"lion", LionSettings', '"muon", LionSettings'), ["muon already exists"]),
        (OWN.replace('"flat"', '"a b"'), ["'a b' is not a valid name"]),
        (
            "from raytrain_gpt.extend import schedule\n@schedule\ndef falls(*_):\n    return 1\n",
            ["line 2", "@schedule of falls has no name; write @schedule('falls')"],
        ),
        (OWN.replace("lion_beta: float", "beta1: float"), ["beta1", "adamw", "AdamWSettings"]),
        (OWN.replace("lion_beta: float", "peak_lr: float"), ["peak_lr", "a field of optim"]),
        (OWN.replace("lion_beta: float", "preset: float"), ["preset", "an option of train"]),
        (OWN.replace("csv_file: str", "lion_beta: str"), ["lion_beta", "optimizer lion"]),
        (OWN.replace('csv_file: str = "rows.csv"', "csv_file: str"), ["csv_file", "no default"]),
    ],
)
def test_code_that_cannot_be_used_is_one_line_with_its_place(text: str, words: list[str]) -> None:
    code = Code("my.py", text)
    with raises_line(ConfigError, "my.py", *words):
        Registry(code).user_kinds()
    assert f"raytrain_gpt_code_{code.sha256[:8]}" not in sys.modules
    with pytest.raises(GeneratorExit), code.errors_as_line():
        raise GeneratorExit  # as of a generator of ours, which is closed


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "my.py"
    with raises_line(ConfigError, f"cannot read code {file}", "No such file"):
        Code.read(file)
    file.write_bytes(b"\xff\xfe")
    with raises_line(ConfigError, f"code {file} is damaged", "utf-8"):
        Code.read(file)


def test_a_traceback_shows_the_line_of_the_code() -> None:
    import traceback

    text = "from raytrain_gpt.extend import schedule\n@schedule('s')\ndef s(*a):\n    return 1 / 0  # here\n"
    with pytest.raises(ZeroDivisionError) as raised:
        Registry(Code("my.py", text)).kind("schedule", "s").resolve()(1, 2, None)
    assert "# here" in "".join(traceback.format_exception(raised.value))


def test_lists_are_written_with_commas_or_as_yaml() -> None:
    for given in ("a,b", "a, b", "[a, b]", ["a", "b"], ("a", "b")):
        assert Config().updated({"trackers": given}).tracking.trackers == ("a", "b")
    for empty in ("", "[]", "()", []):
        assert Config().updated({"evaluations": empty}).eval.evaluations == ()
    before, after = ({"trackers": names} for names in ((), ("a", "b")))
    assert changed_fields(before, after) == {"trackers": "none -> a,b"}


@pytest.mark.parametrize(("selector", "value"), [("optimizer", 5), ("trackers", [[1]])])
def test_a_choice_that_is_no_name_is_one_line(selector: str, value: object) -> None:
    with raises_line(ConfigError, selector, "must be"):
        Config().updated({selector: value})


def test_flags_of_the_code_are_in_the_help_and_its_mistakes_exit_with_2(
    run_cli: RunCli, tmp_path: Path
) -> None:
    file = tmp_path / "my.py"
    file.write_text(OWN)
    page = run_cli.succeeds("train", f"--code={file}", "--help")
    assert "--lion_beta float" in page
    assert "adamw|muon|lion|decayed" in page
    assert "did you mean lion_beta?" in run_cli.refuses("train", "--code", file, "--lion_bta", "1")
    assert "optimizer='lion'" in run_cli.refuses("train", "--optimizer", "lion")
    assert "cannot read code" in run_cli.refuses("train", "--code", tmp_path / "none.py")
    file.write_text(OWN.replace("lion_beta", "dry_run"))
    assert "dry_run of --code is already a flag" in run_cli.refuses("train", "--code", file)
