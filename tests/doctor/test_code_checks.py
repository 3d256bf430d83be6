"""`doctor --code`: every planted fault is found with its line, and good files pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import raytrain_gpt
from raytrain_gpt.config.code import Code
from raytrain_gpt.config.kinds import Registry
from raytrain_gpt.doctor import code_checks
from raytrain_gpt.doctor.check import Check
from tests.conftest import RunCli
from tests.made_runs import own_config

HEAD = """
import random
import torch
from torch import nn
from raytrain_gpt.core.gpt2 import GPT2
from raytrain_gpt.export import hf_gpt2
from raytrain_gpt.extend import architecture, evaluation, optimizer, schedule, tracker
"""

MODEL = """
@architecture("mine")
class Mine(GPT2):
    def init_weights(self, seed):
        super().init_weights(seed)
"""

EXPORTED = (
    MODEL
    + """
    @staticmethod
    def config_of(shape):
        return hf_gpt2.config_of(shape)

    @staticmethod
    def to_hf(name, tensor):
        return hf_gpt2.to_hf(name, tensor)
"""
)

SGD = """
class Sgd(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})
        self.last = {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.one(p, self.state[p], group["lr"])

    def one(self, p, state, lr):
        m = state.setdefault("m", torch.zeros_like(p))
        m.lerp_(p.grad, 0.1)
        p.add_(m, alpha=-lr)

@optimizer("mine", elementwise=True)
def mine(parameters, settings, peak_lr):
    return Sgd(parameters, peak_lr)
"""

SCHEDULE = """
@schedule("mine")
def mine(step, max_steps, settings):
    return 1 - step / (max_steps + 1)
"""

EVALUATION = """
@evaluation("mine")
def mine(model, tokenizer, rank, world_size, settings):
    ids = torch.arange(6)[rank::world_size, None]
    losses = model(ids, ids, reduction="none")
    return {"loss": (float(losses.sum()), len(ids))}
"""

TRACKER = """
@tracker("mine")
class Mine:
    def __init__(self, run, settings):
        self.file = run.directory / "mine.txt"

    def rows(self, rows):
        with self.file.open("a") as file:
            file.writelines(f"{row['step']}\\n" for row in rows)

    def text(self, step, name, text):
        pass

    def finish(self, end, files):
        pass
"""

GOOD = {
    "one of each": EXPORTED + SGD + SCHEDULE + EVALUATION + TRACKER,
    "evaluation of random tokens": EVALUATION.replace(
        "torch.arange(6)", "torch.randint(random.randrange(9, 99), (6,))"
    ),
    "tracker without text and finish": TRACKER[: TRACKER.index("    def text")],
}

FAULTS = {
    "sees the future": (
        MODEL + "    def hidden(self, ids):\n        return super().hidden(ids).flip(1)\n",
        ("causality", "token 0", "mask later tokens"),
    ),
    "sees the future only in training": (
        MODEL
        + "    def hidden(self, ids):\n        hidden = super().hidden(ids)\n"
        + "        return hidden.flip(1) if self.training else hidden\n",
        ("causality", "token 0", "mask later tokens"),
    ),
    "swaps two matrices in its export": (
        EXPORTED.replace("(name, tensor)\n", "(name.replace('h.0', 'h.x').replace('h.1', 'h.0'), tensor)\n")
        .replace("'h.0')", "'h.0').replace('h.x', 'h.1')"),
        ("export", "the logits of transformers' GPT2LMHeadModel differ", "correct to_hf"),
    ),
    "misses a matrix in its export": (
        EXPORTED.replace("return hf_gpt2.to_hf(name, tensor)", "return f'x.{name}', tensor"),
        ("export", "has other tensors, such as transformer."),
    ),
    "ignores its positions": (
        MODEL
        + "    def embed(self, ids, positions):\n"
        + "        return super().embed(ids, torch.arange(ids.shape[1]))\n",
        ("causality", "token 1", "use `attend` and `positions`"),
    ),
    "raises in its layers": (
        MODEL + "    def make_layers(self, shape):\n        self.no_such_size()\n",
        ("causality", "my.py, line", "AttributeError", "no_such_size"),
    ),
    "not elementwise": (
        SGD.replace("p.add_(m,", "p.add_(m / m.norm(),"),
        ("elementwise", "remove elementwise=True"),
    ),
    "schedule draws": (
        SCHEDULE.replace("1 - step / (max_steps + 1)", "random.random()"),
        ("factors", "depends only on the arguments"),
    ),
    "schedule is not finite": (
        SCHEDULE.replace("return 1", "return float('nan') if step == 7 else 1"),
        ("factors", "nan at step 7 of 10", "finite factor"),
    ),
    "a mean instead of a sum": (
        EVALUATION.replace("losses.sum()), len(ids)", "losses.mean()), 1"),
        ("sums", "on one rank, but", "ranks 0 and 1 of 2"),
    ),
    "changes the mode": (
        EVALUATION.replace("return {", "model.train()\n    return {"),
        ("sums", "leave the model unchanged"),
    ),
    "a number instead of a pair": (
        EVALUATION.replace("(float(losses.sum()), len(ids))", "1.5"),
        ("sums", "key -> (sum, count)"),
    ),
    "tracker raises when resumed": (
        TRACKER.replace('"mine.txt"', '"mine.txt"\n        self.file.touch(exist_ok=False)'),
        ("calls", "my.py, line 13: FileExistsError"),
    ),
}  # fmt: skip


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out runs, which take half a minute."""
    monkeypatch.setattr(code_checks, "compare_runs", lambda code, config: "left out")


def checks_of(text: str, **fields: object) -> list[Check]:
    lines: list[str] = []
    checks = code_checks.check_code(own_config(HEAD + text, **fields), lines.append)
    assert lines == [check.line for check in checks]
    return checks


def failures(checks: list[Check]) -> list[str]:
    return [check.line for check in checks if check.status == "FAIL"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("text", GOOD.values(), ids=GOOD)
def test_a_good_file_passes(text: str) -> None:
    checks = checks_of(text)
    assert checks
    assert {check.status for check in checks} == {"PASS"}, [check.line for check in checks]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("text", "words"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found_with_its_line(text: str, words: tuple[str, ...]) -> None:
    failed = failures(checks_of(text))
    assert any(all(word in line for word in words) for line in failed), failed


@pytest.mark.usefixtures("quick")
def test_an_elementwise_update_is_checked_only_where_it_is_declared() -> None:
    text = SGD.replace(", elementwise=True", "").replace("p.add_(m,", "p.add_(m / m.norm(),")
    checks = {check.name: check.status for check in checks_of(text)}
    assert checks.pop("optimizer mine, elementwise") == "SKIP"
    assert {*checks.values()} == {"PASS"}


@pytest.mark.usefixtures("quick")
def test_runs_choose_a_kind_of_each_selector_and_wait_for_the_other_checks() -> None:
    two = SCHEDULE + SCHEDULE.replace('"mine"', '"other"')
    runs = [check.name for check in checks_of(SGD + two) if check.text == "left out"]
    assert runs == ["runs of optimizer mine, schedule mine", "runs of schedule other"]
    *_, last = checks_of(SGD + SCHEDULE.replace("return 1", "return None"))
    assert last.line == "SKIP runs of optimizer mine, schedule mine: another check failed"


@pytest.mark.usefixtures("quick")
def test_settings_of_the_command_are_used_for_the_kinds_that_it_chooses() -> None:
    text = """
from raytrain_gpt.extend import Settings

class Level(Settings):
    level: float = -1.0
    heads: int = 5

    def check(self, section):
        if self.heads % 2:
            raise ValueError(f"heads={self.heads} must be even")

@schedule("mine", Level)
def mine(step, max_steps, settings):
    return settings.level
"""
    (line,) = failures(checks_of(text))
    assert "heads=5 must be even" in line
    (line,) = failures(checks_of(text, schedule="mine", heads=2))
    assert line.startswith("FAIL schedule mine, factors: it returned -1.0, then -1.0")
    assert failures(checks_of(text, schedule="mine", heads=2, level=0.5)) == []


def test_a_file_that_declares_nothing_is_refused(tmp_path: Path, run_cli: RunCli) -> None:
    file = tmp_path / "my.py"
    file.write_text("x = 1\n")
    assert "my.py declares nothing; use a decorator" in run_cli.refuses("doctor", "--code", file)


EXAMPLES = sorted((Path(raytrain_gpt.__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_a_shipped_example_passes(file: Path, tmp_path: Path, run_cli: RunCli) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words of a text " * 200)
    more = ["--evaluations", "accuracy", "--accuracy_file", text] if file.stem == "accuracy" else []
    *lines, next_line, facts = run_cli.succeeds(
        "doctor", "--json", "--code", file, *more
    ).splitlines()
    checks = json.loads(facts)["checks"]
    left = [check for check in checks if check["status"] != "PASS"]
    assert all("it has no to_hf" in check["text"] for check in left), lines
    kind = next(iter(Registry(Code.read(file)).user_kinds()))
    assert next_line.startswith(f"next: raytrain-gpt train --code {file} --{kind[0]} {kind[1]}")


@pytest.mark.long
@pytest.mark.slow
def test_the_shipped_examples_run_together_and_resume_with_the_same_bits() -> None:
    chosen = ("inverse_sqrt", "lion", "olmo2")
    checks = checks_of("".join(file.read_text() for file in EXAMPLES if file.stem in chosen))
    assert failures(checks) == []
    names = "architecture olmo2, optimizer lion, schedule inverse_sqrt"
    assert [c.name for c in checks if c.name.startswith("runs")] == [f"runs of {names}"]


@pytest.mark.long
def test_a_run_that_does_not_resume_with_the_same_bits_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = iter([b"unbroken", b"resumed"])
    monkeypatch.setattr(code_checks, "_trained", lambda *_: next(weights))
    assert failures(checks_of(SGD)) == [
        "FAIL runs of optimizer mine: resumed from step 5, the weights differ; use no randomness, and keep "
        "all state in the optimizer's state[p] or as numbers in param_groups"
    ]
