"""Replays of runs that trained in different ways: the recorded rows and the saved weights, bit for bit."""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from raytrain_gpt import batch_at, replay
from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.columns import Row
from raytrain_gpt.config.code import Code
from raytrain_gpt.errors import ConfigError, DataError, UserError
from raytrain_gpt.replays.steps import compared, sha256
from raytrain_gpt.runs.provenance import RunProvenance
from raytrain_gpt.runs.summary import RunSummary
from raytrain_gpt.train.launch import train
from tests.conftest import raises_line
from tests.data.shard_tools import prepare_here
from tests.faults.gates import Faults, gated
from tests.made_runs import MakeConfig, Straight, steps

pytestmark = pytest.mark.slow

MODERN = {
    "architecture": "qwen3", "tied_embeddings": False, "optimizer": "muon", "normuon_beta2": 0.95,
    "muon_head_group": 1, "embedding_lr_factor": 3.0,
}  # fmt: skip
CHANGES = {
    "plain": {"dropout": 0.1},
    "modern": MODERN,
    "exact": {"exact": True, "dropout": 0.1},
    "resumed": {"dropout": 0.1},
    "rollback": {"spike_window_steps": 16, "spike_patience": 10, "skip_before": 2},
}


def check_same(run: RunSummary, replayed: list[tuple[Row, dict[str, str]]]) -> None:
    """Check that steps have the recorded rows, and the weights of the checkpoints among them."""
    recorded = {row["step"]: compared(row) for row in steps(run.run_dir)}
    hashes = {row["step"]: of_step for row, of_step in replayed}
    assert [row for row, _ in replayed] == [recorded[step] for step in hashes]
    saved = [one for one in Catalog(run.run_dir).complete() if one.state.step in hashes]
    assert saved
    for one in saved:
        tensors = load_file(one.path.path / "model.safetensors")
        assert {name: sha256(tensor) for name, tensor in tensors.items()} == hashes[one.state.step]


@pytest.mark.ray
def test_of_a_run_with_two_workers(straight: Straight, make_config: MakeConfig) -> None:
    """Products of more matrices have other bits, so each rank's share of Muon's matrices counts."""
    plain = straight(2).run_dir.path
    check_same(straight(2), replay(plain, 15, 40))
    # Five sequences for each worker lower the micro-batch.
    wider = {**MODERN, "num_layers": 4, "embd_size": 128, "global_batch_tokens": 10 * 32}
    run = train(make_config(run_name="replayed-two", num_workers=2, **wider), print)
    again = replay(run.run_dir.path, 1, 12)
    check_same(run, again)
    assert replay(plain, 1, 12, settings=wider) == again
    assert replay(plain, 12, 11) == []


@pytest.mark.parametrize("kind", CHANGES)
def test_a_replay_has_the_bits_of_the_run(kind: str, make_config: MakeConfig) -> None:
    config = make_config(run_name=f"replayed-{kind}", **CHANGES[kind])
    faults = Faults(spiked_batches=tuple(range(24, 34)) if kind == "rollback" else ())
    if kind == "resumed":
        train(config.updated({"max_steps": 20, "schedule": "constant"}), print)
        config = config.updated({"schedule": "constant"})
    run = train(config, print, gated(faults))
    check_same(run, replay(run.run_dir.path, 1, 12))
    check_same(run, replay(run.run_dir.path, 25, 40))


def test_of_a_mixture_and_of_its_masked_sequences(
    make_config: MakeConfig, dataset: Path, tmp_path: Path
) -> None:
    Path(tmp_path, "words.txt").write_text("\n".join(f"word {n}" for n in range(9000)))
    prepare_here([str(tmp_path / "words.txt")], tmp_path / "words", "bytes", val_fraction=0.1)
    mixed = f"{dataset}=0.3,{tmp_path / 'words'}=0.7"
    run = train(make_config(run_name="replayed-mixture", data_path=mixed), print)
    as_it_was = replay(run.run_dir.path, 11, 20)
    check_same(run, as_it_was)
    masked = [one.id for one in batch_at(run.run_dir.path, 15)[::2]]
    changed = replay(run.run_dir.path, 11, 20, masked=masked)
    alike = [a == b for (_, a), (_, b) in zip(as_it_was, changed, strict=True)]
    assert alike == [True] * 4 + [False] * 6


def test_a_run_without_its_data_or_step_says_so(make_config: MakeConfig, tmp_path: Path) -> None:
    run = train(make_config(run_name="replayed-lost", max_steps=10), print)
    with raises_line(ConfigError, "step 11: run", "has trained steps 1 to 10"):
        replay(run.run_dir.path, 11, 11)
    with raises_line(DataError, str(tmp_path / "gone")):
        replay(run.run_dir.path, 1, 1, data=str(tmp_path / "gone"))
    Path(tmp_path, "other.txt").write_text("\n".join(f"word {n}" for n in range(9000)))
    prepare_here([str(tmp_path / "other.txt")], tmp_path / "other", "bytes", val_fraction=0.1)
    with raises_line(DataError, "was trained on different data"):
        replay(run.run_dir.path, 1, 1, data=str(tmp_path / "other"))


def test_a_row_that_does_not_come_out_again_is_named(
    make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    spoiled = gated(Faults(spiked_batches=(5,)))
    run = train(make_config(run_name="replayed-other", max_steps=10), print, spoiled)
    capsys.readouterr()
    replay(run.run_dir.path, 1, 10)
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith("step 6 does not come out as recorded: train/loss ")


CODE = """
from raytrain_gpt.extend import schedule

@schedule("falls")
def falls(step, max_steps, settings):
    return 1.0 - 0.5 * step / max_steps
"""


@pytest.mark.parametrize("change", ["max_steps", "code"])
def test_every_step_has_the_settings_and_code_that_trained_it(
    change: str, make_config: MakeConfig, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Also of steps just behind the checkpoint of the attempt before, and at the end, without a later one."""
    files = [tmp_path / "old.py", tmp_path / "new.py"]
    texts = [CODE, CODE.replace("0.5", "0.9") if change == "code" else CODE]
    schedule = {"schedule": "falls", "run_name": f"replayed-{change}"}
    for file, text, steps_so_far in zip(files, texts, (20, 40), strict=True):
        file.write_text(text)
        code = Code.read(file, may_differ=True)
        run = train(make_config(code, max_steps=steps_so_far, **schedule), print)
    capsys.readouterr()
    for first, last, file in ((5, 20, files[0]), (21, 23, files[1]), (31, 40, files[1])):
        check_same_rows(run, replay(run.run_dir.path, first, last, code=[file]))
    assert "as recorded" not in capsys.readouterr().out
    with raises_line(ConfigError, "step 40 had other settings or code than 5; replay it alone"):
        replay(run.run_dir.path, 5, 40, code=[files[0]])
    if change == "code":
        with raises_line(ConfigError, "no given code is the run's; if you trust it, give --code"):
            replay(run.run_dir.path, 21, 23, code=[files[0]])


def check_same_rows(run: RunSummary, replayed: list[tuple[Row, dict[str, str]]]) -> None:
    recorded = {row["step"]: compared(row) for row in steps(run.run_dir)}
    assert [row for row, _ in replayed] == [recorded[row["step"]] for row, _ in replayed]


def test_a_replay_leaves_the_process_as_it_was(make_config: MakeConfig) -> None:
    run = train(make_config(run_name="replayed-quietly", max_steps=10, dropout=0.1), print)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    torch.set_float32_matmul_precision("highest")
    drawn = []
    for again in (False, True):
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        if again:
            replay(run.run_dir.path, 1, 3)
        drawn.append((random.random(), np.random.rand(), float(torch.rand(1))))
        random.setstate(states[0]), np.random.set_state(states[1]), torch.set_rng_state(states[2])
    assert drawn[0] == drawn[1]
    assert torch.get_float32_matmul_precision() == "highest"


def test_an_edited_configuration_changes_no_order(make_config: MakeConfig) -> None:
    run = train(make_config(run_name="replayed-edited", max_steps=10), print)
    before, file = batch_at(run.run_dir.path, 5), run.run_dir.path / "config.yaml"
    file.write_text(file.read_text().replace("seed: 1337", "seed: 7"))
    assert batch_at(run.run_dir.path, 5) == before
    check_same(run, replay(run.run_dir.path, 1, 10))


NASTY = [None, -1, 0, 100_000, 2**52, 1e300, "", "cpu", "fp64", "many", True, [], {}]


def test_rows_of_a_strangers_run_are_used_or_refused_in_one_line(make_config: MakeConfig) -> None:
    run = train(make_config(run_name="replayed-hostile", max_steps=10), print)
    file = run.run_dir.path / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    ways = [n for n, row in enumerate(rows) if row.get("event") in ("attempt", "start")]
    chosen = [*ways, next(n for n, row in enumerate(rows) if row.get("train/loss"))]
    known, refused = RunProvenance(run.run_dir).attempt_of(1), list[str]()
    for number, key, value in product(
        chosen, {k for n in chosen for k in rows[n]}, [*NASTY, "gone"]
    ):
        changed = [dict(row) for row in rows]
        if key not in changed[number] or (value == "gone" and not changed[number].pop(key, None)):
            continue
        if value != "gone":
            changed[number][key] = value
        file.write_text("".join(json.dumps(row) + "\n" for row in changed))
        try:
            if RunProvenance(run.run_dir).attempt_of(1) != known:
                replay(run.run_dir.path, 1, 2)
        except UserError as error:
            refused.append(str(error))
    assert len(refused) > 50
    assert not [line for line in refused if "\n" in line]
