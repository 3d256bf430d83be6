"""The example OLMo 2: trained, sampled and exported, with the logits of transformers and llama.cpp."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import raytrain_gpt
from raytrain_gpt.checkpoint.open import open_checkpoint
from raytrain_gpt.config.code import Code
from raytrain_gpt.config.kinds import Registry
from raytrain_gpt.data.tokenizer import load_tokenizer
from raytrain_gpt.train.launch import train
from tests.conftest import RunCli
from tests.export.test_gguf import LlamaCpp, log_probabilities
from tests.made_runs import MakeConfig, assert_same, restarted_from

OLMO2 = Path(raytrain_gpt.__file__).parents[1] / "examples" / "olmo2.py"
OWN = """
from raytrain_gpt.core.gpt2 import GPT2
from raytrain_gpt.extend import architecture

@architecture("mine")
class Mine(GPT2):
    pass
"""


@pytest.mark.long
@pytest.mark.slow
def test_olmo_2_trains_resumes_and_exports(
    make_config: MakeConfig, tmp_path: Path, run_cli: RunCli
) -> None:
    fields = {
        "code": Code.read(OLMO2),
        "architecture": "olmo2", "num_kv_heads": 1, "tied_embeddings": False, "optimizer": "muon",
        "max_steps": 6, "document_mask": True, "activation_checkpointing": "selective",
        "storage_path": str(tmp_path), "peak_lr": 0.02, "min_lr": 0.0,
    }  # fmt: skip
    whole = train(make_config(run_name="whole", **fields), print)
    assert whole.checkpoint.state.config["model"]["rope_theta"] == 500_000.0
    cut = restarted_from(whole, 3, tmp_path, "cut")
    train(make_config(run_name="cut", **fields), print)
    assert_same(cut, whole)

    code, run = ("--code", OLMO2), whole.run_dir.path
    run_cli.succeeds("export", run, "--out", tmp_path / "hf", *code)
    run_cli.succeeds("export", run, "--out", tmp_path / "l.gguf", "--format", "gguf", *code)
    _, _, model, _, _ = open_checkpoint(run, "cpu", registry=Registry(Code.read(OLMO2)))
    model.document_end = None  # neither of the others separates documents
    ids = load_tokenizer("bytes").encode_ordinary("To be, or not to be")

    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert type(theirs).__name__ == "Olmo2ForCausalLM"
    with torch.no_grad():
        logits = theirs(torch.tensor([ids])).logits[0]
        assert torch.allclose(logits, model.logits(torch.tensor([ids]))[0, :, :257], atol=1e-4)
    llama = LlamaCpp(tmp_path / "l.gguf")
    found = llama.log_probabilities(ids, 257)
    shown = found.isfinite()  # those of complete characters
    assert shown.sum() > 100
    assert (found - log_probabilities(model, ids)[-1])[shown].abs().max() < 1e-3


@pytest.mark.slow
def test_an_architecture_without_a_mapping_is_not_exported(
    make_config: MakeConfig, tmp_path: Path, run_cli: RunCli
) -> None:
    file = tmp_path / "my.py"
    file.write_text(OWN)
    fields = {"architecture": "mine", "max_steps": 2, "storage_path": str(tmp_path)}
    config = make_config(Code.read(file), run_name="mine", **fields)
    run = train(config, print).run_dir.path
    gguf = ("--out", tmp_path / "a.gguf", "--format", "gguf")
    for more, names in (
        (("--out", tmp_path / "hf"), "config_of, to_hf"),
        (gguf, "to_hf, add_gguf_sizes"),
    ):
        said = run_cli.refuses("export", run, *more, "--code", file)
        assert f"architecture mine has no export mapping; add {names} to its class" in said
    assert not (tmp_path / "hf").exists()
