"""Models of the hub in their released configurations, but 2 layers, few ids and an eighth of the width.

They are imported with transformers' logits and the tokenizer of their family, trained on what it makes of
nasty texts, and exported with all that they came with.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file

from raytrain_gpt.checkpoint.catalog import IMPORT_FILE, Catalog
from raytrain_gpt.checkpoint.open import open_checkpoint
from raytrain_gpt.config.call_options import PrepareOptions
from raytrain_gpt.config.kinds import BUILT_IN
from raytrain_gpt.config.schema import Config
from raytrain_gpt.data.library_tokenizer import CONFIG_FILE, TEMPLATE_FILE
from raytrain_gpt.data.shards import Manifest, Split, read_manifest
from raytrain_gpt.data.tokenizer import EOT, TOKENIZER_FILE, valid_text
from raytrain_gpt.data.tokenizer_file import open_tokenizer
from raytrain_gpt.errors import DataError
from raytrain_gpt.evaluate.inference import evaluate_checkpoint, sample_checkpoint
from raytrain_gpt.export.gguf import export_gguf
from raytrain_gpt.export.hf_weights import read_hf_weights
from raytrain_gpt.export.huggingface import export_checkpoint, import_weights
from raytrain_gpt.ingest.prepare import prepare
from raytrain_gpt.storage.location import Location
from raytrain_gpt.train.launch import train
from raytrain_gpt.train.run_config import fields_of_init_from
from tests.conftest import RunCli, raises_line
from tests.data.families import EOTS, TEMPLATE, nasty_texts, read_library, write_family
from tests.data.shard_tools import all_tokens, write_jsonl
from tests.export.test_gguf import TEXT, LlamaCpp
from tests.made_runs import MakeConfig, assert_same, command, flags

NARROWER = int(os.environ.get("RAYTRAIN_GPT_TEST_NARROWER", "8"))
"""Divisor of the width; 1 for the released one."""
SIZES = (
    "num_attention_heads num_key_value_heads hidden_size intermediate_size max_position_embeddings"
)


def released(family: str, kind: str, *sizes: int, **others: Any) -> dict[str, Any]:
    """Return a `config.json` of less depth, with tokens for ids such as that of bos, and its `family`."""
    content = dict(zip(SIZES.split(), sizes, strict=True)) | others
    for name in {"hidden_size", "intermediate_size", "head_dim"} & content.keys():
        content[name] //= NARROWER
    return {"family": family, "model_type": kind, "num_hidden_layers": 2, **content}


def ends(bos: str, eos: str | list[str], **others: str) -> dict[str, Any]:
    return {"bos_token_id": bos, "eos_token_id": eos, **others}


LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
OLD: dict[str, Any] = {"torch_dtype": "bfloat16", "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
BOTH = ends(EOT, EOT)
MODELS = {
    "SmolLM2-135M": released("smollm2", "llama", 9, 3, 576, 1536, 8192, **OLD, **BOTH, rope_theta=1e5,
                             rope_scaling=None, initializer_range=0.041666666666666664),
    "SmolLM2-360M": released("smollm2", "llama", 15, 5, 960, 2560, 8192, **OLD, rope_theta=1e5,
                             rope_scaling={"rope_type": "default"}, **BOTH, pad_token_id="<|im_end|>"),
    "TinyLlama": released("llama2", "llama", 32, 4, 2048, 5632, 2048, **ends("<s>", "</s>"),
                          rms_norm_eps=1e-5),
    "Llama-3.2-1B": released("llama3", "llama", 32, 8, 2048, 8192, 131072, **OLD, head_dim=64, rope_theta=5e5,
                             **ends("<|begin_of_text|>", ["<|end_of_text|>", "<|eot_id|>"]),
                             rope_scaling=LLAMA3),
    "Qwen2.5-0.5B": released("qwen2.5", "qwen2", 14, 2, 896, 4864, 32768, **OLD, **BOTH, rope_theta=1e6,
                             use_sliding_window=False, sliding_window=32768, max_window_layers=24),
    "Qwen3-0.6B": released("qwen3", "qwen3", 16, 8, 1024, 3072, 40960, **THETA, head_dim=128,
                           **ends(EOT, "<|im_end|>", pad_token_id=EOT), rms_norm_eps=1e-6,
                           tie_word_embeddings=True),
    "Mistral-7B": released("mistral", "mistral", 32, 8, 4096, 14336, 32768, **THETA, **ends("<s>", "</s>"),
                           head_dim=128, sliding_window=None, rms_norm_eps=1e-5),
}  # fmt: skip
EXTRA_ROWS = {"qwen2": 64, "qwen3": 30, "mistral": 43}
"""Rows of the embedding without a token, by type of model."""
REFUSED = {
    **dict.fromkeys(("llama2", "mistral"), "is not BPE like that of GPT-2, SmolLM2, Llama 3 or"),
    **dict.fromkeys(("qwen2.5", "qwen3"), "normalizes text, which llama.cpp does not"),
}
"""Families that no GGUF is written for, with the reason."""
SLOW = ("SmolLM2-360M", "TinyLlama", "Mistral-7B")


def saved(name: str, directory: Path) -> Any:
    """Save a model of random bf16 weights in several files, and return it as transformers reads it in fp32.

    transformers writes a configuration with its new keys, which is replaced by one with old keys.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    content = {**MODELS[name]}
    library = write_family(content.pop("family"), directory)
    for key, end in content.items():
        if key.endswith("_token_id"):
            of = library.token_to_id
            content[key] = [*map(of, end)] if isinstance(end, list) else of(end)
    content["vocab_size"] = library.get_vocab_size() + EXTRA_ROWS.get(content["model_type"], 0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**content))
    torch.manual_seed(0)
    for parameter in model.parameters():
        size = 1 / parameter.shape[-1] ** 0.5 if parameter.dim() == 2 else 0.2
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=size)
    model.bfloat16().save_pretrained(directory, max_shard_size="100KB")
    assert (directory / "model.safetensors.index.json").exists()
    if content.items() >= OLD.items():
        (directory / "config.json").write_text(json.dumps(content))
    generation = {"eos_token_id": content["eos_token_id"], "max_new_tokens": 9}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    if name == "Qwen3-0.6B":  # as new versions write it
        (directory / TEMPLATE_FILE).write_text(TEMPLATE, newline="")
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def prepared(checkpoint: Path, place: Path) -> tuple[str, list[str]]:
    """Prepare nasty texts, every other one to validate on, as an import reads them; return them too."""
    texts, data = [text for text in nasty_texts() if text.strip()], str(place / "data")
    files = [write_jsonl(place / f"{i}.jsonl", texts[i::2]) for i in range(2)]
    prepare(files, data, str(checkpoint), PrepareOptions(val=files[1]), log=print)
    return data, [valid_text(text) for text in texts]


def imported(name: str, place: Path) -> tuple[Path, str]:
    """Import a saved model, and prepare data with its tokenizer."""
    saved(name, place / "hf")
    checkpoint = import_weights(place / "hf", place / "in", print)[0].path
    return checkpoint, prepared(checkpoint, place)[0]


@torch.no_grad()
def difference(theirs: Any, checkpoint: Location) -> float:
    """Return the largest difference of logits, at positions of the checkpoint up to 300."""
    model, rows = open_checkpoint(checkpoint, "cpu", print)[2].eval(), theirs.config.vocab_size
    ids = torch.randint(0, rows, (2, 300), generator=torch.Generator().manual_seed(0))
    ids = ids[:, : model.shape.seq_len]
    gap: float = (theirs(ids).logits - model.logits(ids)[..., :rows]).abs().max().item()
    return gap


def config_from(place: Path, data: str, make_config: MakeConfig, **fields: object) -> Config:
    own = {"init_from": str(place), "storage_path": str(place.parent), "data_path": data}
    given = {**own, **fields}
    return make_config(**fields_of_init_from(None, None, given, BUILT_IN), **given)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in MODELS]
)
def test_a_model_comes_in_is_trained_and_goes_back(
    name: str, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    hf, place, out = (tmp_path / one for one in ("hf", "in", "out"))
    theirs, family = saved(name, hf), MODELS[name]["family"]
    own_eot = "<|im_end|>" if family == "qwen3" else None
    import_weights(hf, place, print, eot=own_eot)
    gaps = [difference(theirs, Location.of(place))]
    export_checkpoint(place, tmp_path / "back", "bf16", print)
    before, after = (read_hf_weights(one) for one in (hf, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)

    library, tokenizer, usual = read_library(hf), open_tokenizer(str(place)), EOTS.get(family, EOT)
    data, texts = prepared(place, tmp_path)
    eot: Any = library.token_to_id(own_eot or usual)
    ids = [[*library.encode(text).ids, eot] for text in texts]
    manifest = read_manifest(data)
    assert manifest.vocab_size == theirs.config.vocab_size
    for i, split in enumerate(get_args(Split)):
        assert all_tokens(Path(data), manifest, split).tolist() == [*chain(*ids[i::2])]

    config = config_from(place, data, make_config, run_name="run", max_steps=3, seq_len=64)
    run = train(config, print).run_dir
    export_checkpoint(run.path, out, "fp32", print)
    loaded = AutoModelForCausalLM.from_pretrained(out).eval()
    gaps.append(difference(loaded, run))
    assert max(gaps) <= 1e-4
    trained = load_file(out / "model.safetensors")
    assert trained.keys() == before.keys()
    assert not any(torch.equal(t, before[n].float()) for n, t in trained.items() if t.dim() == 2)
    for file in ("config.json", "generation_config.json"):
        came, goes = (json.loads((one / file).read_text()) for one in (hf, out))
        changed = {"dtype", "torch_dtype", "architectures", "model_type"}
        for key in came.keys() - changed:
            assert goes[key] == came[key], key
    assert goes == came
    kind = {"qwen2": "Qwen2", "qwen3": "Qwen3"}.get(MODELS[name]["model_type"], "Llama")
    assert type(loaded).__name__ == f"{kind}ForCausalLM"

    reads = AutoTokenizer.from_pretrained(out)
    assert (reads.chat_template.split(), reads.model_max_length) == (TEMPLATE.split(), 131072)
    for path in (hf / TOKENIZER_FILE, *hf.glob(TEMPLATE_FILE)):
        assert (out / path.name).read_bytes() == path.read_bytes()
    assert (reads.eos_token_id, reads.pad_token_id) == (eot, library.token_to_id(usual))
    special = [token.content for token in reads.added_tokens_decoder.values() if token.special]
    plain = [i for i, text in enumerate(texts) if not any(token in text for token in special)]
    assert [[*reads(texts[i])["input_ids"], eot] for i in plain] == [ids[i] for i in plain]

    share, val = manifest.text_share("val"), tokenizer.lengths[[*chain(*ids[1::2])]].sum()
    assert share == sum(len(text.encode()) for text in texts[1::2]) / val
    assert (share == 1) == (family in ("smollm2", "llama3"))
    scaled = evaluate_checkpoint(run, print)[1]["val/bits_per_byte"]
    monkeypatch.setattr(Manifest, "text_share", lambda self, split: 1.0)
    unscaled = evaluate_checkpoint(run, print)[1]["val/bits_per_byte"]
    assert scaled * share == pytest.approx(unscaled, rel=1e-3)

    options: dict[str, Any] = {"num_samples": 1, "temperature": 0, "max_new_tokens": 20}
    said, in_gguf = sample_checkpoint(run, TEXT, print, **options), "refused"
    if family in REFUSED:
        with raises_line(DataError, REFUSED[family], "use --format hf"):
            export_gguf(run, tmp_path / "a.gguf", "fp32", print)
    else:
        gguf, in_gguf = export_gguf(run, tmp_path / "a.gguf", "fp32", print), "20 tokens"
        fields, theirs = GGUFReader(gguf).fields, theirs.config
        keys = "llama.context_length", *(f"tokenizer.ggml.{end}_token_id" for end in ("bos", "eos"))
        assert [fields[key].contents() for key in keys] == [
            theirs.max_position_embeddings, theirs.bos_token_id, eot
        ]  # fmt: skip
        asked = {"prompt": TEXT, "n_predict": 20, "temperature": 0, "return_tokens": True}
        drawn = LlamaCpp(gguf).ask("/completion", **asked)["tokens"]
        assert [TEXT + tokenizer.decode(drawn)] == said
    print(f"{name} | {gaps[0]:.1e} | {gaps[1]:.1e} | {sum(map(len, ids))} | 3 | {in_gguf}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer": "muon", "muon_head_group": 1, "precision": "bf16"},
        {"exact": True, "micro_batch_sequences": 2},
    ],
    ids=str,
)
def test_a_killed_run_of_an_import_ends_with_the_same_bits(
    changes: dict[str, object], make_config: MakeConfig, tmp_path: Path
) -> None:
    place, data = imported("Qwen3-0.6B", tmp_path)
    fields = {"max_steps": 24, "checkpoint_every_steps": 2, "document_mask": True, **changes}
    whole = train(config_from(place, data, make_config, run_name="whole", **fields), print)
    config = config_from(place, data, make_config, run_name="cut", **fields)
    catalog = Catalog(Location.of(tmp_path / "cut"))
    with subprocess.Popen(command("train", *flags(config))) as process:
        while not catalog.complete():
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    assert catalog.complete()[-1].state.step < 24
    assert_same(train(config, print).run_dir, whole)
    kept = catalog.complete()[-1].path
    for name in (IMPORT_FILE, TOKENIZER_FILE, CONFIG_FILE):
        assert (kept / name).read_bytes() == (place / name).read_bytes()


def test_an_import_of_a_long_context_is_evaluated_on_data_of_any_length(
    run_cli: RunCli, tmp_path: Path
) -> None:
    place = tmp_path / "in"
    saved("Qwen3-0.6B", tmp_path / "hf")
    said = run_cli.succeeds("import", tmp_path / "hf", "--out", place)
    assert (
        f"fine-tune: raytrain-gpt train --init_from {place} --seq_len 2048 --data_path DATA "
        in said
    )
    evaluate = ("eval", place, "--data", prepared(place, tmp_path)[0], "--eval_tokens", 2048)
    assert "2048 tokens" in run_cli.succeeds(*evaluate)
    assert "2048 tokens" in run_cli.succeeds(*evaluate, "--seq_len", 32)
    said = run_cli.refuses(*evaluate, "--seq_len", 40961)
    assert f"is above the context of {place}; set it to at most 40960" in said
