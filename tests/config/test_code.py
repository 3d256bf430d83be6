"""Text of the user's files: several joined, and what in it may decide weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_gpt.config.code import Code
from raytrain_gpt.config.kinds import Registry
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
    "after",
    [
        MODEL.replace("A rate", "Another text"),
        MODEL.replace("HALF = 0.5\n", "# a remark\n\n\nHALF = 0.5  # half\n"),
        MODEL.replace("(x):\n", '(x):\n    """Fall."""\n'),
        MODEL.replace("math.exp(-x) * HALF", "(math.exp(\n        -x) * HALF)"),
        MODEL + "'a string alone'\n",
    ],
)
def test_what_cannot_act_is_no_change(after: str) -> None:
    assert Code("a.py", MODEL).acts == Code("b.py", after).acts


@pytest.mark.parametrize(
    "after",
    [
        MODEL + SCORE,
        SETTINGS + SCORE + MODEL,
        MODEL.replace("0.5", "0.4"),
        MODEL.replace("-x", "-2 * x"),
        MODEL.replace("import math", "import cmath as math"),
        MODEL.replace("def falls(step", "def falls(step=0"),
        MODEL.replace("(x):\n", "(x):\n    b'bytes'\n"),
        MODEL + "\nlines = 1\n",
        MODEL + "\nimport json\n",
        MODEL + "\nfrom json import dumps\n",
        MODEL + "\nfrom other import *\n",
        MODEL + "\nimport patches_torch\n",
        MODEL + "\nimport torch\ntorch.set_default_dtype(torch.float64)\n",
        MODEL + "\nimport torch\ntorch.nn.Linear.forward = None\n",
        MODEL + "\nif HALF:\n    falling = abs\n",
        MODEL + "\nwhile False:\n    pass\n",
        MODEL + "\nfor HALF in (1, 2):\n    pass\n",
        MODEL + "\nwith open('a') as HALF:\n    pass\n",
        MODEL + "\ntry:\n    import a\nexcept ImportError:\n    HALF = 0.4\n",
        MODEL + "\nglobals()['HALF'] = 0.4\n",
        MODEL + "\nexec('HALF = 0.4')\n",
        MODEL + "\nimport sys\nsys.modules['math'] = None\n",
        MODEL + "\nHALF += 1\n",
        MODEL + "\ndel HALF\n",
        MODEL + "\nassert (HALF := 0.4)\n",
        MODEL + "\ndef falling(x):\n    return 1.0\n",
        MODEL + "\nclass A:\n    globals()['HALF'] = 0.4\n",
        MODEL + "\nclass A(Settings):\n    pass\n",  # a base may have __init_subclass__
        MODEL + "\ndef unused(a=globals().update(HALF=0.4)):\n    pass\n",
        MODEL + "\ndef unused(a: globals().update(HALF=0.4)):\n    pass\n",
        MODEL + "\n@print\ndef unused():\n    pass\n",
        MODEL + "\nunused = lambda: 1\n",
        MODEL + SCORE.replace("import evaluation", "import schedule as evaluation"),
        MODEL + SCORE.replace("return {", "globals().update(HALF=0.4)\n    return {"),
        "# raytrain-gpt: file a.py\n" + MODEL + "# raytrain-gpt: file b.py\nHALF = 0.4\n",
        "(" * 2000,
    ],
)  # fmt: skip
def test_every_other_change_may_act(after: str) -> None:
    assert Code("a.py", MODEL).acts != Code("b.py", after).acts


def test_a_change_is_described_by_its_lines() -> None:
    after = MODEL.replace("HALF = 0.5", "HALF = 0.4\nTHIRD = 0.3")
    shown = Code("a.py", after).changed_lines(Code("a.py", MODEL))
    assert shown == "2 lines added, 1 removed, first '-HALF = 0.5'"


def test_several_files_are_one_code(tmp_path: Path) -> None:
    for name, text in (("model.py", MODEL), ("score.py", SETTINGS + SCORE)):
        (tmp_path / name).write_text(text)
    code = Code.read(tmp_path / "model.py", tmp_path / "score.py")
    assert {name for _, name in Registry(code).user_kinds()} == {"falls", "score"}
    (tmp_path / "code.py").write_text(code.text)  # as in a checkpoint
    again = Code.read(tmp_path / "code.py")
    assert (again.files, again.sha256) == (code.files, code.sha256)
    (tmp_path / "code.py").write_text(code.text + "1 / 0\n")
    with raises_line(ConfigError, "score.py, line 17: ZeroDivisionError"):
        Registry(Code.read(tmp_path / "code.py")).user_kinds()
    with raises_line(ConfigError, "model.py, line 10: schedule falls already exists"):
        Registry(Code.read(tmp_path / "model.py", tmp_path / "model.py")).user_kinds()
