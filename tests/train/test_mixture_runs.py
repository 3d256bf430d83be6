"""Runs on a mixture of three datasets: the same order whatever the workers, shares, losses of each."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from raytrain_gpt.train.launch import train
from tests.data.shard_tools import prepare_here
from tests.runs import MakeConfig
from tests.train.test_runs import evaluations, restarted_from, steps

pytestmark = [pytest.mark.ray, pytest.mark.models]

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
    """Three datasets of very different text."""
    root = tmp_path_factory.mktemp("mixture")
    for name, signs in [("letters", "abcde "), ("digits", "0123456789"), ("signs", "+-")]:
        text = "".join(itertools.islice(itertools.cycle(signs), 40_000))
        Path(root, f"{name}.txt").write_text(text)
        prepare_here([str(root / f"{name}.txt")], root / name, "bytes", val_fraction=0.1)
    return ",".join(f"{root / name}={weight}" for name, weight in SHARES.items())


def test_a_mixture_is_the_same_at_any_number_of_workers(
    cluster: str,
    make_config: MakeConfig,
    data_path: str,
    storage: Path,
    run_cli: Callable[..., tuple[int, str, str]],
) -> None:
    lines: list[str] = []
    one = train(make_config(run_name="mix-1", data_path=data_path, **RUN), lines.append)
    assert any("mixed: letters 70.0% (" in line for line in lines)
    assert any("| letters " in line and "| signs " in line for line in lines if "val loss" in line)
    four = train(make_config(run_name="mix-4", data_path=data_path, num_workers=4, **RUN), print)

    # As if the run of one worker had been lost at step 90, and went on with two.
    restarted_from(one, 90, storage, "mix-2")
    two = train(make_config(run_name="mix-2", data_path=data_path, num_workers=2, **RUN), print)

    rows = steps(one.run_dir)
    assert len(rows) == 200
    for other in (two, four):
        found = steps(other.run_dir)
        assert [row["data/order_hash"] for row in found] == [row["data/order_hash"] for row in rows]
        assert found[-1]["train/loss"] == pytest.approx(rows[-1]["train/loss"], abs=1e-4)

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
    for other in (two, four):
        last = evaluations(other.run_dir)[-1]
        assert {n: last[f"val/loss/{n}"] for n in SHARES} == pytest.approx(losses, abs=1e-4)

    code, out, _ = run_cli("eval", one.run_dir.path, "--json")
    assert code == 0
    alone = json.loads(out.splitlines()[-1])
    assert alone["val/loss"] == pytest.approx(evaluated["val/loss"], abs=1e-4)
    assert alone["val/loss/signs"] == pytest.approx(losses["signs"], abs=1e-4)


def test_a_mixture_that_changed_is_refused_on_resume(
    cluster: str,
    make_config: MakeConfig,
    data_path: str,
    run_cli: Callable[..., tuple[int, str, str]],
    storage: Path,
) -> None:
    small = {**RUN, "max_steps": 10}
    train(make_config(run_name="mix-changed", data_path=data_path, **small), print)
    config = make_config(
        run_name="mix-changed", data_path=data_path.replace("=0.7", "=0.6"), **small
    )
    file = storage / "mix-changed.yaml"
    file.write_text(config.to_yaml())
    code, _, err = run_cli("train", "--config", file)
    assert code == 2
    assert "changed data (manifest hash)" in err
