"""`--average`: the mean of several checkpoints' weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from raytrain_gpt.checkpoint.open import open_checkpoint
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.evaluate.inference import evaluate_checkpoint
from raytrain_gpt.train.launch import train
from tests.conftest import RunCli, raises_line
from tests.made_runs import MakeConfig

pytestmark = pytest.mark.slow


def test_is_the_mean_and_the_same_whatever_wrote_the_checkpoints(
    make_config: MakeConfig, run_cli: RunCli, tmp_path: Path
) -> None:
    config = make_config(run_name="averaged", schedule="constant")
    parts = config.updated({"run_name": "averaged-parts"})
    train(parts.updated({"max_steps": 20}), str)
    runs = [train(config, str).run_dir.path, train(parts, str).run_dir.path]
    files = []
    for run in runs:
        out = tmp_path / run.name
        run_cli.succeeds("export", run, "--out", out, "--average", 3)
        files.append((out / "model.safetensors").read_bytes())
    assert files[0] == files[1]
    _, _, model, _, _ = open_checkpoint(runs[0], log=str, average=3)
    saved = [
        load_file(runs[0] / f"checkpoints/step={step:08d}/model.safetensors")
        for step in (30, 40, 50)
    ]
    for name, parameter in model.named_parameters():
        mean = np.mean([one[name].astype(np.float64) for one in saved], axis=0)
        np.testing.assert_array_equal(parameter.detach().numpy(), mean.astype(np.float32))
    loss = evaluate_checkpoint(runs[0], str, average=3)[1]["val/loss"]
    assert loss != evaluate_checkpoint(runs[0], str)[1]["val/loss"]
    sampling = ("--prompt", "a", "--num_samples", 1, "--max_new_tokens", 2, "--average", 3)
    shown = run_cli.succeeds("sample", runs[0], *sampling)
    assert shown.startswith("averaged: steps 30, 40, 50\na")
    assert shown.endswith(" --average=3\n")
    until_30 = runs[0] / "checkpoints" / "step=00000030"
    line = f"average=4, but {runs[0]} has 3 good checkpoints up to step 30"
    with raises_line(ConfigError, line, "keep_checkpoints"):
        open_checkpoint(until_30, log=str, average=4)
    damaged = runs[0] / "checkpoints" / "step=00000020"
    (damaged / "model.safetensors").write_bytes(b"damaged")
    said = list[str]()
    open_checkpoint(until_30, log=said.append, average=2)
    assert "step=00000020: model.safetensors has 7 bytes" in said[0]
    assert said[1:] == ["averaged: steps 10, 30"]
    (damaged / "hashes.json").unlink()
    shutil.copytree(runs[0] / "checkpoints/step=00000040", runs[0] / "checkpoints/step=00000025")
    said.clear()
    open_checkpoint(until_30, log=said.append, average=2)
    assert ["step=00000025" in said[0], "step=00000020" in said[1]] == [True, True]
