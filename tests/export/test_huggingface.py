"""Export to and import from Hugging Face: complete or absent, and ready to use."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import ByteLevelBPETokenizer

from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.columns import Row
from raytrain_gpt.config.kinds import BUILT_IN
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.model import GPT, GPTShape
from raytrain_gpt.core.registry import new_model, resolved_shape
from raytrain_gpt.data.reader import read_sequences
from raytrain_gpt.data.shards import read_manifest
from raytrain_gpt.data.tokenizer import Tokenizer, load_tokenizer
from raytrain_gpt.data.tokenizer_file import open_tokenizer, read_tokenizer
from raytrain_gpt.errors import CheckpointError, ConfigError, DataError
from raytrain_gpt.evaluate.inference import evaluate_checkpoint
from raytrain_gpt.export import huggingface
from raytrain_gpt.export.hf_weights import hf_tensors
from raytrain_gpt.export.huggingface import export_checkpoint, import_weights
from raytrain_gpt.storage.location import Location
from raytrain_gpt.train.preflight import check_init_from
from raytrain_gpt.train.run_config import fields_of_init_from
from tests.conftest import RunCli, raises_line
from tests.data.families import write_family
from tests.export.test_hf_weights import ODD, hf_model
from tests.made_runs import MakeConfig
from tests.training import STATE

ROOT = Path(__file__).parents[2]
SHAPE = GPTShape(num_layers=2, num_heads=2, embd_size=32, seq_len=64, vocab_size=257)
QWEN3 = {"architecture": "qwen3", "num_heads": 4, "num_kv_heads": 2, "mlp_size": 48}
UNTIED = {**QWEN3, "tied_embeddings": False, "rope_theta": 500.0}
Refused = Callable[..., str]
Exported = tuple[GPT, Path]

EVALUATED = {"step": 20, "val/loss": 2.5, "val/perplexity": 12.1825, "val/tokens": 4096}
ROWS: tuple[Row, ...] = (
    {"step": 10, "val/loss": 9.9},
    EVALUATED,
    {"step": 20, "hellaswag/acc_norm": 0.25},
)


@pytest.fixture(autouse=True, scope="module")
def offline() -> Iterator[None]:
    """Make transformers work without a network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        yield


def write_checkpoint(
    run_dir: Location, tokenizer: str = "bytes", rows: Sequence[Row] = ROWS, **sizes: Any
) -> GPT:
    """Write a checkpoint of step 20 with random weights, and return its model."""
    encoding = load_tokenizer(tokenizer)
    config = Config().updated({**SHAPE.fields, "micro_batch_sequences": 1, **sizes})
    shape = GPTShape.of(config, encoding.n_vocab)
    model = new_model(shape)
    torch.manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    leaves = {**shape.fields, "global_batch_tokens": 16 * shape.seq_len}
    state = replace(
        STATE,
        step=20,
        next_batch=20,
        val_loss=2.5,
        tokens_seen=81_920,
        config=Config().updated(leaves | {"data_path": "/somewhere/private"}).model_dump(),
        manifest_hash="cd",
        vocab_hash=encoding.hash,
        vocab_size=encoding.n_vocab,
        num_workers=2,
        skipped_batches=((3, 5),),
    )
    draft = Catalog(run_dir).draft(20, "001")
    weights = draft.add("model.safetensors", lambda path: save_file(model.state_dict(), path))
    texts = {
        **encoding.files,
        "rows.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
    }
    draft.commit(state, {"model.safetensors": weights}, texts)
    return model.eval()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    directory = tmp_path_factory.mktemp("exported")
    model = write_checkpoint(Location.of(directory / "run"))
    return model, export_checkpoint(directory / "run", directory / "hf", "fp32", print)


@pytest.fixture
def hf(exported: Exported, tmp_path: Path) -> Path:
    """Return a copy of the export that a test may damage."""
    for file in exported[1].iterdir():
        (tmp_path / "hf").mkdir(exist_ok=True)
        (tmp_path / "hf" / file.name).write_bytes(file.read_bytes())
    return tmp_path / "hf"


@pytest.fixture
def refused(run_cli: RunCli, tmp_path: Path) -> Refused:
    """Return a function that runs a refused command and returns its error line.

    It also checks that the command wrote nothing.
    """

    def run(*argv: object) -> str:
        out = tmp_path / "refused" / "out"
        errors = run_cli.refuses(*argv, *([] if "--out" in argv else ["--out", out]))
        assert errors.startswith("error: ")
        assert not out.exists()
        assert not out.parent.exists() or not list(out.parent.iterdir())
        return errors

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokenizer", "dtype", "sizes"),
    [
        ("bytes", "fp32", {}),
        ("bytes", "bf16", QWEN3),
        pytest.param("gpt2", "fp32", UNTIED, marks=pytest.mark.slow),
    ],
    indirect=["tokenizer"],
)
def test_transformers_loads_an_export_with_the_same_logits(
    tokenizer: str, dtype: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = write_checkpoint(Location.of(tmp_path / "run"), tokenizer, **sizes)
    out = export_checkpoint(tmp_path / "run", tmp_path / "new" / "hf", dtype, print)
    loaded = AutoModelForCausalLM.from_pretrained(out).eval()
    assert loaded.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    ids = torch.randint(0, model.shape.vocab_size, (2, 64))
    with torch.no_grad():
        expected = model.logits(ids)[..., : model.shape.vocab_size]
        logits = loaded.float()(ids).logits
    limit = (1e-5 if dtype == "fp32" else 0.1) * max(1.0, expected.abs().max().item())
    assert logits.shape == expected.shape
    assert (logits - expected).abs().max().item() <= limit

    encoding, theirs = load_tokenizer(tokenizer), AutoTokenizer.from_pretrained(out)
    text = "It's  the 1st naïve 日本 model,\n\n isn't it?\t"
    assert theirs(text)["input_ids"] == encoding.encode_ordinary(text)
    assert (theirs.eos_token_id, len(theirs)) == (encoding.eot_token, encoding.n_vocab)
    assert theirs.model_max_length == 64
    assert loaded.config.eos_token_id == encoding.eot_token
    prompt = theirs("To be", return_tensors="pt")
    with torch.no_grad():
        drawn = loaded.generate(**prompt, max_new_tokens=5, do_sample=False, eos_token_id=-1)
        best = model.logits(prompt["input_ids"])[0, -1, : model.shape.vocab_size].argmax()
    assert drawn.shape[1] == prompt["input_ids"].shape[1] + 5
    assert dtype == "bf16" or drawn[0, -5] == best


def test_an_export_reads_from_a_disk_and_an_object_store(run_dir: Location, tmp_path: Path) -> None:
    model = write_checkpoint(run_dir)
    out = export_checkpoint(str(run_dir), tmp_path / "hf", "fp32", print)
    tensors = load_file(out / "model.safetensors")
    assert torch.equal(tensors["transformer.wpe.weight"], model.wpe.weight)
    assert len(tensors["transformer.wte.weight"]) == 257


def test_the_model_card_says_what_it_is(exported: Exported) -> None:
    model, out = exported
    _, front_matter, card = (out / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(front_matter)["library_name"] == "transformers"
    num_parameters = sum(p.numel() for p in model.parameters()) - 63 * 32
    for row in (
        f"| parameters | {num_parameters:,} |",
        "| vocabulary | 257 ids, tokenizer `bytes` |",
        "| tokens seen | 81,920 |",
        "| data (hash of its manifests) | `cd` |",
        "| batches skipped after loss spikes | 2 |",
        "| `val/loss` | 2.5000 |",
        "| `val/tokens` | 4,096 |",
        "| `hellaswag/acc_norm` | 0.2500 |",
    ):
        assert row in card
    assert "private" not in card
    written = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
    assert written["optim"]["peak_lr"] == 1e-3


def test_texts_of_a_checkpoint_cannot_change_the_model_card(tmp_path: Path) -> None:
    """These texts are untrusted: they must add no HTML, link, line or table cell."""
    hostile = "x` | <img src=http://h>\n\n# [a](javascript:b) \x1b[1m"
    shown = "x? ? ?img src=http://h???# ?a?(javascript:b) ??1m"
    cards = []
    for rows in (
        [{"step": 20, "event": "import", "source": hostile}],
        [{"step": 20, f"val/{hostile}": 2.0}],
    ):
        run = tmp_path / str(len(cards))
        write_checkpoint(Location.of(run), rows=rows)
        export_checkpoint(run, run / "hf", "fp32", print)
        cards.append((run / "hf" / "README.md").read_text())
    assert f"imported from `{shown}`; raytrain-gpt has not trained them.\n" in cards[0]
    assert f"| `val/{shown}` | 2.0000 |\n" in cards[1]


def test_the_model_cards_code_runs(
    exported: Exported, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = (exported[1] / "README.md").read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(exported[1])
    exec(code, {})
    assert capsys.readouterr().out.startswith("Once upon a time")


def test_export_refuses_what_it_cannot_do(
    exported: Exported, refused: Refused, tmp_path: Path
) -> None:
    run = exported[1].parent / "run"
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").touch()
    assert "not empty; set --out" in refused("export", run, "--out", taken)
    assert "not empty; set --out" in refused("export", run, "--out", taken / "file")
    assert "cannot write" in refused("export", run, "--out", taken / "file" / "below")
    assert "dtype='fp8': must be 'fp32' or 'bf16'" in refused("export", run, "--dtype", "fp8")
    assert "local directory" in refused("export", run, "--out", "s3://bucket/hf")
    assert "neither a checkpoint nor a run" in refused("export", tmp_path / "nowhere")


def test_a_full_disk_leaves_nothing_behind(
    exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = exported[1].parent / "run"

    def full(_: object, path: Path, **__: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(huggingface, "save_file", full)
    with raises_line(CheckpointError, "No space left on device", "free space"):
        export_checkpoint(run, tmp_path / "hf", "fp32", print)
    with raises_line(CheckpointError, "no space left"):
        import_weights(exported[1], tmp_path / "checkpoint", print)
    assert not list(tmp_path.iterdir())


def test_a_gpt2_that_is_imported_is_exported_bit_for_bit(tmp_path: Path) -> None:
    hf = hf_model(shape := ODD[1]).bfloat16()
    hf.save_pretrained(tmp_path / "hf", max_shard_size="5KB")
    place, found = import_weights(tmp_path / "hf", tmp_path / "checkpoint", print)
    assert found == resolved_shape(shape)
    export_checkpoint(place.path, tmp_path / "again", "bf16", print)
    hf.save_pretrained(tmp_path / "whole")
    one, other = (load_file(tmp_path / d / "model.safetensors") for d in ("whole", "again"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    for key in written.keys() - {"torch_dtype", "n_ctx", "transformers_version"}:
        assert getattr(hf.config, key) == written[key], key
    assert "imported from `hf`" in (tmp_path / "again" / "README.md").read_text()


DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


@pytest.mark.parametrize(
    ("sizes", "changed", "words"),
    [
        ({}, {"n_layer": float("inf")}, ["is damaged"]),
        ({}, {"n_layer": 10**9}, ["num_layers=1000000000"]),
        ({}, dict.fromkeys(DROPOUTS, 2.0), ["a dropout of 2.0"]),
        ({}, {"n_positions": 0}, ["seq_len=0"]),
        (
            QWEN3,
            {"max_position_embeddings": 2**24, "head_dim": 4096},
            ["seq_len=16777216 times head_size=4096 is ", "above 268435456"],
        ),
        (QWEN3, {"num_key_value_heads": 3}, ["num_kv_heads=3 does not divide num_heads=4"]),
        (QWEN3, {"num_hidden_layers": 10**4}, ["2 layers", "10000"]),
        (QWEN3, {"intermediate_size": 10**20}, ["mlp_size=1000"]),
        (QWEN3, {"rope_theta": 0.5, "rope_parameters": None}, ["rope_theta=0.5"]),
        (QWEN3, {"num_attention_heads": 0}, ["num_heads=0"]),
    ],
    ids=str,
)
def test_a_configuration_of_impossible_values_is_refused(
    sizes: dict[str, Any],
    changed: dict[str, Any],
    words: list[str],
    refused: Refused,
    tmp_path: Path,
) -> None:
    write_checkpoint(Location.of(tmp_path / "run"), **sizes)
    hf = export_checkpoint(tmp_path / "run", tmp_path / "hf", "fp32", print)
    change_config(hf, **changed)
    line = refused("import", hf)
    for word in words:
        assert word in line


def test_an_imported_checkpoint_samples_and_evaluates(
    hf: Path, dataset: Path, run_cli: RunCli, tmp_path: Path
) -> None:
    """The loss is the one that transformers computes on the same tokens."""
    from transformers import AutoModelForCausalLM

    tensors = load_file(hf / "model.safetensors")
    # Logits are far below 0, as in the released GPT-2: padded rows must not matter.
    tensors["transformer.wte.weight"] = 4 * tensors["transformer.wte.weight"] + 1
    tensors["transformer.ln_f.bias"] -= 2
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    place = tmp_path / "checkpoint"
    out = run_cli.succeeds("import", hf, "--out", place)
    assert f"next: raytrain-gpt sample {place}" in out
    out = run_cli.succeeds("sample", place, "--prompt", "To be", "--num_samples", 2)
    assert out.count("To be") == 2
    errors = run_cli.refuses("eval", place)
    assert "was imported" in errors
    assert "--data" in errors

    _, metrics = evaluate_checkpoint(place, print, data=dataset, eval_tokens=1024)
    manifest = read_manifest(dataset)
    rows, _ = read_sequences(dataset, manifest, "val", 64, np.arange(16))
    ids = torch.from_numpy(np.asarray(rows).astype(np.int64))
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(hf).eval()(ids[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    assert logits.max() < 0
    assert metrics["val/loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_an_import_goes_to_an_object_store(
    exported: Exported, remote_dir: Location, run_cli: RunCli
) -> None:
    place = remote_dir / "gpt2"
    run_cli.succeeds("import", exported[1], "--out", place)
    out = run_cli.succeeds("sample", place, "--prompt", "To be", "--num_samples", 1)
    assert out.count("To be") == 1
    assert "not empty" in run_cli.refuses("import", exported[1], "--out", place)


def test_a_file_of_weights_has_a_head_for_64_channels(tmp_path: Path) -> None:
    shape = replace(SHAPE, embd_size=128)
    save_file(hf_tensors(new_model(shape), torch.float32), tmp_path / "gpt2.safetensors")
    lines: list[str] = []
    _, found = import_weights(tmp_path / "gpt2.safetensors", tmp_path / "new", lines.append)
    assert found == resolved_shape(shape)
    assert lines[:2] == [
        "no config.json; assuming 2 heads, one per 64 channels",
        "no tokenizer with the weights; assuming bytes from its 257 ids (override with --tokenizer)",
    ]


def test_a_file_of_weights_has_the_configuration_beside_it(hf: Path, tmp_path: Path) -> None:
    change_config(hf, n_head=4)
    place, _ = import_weights(hf / "model.safetensors", tmp_path / "new", print)
    export_checkpoint(place, tmp_path / "out", "fp32", print)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["n_head"] == 4


@pytest.mark.parametrize("context", [2**32, 2**64, float("inf"), "x"])
def test_a_hostile_context_of_an_import_is_one_line(context: object, tmp_path: Path) -> None:
    place, imported = tmp_path / "new", {"config.json": {"max_position_embeddings": context}}
    encoding = load_tokenizer("bytes")
    huggingface._write(new_model(SHAPE), encoding, Location.of(place), "x", imported)
    with raises_line(CheckpointError, "import.json is damaged"):
        export_checkpoint(place, tmp_path / "out", "fp32", print)


def test_transformers_would_read_texts_of_a_qwen2_as_qwens(tmp_path: Path) -> None:
    """The export says so, and the model card's way of loading gives our ids."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    sizes = {"architecture": "qwen2", "num_kv_heads": 2, "mlp_size": 48}
    text, lines = "a\n\nb 1234 cafe\u0301", []
    for name in ("bytes", "qwen2.5"):
        if name == "bytes":
            write_checkpoint(Location.of(tmp_path / name), **sizes)
            encoding: Tokenizer = load_tokenizer(name)
        else:
            write_family(name, tmp_path / "theirs")
            encoding = open_tokenizer(str(tmp_path / "theirs"))
            shape = GPTShape(2, 2, 32, 64, encoding.n_vocab, architecture="qwen2")
            huggingface._write(new_model(shape), encoding, Location.of(tmp_path / name), "random")
        said: list[str] = []
        out = export_checkpoint(tmp_path / name, tmp_path / f"{name}-hf", "fp32", said.append)
        lines.append(any("AutoTokenizer gives other ids" in line for line in said))
        ids = encoding.encode_ordinary(text)
        assert PreTrainedTokenizerFast.from_pretrained(out)(text)["input_ids"] == ids
        assert (AutoTokenizer.from_pretrained(out)(text)["input_ids"] != ids) == lines[-1]
    assert lines == [True, False]


def change_config(hf: Path, **changes: object) -> None:
    content = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(content | changes))


def test_import_refuses_what_it_cannot_read(hf: Path, refused: Refused, tmp_path: Path) -> None:
    assert "does not exist" in refused("import", tmp_path / "nowhere")
    assert "copy it to a local directory" in refused("import", "s3://bucket/hf")
    assert "nor a .safetensors file" in refused("import", hf / "README.md")
    line = refused("import", hf, "--tokenizer", "nonsense")
    assert "unknown tokenizer nonsense" in line
    change_config(hf, n_head=4)
    (hf / "config.json").write_text((hf / "config.json").read_text().replace("gelu_new", "silu"))
    assert "activation_function='silu'" in refused("import", hf)
    change_config(hf, activation_function="gelu_new", n_positions=65)
    assert "wpe.weight (64, 32), but a GPT-2 of its sizes has (65, 32)" in refused("import", hf)
    (hf / "config.json").unlink()
    assert "has no config.json" in refused("import", hf)


def test_a_tokenizer_of_another_size_is_refused(
    hf: Path, refused: Refused, gpt2: object, tmp_path: Path
) -> None:
    line = refused("import", hf, "--tokenizer", "gpt2")
    assert "gpt2 has 50257 ids" in line
    assert "have 257; set --tokenizer" in line
    (hf / "tokenizer.json").unlink()
    (hf / "tokenizer_config.json").unlink()
    change_config(hf, vocab_size=256)
    tensors = load_file(hf / "model.safetensors")
    tensors["transformer.wte.weight"] = tensors["transformer.wte.weight"][:256].clone()
    save_file(tensors, hf / "model.safetensors")
    assert "no tokenizer, and no default one has 256 ids" in refused("import", hf)


@pytest.mark.parametrize("rows", [258, 320, 1000])
def test_rows_that_pad_a_named_tokenizer_are_imported(hf: Path, rows: int, tmp_path: Path) -> None:
    tensors = load_file(hf / "model.safetensors")
    tensors["transformer.wte.weight"] = torch.rand(rows, 32)
    save_file(tensors, hf / "model.safetensors")
    change_config(hf, vocab_size=rows)
    import_weights(hf, tmp_path / "beside", print)
    if rows == 1000:  # not the tokenizer of these weights
        with raises_line(DataError, "bytes has 257 ids", "have 1000; set --tokenizer"):
            import_weights(hf, tmp_path / "named", print, tokenizer="bytes")
        return
    import_weights(hf, tmp_path / "named", print, tokenizer="bytes")
    files = [tmp_path / name / "tokenizer.json" for name in ("named", "beside")]
    assert files[0].read_text() == files[1].read_text()


def test_the_advice_for_a_vocabulary_beside_the_weights_works(
    hf: Path, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in hf.glob("tokenizer*"):
        file.unlink()
    vocabulary = ByteLevelBPETokenizer()
    vocabulary.train_from_iterator(
        ["a"], 257, special_tokens=["<|endoftext|>"], show_progress=False
    )
    vocabulary.save_model(str(hf))
    line = refused("import", hf)
    assert "has merges.txt, vocab.json, but no tokenizer.json; add it: python -c " in line
    code = shlex.split(line.partition("add it: python ")[2])[1]
    with monkeypatch.context() as there:
        there.chdir(hf)
        exec(code, {})
    place, _ = import_weights(hf, tmp_path / "new", print)
    found = read_tokenizer(place)
    assert found.eot_token == vocabulary.token_to_id("<|endoftext|>") == 0
    assert found.encode_ordinary("naïve 日") == vocabulary.encode("naïve 日").ids


@pytest.mark.parametrize("name", ["vocab.json", "tokenizer.model", "vocab.txt", "x.tiktoken"])
@pytest.mark.parametrize("source", ["", "model.safetensors"])
def test_no_tokenizer_is_assumed_beside_another(
    hf: Path, name: str, source: str, refused: Refused
) -> None:
    for file in hf.glob("tokenizer*"):
        file.unlink()
    if source:
        tensors = hf_tensors(new_model(replace(SHAPE, embd_size=64)), torch.float32)
        save_file(tensors, hf / source)
        (hf / "config.json").unlink()
    (hf / name).write_text("")
    line = refused("import", hf / source)
    assert f"has {name}, but no tokenizer.json; add it" in line
    assert "set --tokenizer" in line


def test_init_from_refuses_what_does_not_fit(
    exported: Exported, make_config: MakeConfig, dataset: Path, tmp_path: Path
) -> None:
    place, _ = import_weights(exported[1], tmp_path / "checkpoint", print)
    manifest = read_manifest(dataset)
    # The quickstart preset's Qwen3 with a tied head would be refused: its shape must be fully replaced.
    sizes = fields_of_init_from(None, None, {"init_from": str(place), "seq_len": 32}, BUILT_IN)
    plain = Config().updated({**sizes, "init_from": str(place), "seq_len": 32})
    assert check_init_from(plain, manifest) == plain
    config = make_config(init_from=str(place), seq_len=32)
    assert check_init_from(config, manifest) == config
    with raises_line(ConfigError, "seq_len=128", "at most 64"):
        check_init_from(config.updated({"seq_len": 128, "global_batch_tokens": 1536}), manifest)
    with raises_line(ConfigError, "num_heads=4", "set num_heads to 2"):
        check_init_from(config.updated({"num_heads": 4}), manifest)
    with raises_line(ConfigError, "num_layers=1", "set num_layers to 2"):
        check_init_from(config.updated({"num_layers": 1}), manifest)
    write_checkpoint(Location.of(tmp_path / "untied"), **UNTIED)
    qwen3 = make_config(init_from=str(tmp_path / "untied"), **UNTIED)
    for name, ours, theirs in (("tied_embeddings", True, "false"), ("num_kv_heads", None, 2)):
        with raises_line(ConfigError, f"{name}=", f"set {name} to {theirs}"):
            check_init_from(qwen3.updated({name: ours}), manifest)
    for source in (exported[1], exported[1] / "model.safetensors"):
        hugging_face = config.updated({"init_from": str(source)})
        with raises_line(
            CheckpointError, "import them first", f"raytrain-gpt import {source} --out CHECKPOINT"
        ):
            check_init_from(hugging_face, manifest)
    other = manifest.model_copy(update={"vocab_hash": "other"})
    with raises_line(DataError, f"prepare the data with --tokenizer {place}"):
        check_init_from(config, other)


@pytest.mark.long
@pytest.mark.parametrize("sizes", [{}, UNTIED], ids=["gpt2", "qwen3"])
def test_lm_eval_runs_on_an_export(sizes: dict[str, Any], tmp_path: Path) -> None:
    write_checkpoint(Location.of(tmp_path / "run"), **sizes)
    exported = export_checkpoint(tmp_path / "run", tmp_path / "hf", "fp32", print)
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf_home"), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--tasks", "sentences"]
    command += ["--model_args", f"pretrained={exported}", "--batch_size", "32"]
    command += ["--include_path", "examples/lm_eval", "--output_path", str(tmp_path / "results")]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    (results,) = (tmp_path / "results").rglob("results_*.json")
    found = json.loads(results.read_text())["results"]["sentences"]
    assert 0 <= found["acc,none"] <= 1
    assert re.search(r"\|sentences\|", done.stdout)


@pytest.mark.fault("files that claim impossible sizes")
def test_weights_that_claim_a_large_model_are_refused_before_it_is_made(
    hf: Path, refused: Refused
) -> None:
    wide = {name: torch.zeros(1, 64 * 10**4) for name in ("wte.weight", "wpe.weight")}
    save_file({**wide, "h.0.ln_1.bias": torch.zeros(1)}, hf / "model.safetensors")
    (hf / "config.json").unlink()
    assert "h.0.attn.c_attn.bias missing" in refused("import", hf / "model.safetensors")
