"""Where the configuration of a call starts."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from raytrain_gpt.config.kinds import BUILT_IN
from raytrain_gpt.config.load import load_preset
from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import CheckpointError, ConfigError
from raytrain_gpt.train import run_config as module
from raytrain_gpt.train.run_config import fields_of_init_from
from tests.checkpoints import write_checkpoint
from tests.conftest import raises_line

run_config = partial(module.run_config, registry=BUILT_IN)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def made(name: str, **fields: object) -> Config:
    """Write the configuration of a run."""
    config = Config().updated({"run_name": name, **fields})
    Path("runs", name).mkdir(parents=True)
    Path("runs", name, "config.yaml").write_text(config.to_yaml())
    return config


def test_a_call_without_data_is_the_demo_and_one_with_data_has_the_defaults_of_a_file() -> None:
    demo = load_preset("quickstart")
    assert run_config(None, None, {"run_name": "mine"}) == (
        demo.updated({"run_name": "mine"}),
        'preset quickstart: run_name "mine"',
    )
    Path("mine.yaml").write_text("data: {data_path: data/book}")
    own, said = run_config(None, None, {"data_path": "data/book", "run_name": "mine"})
    assert said == 'defaults: data_path "data/book", run_name "mine"'
    assert run_config(None, "mine.yaml", {}) == (
        own,
        'configuration mine.yaml: data_path "data/book", run_name "mine"',
    )


def test_a_run_takes_its_other_settings_from_its_own_configuration() -> None:
    book = made("book", data_path="data/book", optimizer="muon", dropout=0.1, num_workers=4)
    config, said = run_config(None, None, {"run_name": "book", "max_steps": "2000"})
    assert config == book.updated({"max_steps": 2000})
    assert said == f"as run book, {Path.cwd()}/runs/book/config.yaml: max_steps 2000"
    assert run_config("quickstart", None, {"run_name": "book"})[0].model.dropout == 0
    elsewhere, _ = run_config(None, None, {"run_name": "book", "storage_path": "others"})
    assert elsewhere.model.dropout == 0


def test_local_mode_drops_min_workers_of_the_start() -> None:
    made("book", min_workers=1)
    for zero in ("0", 0):
        for preset, name in (("quickstart", "new"), (None, "book")):
            cluster = run_config(preset, None, {"num_workers": zero, "run_name": name})[0].cluster
            assert (cluster.num_workers, cluster.min_workers) == (0, None)


def test_a_runs_own_configuration_chooses_no_place_and_no_end() -> None:
    made(
        "book", storage_path="/moved/runs", s3_endpoint="http://theirs", resume="never", dropout=0.1
    )
    config, _ = run_config(None, None, {"run_name": "book"})
    assert (config.run.storage_path, config.run.s3_endpoint) == ("runs", None)
    assert (config.run.resume, config.model.dropout) == ("auto", 0.1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("data_path", "/srv/data=0.5,gs://theirs/data=0.5"),
        ("mlflow_uri", "http://theirs:5000"),
        ("hellaswag_path", "s3://theirs/hellaswag.jsonl"),
    ],
)
def test_a_runs_own_configuration_chooses_no_store(name: str, value: str) -> None:
    made("book", **{name: value})
    with raises_line(ConfigError, f"{name}={value} in another store", f"add --{name} "):
        run_config(None, None, {"run_name": "book"})
    config, _ = run_config(None, None, {"run_name": "book", name: value})
    assert config.field_values()[name] == value


CHECKED_TEXTS = {"data_path", "init_from", "branch_from", "hellaswag_path"}
"""Fields that a run's own configuration may set, unless they are a URL in another store, as above."""
HARMLESS_TEXTS = {"architecture", "optimizer", "schedule", "sample_prompt"}
"""Fields that it may set, and that name no server: kinds are built in or from the caller's --code."""
CALLERS_TEXTS = {"run_name"}
"""Fields that a call always sets."""


def takes_any_text(field: FieldInfo) -> bool:
    try:
        TypeAdapter(field.annotation).validate_python("theirs-space")
    except ValidationError:
        return False
    return True


TEXTS = {name for name, (_, field) in BUILT_IN.fields.items() if takes_any_text(field)}


@pytest.mark.parametrize("name", sorted(TEXTS - CHECKED_TEXTS - HARMLESS_TEXTS - CALLERS_TEXTS))
def test_no_other_text_is_taken_from_a_run(name: str) -> None:
    """So a new field of text, also of a new tracker, fails here until it is reset or named above."""
    owners = {kind.name for kind in BUILT_IN.owners(name) if kind.selector == "trackers"}
    stored = {"trackers": ",".join(owners), name: "theirs-space"}
    made("book", **stored)
    default = BUILT_IN.fields[name][1].default
    for fields in ({"run_name": "book"}, {"run_name": "mine", "branch_from": "book@20"}):
        taken = run_config(None, None, fields)[0].field_values()
        assert taken.get(name, default) == fields.get(name, default)
        assert taken["trackers"] == ()
    config, _ = run_config(None, None, {"run_name": "book", **stored})
    assert config.field_values()[name] == "theirs-space"


def test_trackers_that_are_left_out_are_named_with_the_flags_that_choose_them() -> None:
    made("book", trackers="wandb,trackio", trackio_space="theirs/space", tensorboard=False)
    config, said = run_config(None, None, {"run_name": "book", "trackers": "wandb"})
    assert (config.tracking.trackers, config.tracking.tensorboard) == (("wandb",), True)
    left_out = "--tensorboard False --trackio_space theirs/space"
    assert f"config.yaml without its own {left_out}, which only you may choose: trackers" in said


def test_a_new_branch_takes_the_settings_of_its_origin_and_then_its_own() -> None:
    book = made("book", dropout=0.1, init_from="models/gpt2")
    fields = {"run_name": "other", "branch_from": "book@20", "peak_lr": "0.004"}
    config, _ = run_config(None, None, fields)
    assert config == book.updated({"init_from": None, **fields})
    Path("runs/book/checkpoints/step=00000020").mkdir(parents=True)
    for path in ("runs/book", "runs/book/checkpoints/step=00000020"):
        assert run_config(None, None, {**fields, "branch_from": path})[0].model.dropout == 0.1
    made("other", dropout=0.2)
    assert run_config(None, None, fields)[0].model.dropout == 0.2


def test_weights_bring_their_sizes_and_a_rate_for_fine_tuning() -> None:
    write_checkpoint(Path("runs/first"), 10, 2.0, num_layers=3)
    fields = {"init_from": "first", "run_name": "tuned", "data_path": "data/book"}
    config, _ = run_config(None, None, fields)
    assert (config.model.num_layers, config.optim.peak_lr, config.optim.min_lr) == (3, 5e-5, 0)
    assert config.optim.warmup_steps > 0
    assert config.train.micro_batch_sequences == "auto"
    config, _ = run_config(None, None, {**fields, "peak_lr": "1e-6"})
    assert config.optim.peak_lr == 1e-6
    preset = load_preset("gpt2-124m").optim.peak_lr
    sizes = {"num_heads": "4", "embd_size": "128"}
    assert run_config("gpt2-124m", None, {**fields, **sizes})[0].optim.peak_lr == preset


def test_a_run_needs_the_start_no_more() -> None:
    fields = {"init_from": "gone", "run_name": "tuned"}
    with pytest.raises(CheckpointError, match=r"no run gone in .*/runs, which has none"):
        fields_of_init_from(None, None, fields, BUILT_IN)
    write_checkpoint(Path("runs/tuned"), 10, 2.0, num_layers=3)
    assert fields_of_init_from(None, None, fields, BUILT_IN)["num_layers"] == 3


def test_a_damaged_configuration_of_a_run_is_one_line() -> None:
    made("book")
    Path("runs/book/config.yaml").write_text("train: {max_stepz: 1}")
    with raises_line(ConfigError, "max_stepz", "runs/book/config.yaml"):
        run_config(None, None, {"run_name": "book"})


def test_a_run_without_its_configuration_has_the_settings_of_its_newest_checkpoint() -> None:
    write_checkpoint(Path("runs/book"), 10, 2.0, num_layers=3)
    config, _ = run_config(None, None, {"run_name": "book"})
    assert (config.model.num_layers, config.run.run_name) == (3, "book")


def test_a_branch_without_a_name_is_refused() -> None:
    made("book")
    fields = {"branch_from": "book@20"}
    with raises_line(ConfigError, "branch_from needs a new run_name; add --run_name NAME"):
        run_config(None, None, fields)
    assert run_config("quickstart", None, fields)[0].run.run_name == "quickstart"


@pytest.mark.parametrize("preset", [None, "quickstart"])
def test_a_branch_from_nothing_is_refused_before_anything_is_prepared(preset: str | None) -> None:
    fields = {"run_name": "new", "branch_from": "nothere@20"}
    with raises_line(CheckpointError, "no run nothere in ", "/runs, which has none"):
        run_config(preset, None, fields)
    assert not Path("data").exists()
