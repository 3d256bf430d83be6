"""The tables of docs/configuration.md match the configuration's fields and presets.

python -m tests.config.test_configuration_page     # writes the tables into the page
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import raytrain_gpt
from raytrain_gpt.commands.flags import _kind, _names
from raytrain_gpt.config.kinds import BUILT_IN, SECTIONS
from raytrain_gpt.config.load import load_preset, preset_names
from raytrain_gpt.config.schema import Config, changes_math
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.registry import count_model
from raytrain_gpt.format import amount

PAGE = Path(raytrain_gpt.__file__).parents[1] / "docs" / "configuration.md"
COMMAND = "python -m tests.config.test_configuration_page"
IDS = {"data/fineweb-edu-10b": 50_257}
"""Dataset of a preset -> vocabulary size; all others have the 257 ids of `bytes`."""


def test_tables_of_the_page_are_current() -> None:
    page = PAGE.read_text("utf-8")
    assert page == with_tables(page), f"regenerate docs/configuration.md: {COMMAND}"


def with_tables(page: str) -> str:
    """Return the page with the tables between its markers regenerated."""
    for name, table in {"keys": keys_table(), "presets": presets_table()}.items():
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        assert page.count(start) == page.count(end) == 1
        before, after = page.split(start)[0], page.split(end)[1]
        page = f"{before}{start}\n{table}\n{end}{after}"
    return page


def keys_table() -> str:
    tables = []
    for section, field in Config.model_fields.items():
        lines = [f"### {section}", "", "| key | values | default | meaning |", "|---|---|---|---|"]
        fields = {n: one for n, (of, one) in BUILT_IN.fields.items() if of == section}
        is_safe = not any(changes_math(name, Config()) for name in fields)
        for name, info in fields.items():
            mark = "" if is_safe or changes_math(name, Config()) else " \\*"
            meaning = " ".join((info.description or "").split())
            if owners := BUILT_IN.owners(name):
                meaning += f" For {owners[0].selector} {', '.join(one.name for one in owners)}."
            kind = _names(name, BUILT_IN) if name in SECTIONS else _kind(info.annotation)
            values = ", ".join(f"`{one}`" for one in kind.split("|"))
            lines.append(
                f"| `{name}`{mark} | {values} | `{plain(info.default)}` | {cell(meaning)} |"
            )
        if is_safe:
            lines.insert(2, "All may change on resume.\n")
        tables.append("\n".join(lines))
        assert field.annotation is not None
    return "\n\n".join(tables) + "\n"


def presets_table() -> str:
    """Return a table of the presets: size and work; their files show all settings."""
    lines = ["| preset | model | tokens | tokens per step |", "|---|---|---|---|"]
    for name in preset_names():
        config = load_preset(name)
        m, train = config.model, config.train
        shape = GPTShape.of(config, IDS.get(config.data.data_path, 257))
        num_parameters = amount(count_model(shape).num_parameters)
        size = f"{num_parameters} {m.architecture}, {m.num_layers} layers"
        tokens = amount(train.max_steps * train.global_batch_tokens)
        file = f"[`{name}`](../raytrain_gpt/presets/{name}.yaml)"
        lines.append(f"| {file} | {size} | {tokens} | {train.global_batch_tokens:,} |")
    return "\n".join(lines) + "\n"


def plain(value: Any) -> str:
    """Format a value as YAML, without the quotes that most strings do not need."""
    if isinstance(value, float):
        return f"{value:g}" if value >= 1e-3 or value == 0 else re.sub("e-0", "e-", f"{value:.1e}")
    return json.dumps(value, ensure_ascii=False).strip('"')


def cell(text: str) -> str:
    """Escape text for a table cell."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text("utf-8")), "utf-8")
