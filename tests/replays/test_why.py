"""`runs why`: which sequences make a step's loss."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path

import pytest

from raytrain_gpt.runs.provenance import RunProvenance
from raytrain_gpt.train.launch import train
from tests.conftest import RunCli
from tests.data.shard_tools import prepare_here
from tests.faults.gates import Faults, gated
from tests.made_runs import MakeConfig, steps

pytestmark = pytest.mark.slow

NOISE = {
    "digits": "0123456789", "capitals": "QXZJKV", "marks": "#$%&*+/<=>@^_~|", "hex": "0123456789abcdef",
    "letters": "qxzjkvbw",
}  # fmt: skip
"""Kind of garbage -> its characters, in random order."""


@pytest.mark.parametrize("kind", NOISE)
def test_a_garbage_sequence_ranks_first(
    kind: str, make_config: MakeConfig, tmp_path: Path, run_cli: RunCli
) -> None:
    words = ("the", "cat", "sat", "on", "a", "mat", "and", "then", "it", "went", "home")
    text = " ".join(random.Random(1).choices(words, k=5000))
    garbage = "".join(random.Random(2).choices(NOISE[kind], k=100))
    Path(tmp_path, "text.txt").write_text(text[:9000] + garbage + text[9000:])
    prepare_here([str(tmp_path / "text.txt")], tmp_path / "data", "bytes", val_fraction=0.1)
    run = train(
        make_config(run_name=f"why-{kind}", data_path=str(tmp_path / "data"), peak_lr=2e-2), str
    )
    provenance = RunProvenance(run.run_dir)
    having = [
        (step, sequence.id)
        for step, _ in provenance.batches()
        for sequence in provenance.step(step)
        if sequence.text in garbage
    ]
    step, sequence = having[-1]
    assert step > 10
    shown = run_cli.succeeds("runs", "why", run.run_dir, "--step", step, "--json").splitlines()
    facts = json.loads(shown[-1])
    assert f"sequence {sequence} |" in shown[4]
    first, second, *_ = facts["sequences"]
    assert first["id"] == sequence
    assert first["loss"] > 1.3 * second["loss"]
    assert first["share"] == max(one["share"] for one in facts["sequences"])
    before = [row["train/loss"] for row in steps(run.run_dir) if step - 10 <= row["step"] < step]
    noise = statistics.stdev(before)
    assert facts["loss"] > statistics.mean(before) + 3 * noise
    assert abs(facts["without"]["loss"] - statistics.mean(before)) < 3 * noise


def test_the_default_is_the_last_recorded_spike(make_config: MakeConfig, run_cli: RunCli) -> None:
    run = train(make_config(run_name="why-none", max_steps=10), str)
    assert "has no recorded spike" in run_cli.refuses("runs", "why", run.run_dir)
    assert "not finite" not in run_cli.succeeds("runs", "why", run.run_dir, "--step", 1)
    fields = {"run_name": "why-spike", "spike_window_steps": 16}
    run = train(make_config(**fields), str, gated(Faults(spiked_batches=(29, 35))))
    shown = run_cli.succeeds("runs", "why", run.run_dir)
    assert "step 36" in shown.splitlines()[1]
