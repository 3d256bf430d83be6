"""Runs on a mixture of three datasets: one order for any worker count, each dataset's share and loss."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from raytrain_gpt.runs.summary import RunSummary
from raytrain_gpt.train.launch import train
from tests.conftest import RunCli
from tests.data.shard_tools import prepare_here
from tests.made_runs import MakeConfig, assert_same_order, evaluations, restarted_from, steps

pytestmark = pytest.mark.slow

SHARES = {"letters": 0.7, "digits": 0.2, "signs": 0.1}
RUN = {
    "max_steps": 200,
    "checkpoint_every_steps": 45,
    "eval_every_steps": 100,
    "embd_size": 16,
    "micro_batch_sequences": 3,
}


@pytest.fixture(scope="module")
def data_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prepare three datasets of very different text; return their `data_path`."""
    root = tmp_path_factory.mktemp("mixture")
    for name, signs in [("letters", "abcde "), ("digits", "0123456789"), ("signs", "+-")]:
        text = "".join(itertools.islice(itertools.cycle(signs), 40_000))
        Path(root, f"{name}.txt").write_text(text)
        prepare_here([str(root / f"{name}.txt")], root / name, "bytes", val_fraction=0.1)
    return ",".join(f"{root / name}={weight}" for name, weight in SHARES.items())


@pytest.fixture(scope="module")
def one(make_config: MakeConfig, data_path: str) -> RunSummary:
    """Train a run on the mixture in this process."""
    lines: list[str] = []
    summary = train(make_config(run_name="mix", data_path=data_path, **RUN), lines.append)
    assert any("mixed: letters 70.0% (" in line for line in lines)
    assert any("| letters " in line and "| signs " in line for line in lines if "val loss" in line)
    return summary


@pytest.mark.ray
def test_two_workers_go_on_with_a_mixture_in_its_order(
    cluster: str, one: RunSummary, make_config: MakeConfig, data_path: str, storage: Path
) -> None:
    copy = restarted_from(one, 90, storage, "mix-2")
    train(make_config(run_name="mix-2", data_path=data_path, num_workers=2, **RUN), print)
    assert_same_order(copy, one)
    last, expected = evaluations(copy)[-1], evaluations(one.run_dir)[-1]
    names = [f"val/loss/{name}" for name in SHARES]
    assert [last[name] for name in names] == pytest.approx([expected[n] for n in names], abs=1e-4)


def test_every_dataset_has_its_share_and_its_loss(one: RunSummary, run_cli: RunCli) -> None:
    rows = steps(one.run_dir)
    assert len(rows) == 200
    tokens = [{name: row[f"data/tokens/{name}"] for name in SHARES} for row in rows]
    assert sum(tokens[-1].values()) == rows[-1]["data/tokens_seen"]
    for first, last in zip(tokens, tokens[50:], strict=False):
        for name, share in SHARES.items():
            assert (last[name] - first[name]) / (50 * 12 * 32) == pytest.approx(share, abs=0.01)

    evaluated = evaluations(one.run_dir)[-1]
    losses = {name: evaluated[f"val/loss/{name}"] for name in SHARES}
    assert len(set(losses.values())) == 3
    assert evaluated["val/loss"] == pytest.approx(sum(losses[n] * SHARES[n] for n in SHARES))
    assert sum(evaluated[f"val/tokens/{name}"] for name in SHARES) == evaluated["val/tokens"]

    out = run_cli.succeeds("eval", one.run_dir.path, "--json")
    alone = json.loads(out.splitlines()[-1])
    assert alone["val/loss"] == pytest.approx(evaluated["val/loss"], abs=1e-4)
    assert alone["val/loss/signs"] == pytest.approx(losses["signs"], abs=1e-4)
