"""`runs diff`: the first step and tensor in which two trainings part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raytrain_gpt.config.code import Code
from raytrain_gpt.replays.diff import diff_change
from raytrain_gpt.runs.provenance import RunProvenance
from raytrain_gpt.runs.summary import RunSummary
from raytrain_gpt.train.launch import train
from tests.conftest import RunCli
from tests.faults.gates import Faults, gated
from tests.made_runs import MakeConfig

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
ADAM = """
from raytrain_gpt.extend import optimizer

@optimizer("own_adam", elementwise=True)
def own_adam(parameters, settings, peak_lr):
    groups = [
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
    ]
    return torch.optim.AdamW(groups, peak_lr, betas=(0.9, 0.95), eps=1e-8)
"""
END = "return x + self.post_feedforward_layernorm(self.mlp(x))"
DROPOUT = f"return x + F.dropout({END.removeprefix('return x + ')}, 0.1, self.training)"
OLD = "\n".join((EXAMPLES / name).read_text() for name in ("olmo2.py", "inverse_sqrt.py")) + ADAM
OLD = OLD.replace(END, DROPOUT)
# No clipping: with it, a change of one gradient rounds all others differently.
SETTINGS = {
    "architecture": "olmo2", "optimizer": "own_adam", "schedule": "inverse_sqrt",
    "inverse_sqrt_steps": 8, "max_steps": 20, "grad_clip": 1e3,
}  # fmt: skip
NORM = "h.0.post_attention_layernorm.weight"
CHANGES = {
    "epsilon of Adam": ("eps=1e-8", "eps=1e-9", 1, "wte.weight"),
    "decay of norms": ('"weight_decay": 0.0', '"weight_decay": 0.1', 1, "h.0.q_norm.weight"),
    "first beta": ("(0.9, 0.95)", "(0.8, 0.95)", 2, "wte.weight"),
    "second beta": ("(0.9, 0.95)", "(0.9, 0.99)", 1, "wte.weight"),
    "rate off by one": ("max(settings.inverse_sqrt_steps, step)",
                        "max(settings.inverse_sqrt_steps, step - 1)", 10, "wte.weight"),
    "seed of dropout": (DROPOUT, f"torch.rand(1)\n        {DROPOUT}", 1, "wte.weight"),
    "epsilon of norms": ("eps = shape.settings.norm_eps", "eps = 1e-5", 1, "wte.weight"),
    "swapped residual": ("x + self.post_attention_layernorm(self.attn(x, attend_normed))",
                         "self.post_attention_layernorm(x + self.attn(x, attend_normed))", 1, "wte.weight"),
    "another norm": ("self.post_feedforward_layernorm(self.mlp(x))",
                     "self.post_attention_layernorm(self.mlp(x))", 1, NORM),
    "sign of the rotation": ("first * cos - second", "first * cos + second", 1, "wte.weight"),
    "activation": ("F.silu(", "F.gelu(", 1, "wte.weight"),
    "initial deviation": ("std=0.02", "std=0.021", 0, "wte.weight"),
}  # fmt: skip
"""Change of the math -> text before and after, first step and tensor that differ."""
REFACTORS = {
    "factors": ("first * cos - second * sin", "cos * first - sin * second"),
    "terms": ("second * cos + first * sin", "first * sin + second * cos"),
    "two statements": (DROPOUT, DROPOUT.replace("return x +", "h =") + "\n        return x + h"),
    "reshape": (".transpose(1, 2).flatten(2)", ".transpose(1, 2).reshape(x.shape)"),
    "condition": ("max(settings.inverse_sqrt_steps, step)",
                  "(step if step > settings.inverse_sqrt_steps else settings.inverse_sqrt_steps)"),
    "lists": ("x.chunk(2, -1)", "[x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]]"),
    "one by one": ("eps=1e-8", "eps=1e-8, foreach=False"),
    "in place": ("F.silu(self.gate_proj(x))", "F.silu(self.gate_proj(x), inplace=True)"),
}  # fmt: skip
"""Harmless change -> text before and after."""


@pytest.fixture(scope="module")
def own_run(make_config: MakeConfig) -> RunSummary:
    return train(make_config(Code("old.py", OLD), run_name="diff-own", **SETTINGS), print)


@pytest.fixture
def own(own_run: RunSummary) -> RunProvenance:
    return RunProvenance(own_run.run_dir)


def changed(before: str, after: str) -> str:
    assert before in OLD
    return OLD.replace(before, after, 1)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_math_is_found(name: str, own: RunProvenance) -> None:
    before, after, step, tensor = CHANGES[name]
    said, new = list[str](), Code("new.py", changed(before, after))
    found = diff_change(own, 12, [Code("old.py", OLD)], said.append, new_code=new)
    assert (found["step"], found["tensor"]) == (step, tensor)
    assert found["largest"] > 0
    assert said == [f"step {step}, {tensor}, {found['largest']:.0e}"]


@pytest.mark.parametrize("name", REFACTORS)
def test_a_refactor_has_the_same_bits(name: str, own: RunProvenance) -> None:
    said, new = list[str](), Code("new.py", changed(*REFACTORS[name]))
    assert diff_change(own, 12, [Code("old.py", OLD)], said.append, new_code=new) == {
        "as_recorded": True
    }
    assert said == ["the same bits for 12 steps, 1 to 12"]


def test_the_command_needs_the_code_of_the_run(
    own_run: RunSummary, run_cli: RunCli, tmp_path: Path
) -> None:
    old, new = tmp_path / "old.py", tmp_path / "new.py"
    old.write_text(OLD)
    new.write_text(changed("eps=1e-8", "eps=1e-9"))
    command = ("runs", "diff", own_run.run_dir)
    code, shown, _ = run_cli(*command, "--code", new, "--old_code", old, "--steps", 2, "--json")
    assert (code, json.loads(shown.splitlines()[-1])["tensor"]) == (1, "wte.weight")
    assert "if you trust it" in run_cli.refuses(*command, "--setting", "peak_lr=2e-3")
    assert "if you trust it" in run_cli.refuses(*command, "--code", new)
    shown = run_cli.succeeds(*command, "--code", old, "--steps", 2)
    assert shown == "the same bits for 2 steps, 1 to 2\n"
    assert "give two runs, or one with" in run_cli.refuses(*command)


def test_of_two_runs_and_of_a_setting(make_config: MakeConfig, run_cli: RunCli) -> None:
    a, same = (train(make_config(run_name=f"diff-{name}"), str) for name in ("a", "same"))
    late = make_config(run_name="diff-late", branch_from=f"{a.run_dir}@20", grad_clip=0.5)
    late_run = train(late, str)
    shown = run_cli.succeeds("runs", "diff", a.run_dir, same.run_dir)
    assert shown.splitlines() == [
        "runs: the same", "recorded at step 50: the same", "the same bits for 10 steps, 41 to 50",
    ]  # fmt: skip
    code, shown, _ = run_cli("runs", "diff", a.run_dir, late_run.run_dir, "--json")
    runs, recorded, found, facts = shown.splitlines()
    assert (code, runs) == (1, "runs: grad_clip 1.0 -> 0.5")
    assert recorded.startswith("recorded at step 22: train/loss ")
    assert found.startswith("step 21, ")
    assert json.loads(facts)["changes"] == {"grad_clip": "1.0 -> 0.5"}
    code, shown, _ = run_cli("runs", "diff", a.run_dir, "--setting", "beta2=0.9")
    assert (code, shown.startswith("step 1, ")) == (1, True)


def test_a_setting_that_a_replay_cannot_use_is_refused(
    make_config: MakeConfig, run_cli: RunCli
) -> None:
    run = train(make_config(run_name="diff-settings", max_steps=10), str)
    for setting in ("num_workers=2", "data_path=x", "parallel=fsdp", "micro_batch_sequences=4"):
        said = run_cli.refuses("runs", "diff", run.run_dir, "--setting", setting)
        assert f"a replay cannot change {setting.split('=')[0]};" in said
    said = run_cli.refuses("runs", "diff", run.run_dir, "--setting", "global_batch_tokens=32")
    assert "does not divide over 1 worker" in said


def test_the_first_step_is_found_behind_later_checkpoints(
    make_config: MakeConfig, run_cli: RunCli
) -> None:
    """Rows show a difference of weights one step later, when a checkpoint may already have it."""
    fields = {"max_steps": 10, "checkpoint_every_steps": 1, "keep_checkpoints": 10}
    runs = [
        train(make_config(run_name=f"diff-{decay}", weight_decay=decay, **fields), str).run_dir
        for decay in (0.1, 0.101)
    ]
    code, shown, _ = run_cli("runs", "diff", *runs)
    _, recorded, found = shown.splitlines()
    assert code == 1
    assert not recorded.startswith("recorded at step 1: ")
    assert found.startswith("step 1, ")


def test_a_run_that_does_not_come_out_as_recorded_fails(
    make_config: MakeConfig, run_cli: RunCli
) -> None:
    run = train(
        make_config(run_name="diff-spoiled", max_steps=10), str, gated(Faults(spiked_batches=(5,)))
    )
    code, shown, _ = run_cli(
        "runs", "diff", run.run_dir, "--setting", "keep_checkpoints=3", "--json"
    )
    assert (code, json.loads(shown.splitlines()[-1])) == (1, {"as_recorded": False})
