"""Any file either loads as a configuration or fails with a one-line error. Long run: `CONTRIBUTING.md`."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest
from hypothesis import example, given, settings

from raytrain_gpt.config.batch import check_shares, micro_batch_for
from raytrain_gpt.config.load import load_config_file, preset_names
from raytrain_gpt.config.schema import FIELDS, Config
from raytrain_gpt.data.mixture import parse_data_path
from tests.damage import BOMBS, damaged, edited, refusing_with_one_line

pytestmark = pytest.mark.slow

PRESETS = resources.files("raytrain_gpt").joinpath("presets")
TEXTS = [PRESETS.joinpath(f"{name}.yaml").read_text("utf-8") for name in preset_names()]
TEXTS.append(Config().updated({"data_path": "a=0.7,b=0.3", "num_workers": 2}).to_yaml())
SECTIONS = {
    section: [name for name, (own, _) in FIELDS.items() if own == section]
    for section in Config.model_fields
}

fuzz = settings(max_examples=4 * settings.default.max_examples, deadline=5000)
"""An example that takes more than 5 s fails."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "config.yaml"


def check(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with refusing_with_one_line():
        config = load_config_file(file)
        file.write_text(config.to_yaml(), "utf-8")
        assert load_config_file(file) == config
        parse_data_path(config.data.data_path)
        workers = config.cluster.num_workers
        world_size = 1 if workers in ("auto", 0) else workers
        check_shares(config, world_size)
        assert micro_batch_for(config, world_size)


@fuzz
@given(damaged(TEXTS))
@example(BOMBS[0].encode())
@example(BOMBS[1].encode())
def test_a_damaged_file_is_a_configuration_or_one_line(file: Path, content: bytes) -> None:
    check(file, content)


@pytest.mark.fault("YAML with duplicate keys, deep nesting, aliases, huge values")
@fuzz
@given(edited({}, SECTIONS))
def test_any_value_is_a_configuration_or_one_line(file: Path, content: bytes) -> None:
    check(file, content)
