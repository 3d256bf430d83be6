"""Text of the user's files: several joined, and what in it may decide weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_gpt.config import kinds
from raytrain_gpt.config.code import Code
from raytrain_gpt.errors import ConfigError
from tests.conftest import raises_line

SETTINGS = "from __future__ import annotations\nfrom raytrain_gpt.extend import Settings\n"
MODEL = '''"""A rate."""
import math
from raytrain_gpt.extend import Settings, schedule

HALF = 0.5

def falling(x):
    return math.exp(-x) * HALF

@schedule("falls")
def falls(step, max_steps, settings):
    return falling(step / max_steps)
'''
SCORE = """
from pathlib import Path
from raytrain_gpt.extend import evaluation, Field

class ScoreSettings(Settings):
    score_file: str = "a"

def lines(path):
    return Path(path).read_text()

@evaluation("score", ScoreSettings)
def score(model, tokenizer, rank, world_size, settings):
    return {"a": (len(lines(settings.score_file)), 1)}
"""


@pytest.mark.parametrize(
    ("after", "is_same"),
    [
        (MODEL + SCORE, True),
        (SETTINGS + SCORE + MODEL, True),
        (MODEL.replace("A rate", "Another text") + "# a remark\n", True),
        (MODEL.replace("0.5", "0.4"), False),
        (MODEL.replace("-x", "-2 * x"), False),
        (MODEL.replace("import math", "import cmath as math"), False),
        (MODEL + SCORE + "\nlines('a')\n", False),
        (MODEL + "\nimport torch\ntorch.set_default_dtype(torch.float64)\n", False),
        (MODEL + "\nimport patches_torch\n", False),
        (MODEL + "\nfrom other import *\n", False),
        (MODEL + "\nif HALF:\n    falling = abs\n", False),
        (MODEL + "\ndef falling(x):\n    return 1.0\n", False),
        (MODEL + SCORE.replace("import evaluation", "import schedule as evaluation"), False),
        ("(" * 2000, False),
    ],
)  # fmt: skip
def test_an_added_evaluation_decides_no_weight_all_else_may(after: str, is_same: bool) -> None:
    assert (Code("a.py", MODEL).decides == Code("b.py", after).decides) is is_same


def test_several_files_are_one_code(tmp_path: Path) -> None:
    for name, text in (("model.py", MODEL), ("score.py", SETTINGS + SCORE)):
        (tmp_path / name).write_text(text)
    code = Code.read(tmp_path / "model.py", tmp_path / "score.py")
    kinds.set_user_code(code)
    assert {name for _, name in kinds.user_kinds()} == {"falls", "score"}
    assert code.decides == Code("model.py", MODEL).decides
    (tmp_path / "code.py").write_text(code.text)  # as in a checkpoint
    again = Code.read(tmp_path / "code.py")
    assert (again.files, again.sha256) == (code.files, code.sha256)
    (tmp_path / "code.py").write_text(code.text + "1 / 0\n")
    kinds.set_user_code(Code.read(tmp_path / "code.py"))
    with raises_line(ConfigError, "score.py, line 17: ZeroDivisionError"):
        kinds.user_kinds()
    kinds.set_user_code(Code.read(tmp_path / "model.py", tmp_path / "model.py"))
    with raises_line(ConfigError, "model.py, line 10: schedule falls already exists"):
        kinds.user_kinds()
