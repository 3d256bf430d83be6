"""GGUF files, loaded by llama.cpp: same tokens, probabilities and continuations."""

from __future__ import annotations

import http.client
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import xllamacpp
from gguf import GGUFReader
from torch import Tensor

from raytrain_gpt.config.built_in import Qwen3Settings
from raytrain_gpt.core.model import GPT, GPTShape
from raytrain_gpt.core.registry import new_model
from raytrain_gpt.data.tokenizer import (
    EOT,
    GPT2_PATTERN,
    Tiktoken,
    Tokenizer,
    load_tokenizer,
    make_tiktoken,
    valid_text,
)
from raytrain_gpt.data.tokenizer_file import open_tokenizer
from raytrain_gpt.errors import ConfigError, DataError
from raytrain_gpt.export import huggingface
from raytrain_gpt.export.gguf import export_gguf
from raytrain_gpt.ingest.train_tokenizer import train_bpe
from raytrain_gpt.storage.location import Location
from tests.conftest import RunCli, raises_line
from tests.data.families import TEMPLATE, family, nasty_texts, write_family

SEQ_LEN = 160
SETTINGS = {"num_kv_heads": 2, "mlp_size": 96, "rope_theta": 5000.0}
QWEN3 = {"architecture": "qwen3", "settings": Qwen3Settings(**SETTINGS)}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "qwen3": QWEN3,
    "qwen3-wide": {**QWEN3, "settings": Qwen3Settings(**SETTINGS, head_size=32)},
    "qwen2": {"architecture": "qwen2", "settings": Qwen3Settings(**SETTINGS)},
    "llama-scaled": {
        "architecture": "llama",
        "settings": Qwen3Settings(**SETTINGS, norm_eps=1e-5, rope_factor=4.0, rope_context=64),
    },
    "qwen3-untied": {**QWEN3, "settings": Qwen3Settings(**SETTINGS, tied_embeddings=False)},
}
TEXT = "To be, or not to be: that is the question."
TEXTS = [
    TEXT,
    "It's  the 1st naïve 日本 model,\n\n isn't it?\t",
    " \t\r\n\r\n  \n 12345 ½ Ⅳ ٣ n\u0303 \u00a0\u3000\u2028 we'LL 🏳️‍🌈 \n ",
    f"{EOT}x {EOT}{EOT}",
    "".join(map(chr, [*range(256), *range(256, 0x3000, 7)])),
]


def write_checkpoint(place: Path, model: str, encoding: Tokenizer) -> GPT:
    """Write a checkpoint with weights large enough for clear choices, and return its model."""
    made = new_model(GPTShape(2, 4, 64, SEQ_LEN, encoding.n_vocab, **MODELS[model]))
    torch.manual_seed(1)
    for name, parameter in made.named_parameters():
        is_scale = parameter.dim() == 1 and name.endswith("weight")
        torch.nn.init.normal_(parameter, mean=float(is_scale), std=0.15)
    with torch.no_grad():
        # llama.cpp returns no probabilities before a character is complete, so favor ASCII.
        made.head_weight[128:257] *= 0.1
        made.head_weight[encoding.n_vocab :] = 9.0  # padding, which must not be exported
    huggingface._write(made, encoding, Location.of(place), "random")
    return made.eval()


def bf16_matrices(model: GPT) -> None:
    """Round the weights that a bf16 file rounds."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and name != "wpe.weight":
                parameter.copy_(parameter.bfloat16())


@torch.no_grad()
def log_probabilities(model: GPT, ids: list[int]) -> Tensor:
    """Return log-probabilities of the token after each id, (T, vocabulary)."""
    return model.logits(torch.tensor([ids]))[0, :, : model.shape.vocab_size].log_softmax(-1)


class LlamaCpp:
    """llama.cpp server with one model, and an fp32 KV cache instead of the default fp16."""

    def __init__(self, file: Path) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.n_ctx = SEQ_LEN
        params.cpuparams.n_threads = 1
        params.warmup = params.fit_params = False
        params.verbosity = 1
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.server = xllamacpp.Server(params)

    def ask(self, path: str, **content: object) -> Any:
        address = self.server.listening_address.removeprefix("http://")
        connection = http.client.HTTPConnection(address)
        connection.request("POST", path, json.dumps(content), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
        assert response.status == 200, answer
        return answer

    def tokens(self, text: str) -> list[int]:
        """Return the ids of a text, without parsing special tokens."""
        found: list[int] = self.ask("/tokenize", content=text, parse_special=False)["tokens"]
        return found

    def log_probabilities(self, prompt: list[int], size: int) -> Tensor:
        """Return log-probabilities of the token after the prompt, (size,)."""
        answer = self.ask("/completion", prompt=prompt, n_predict=1, n_probs=size, temperature=0)
        (drawn,) = answer["completion_probabilities"]
        found = torch.full((size,), torch.nan)
        for token in drawn["top_logprobs"]:
            found[token["id"]] = token["logprob"]
        return found


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, "bf16" if name == "qwen3" else "fp32") for name in MODELS]
)
def test_llama_cpp_computes_what_the_model_computes(
    name: str, dtype: str, run_cli: RunCli, tmp_path: Path
) -> None:
    """Probabilities after each token of a text match, and so does a greedy continuation of 100 tokens.

    llama.cpp's GELU uses an fp16 table, and its bf16 matrix products also round the other factor.
    """
    encoding = load_tokenizer("bytes")
    model = write_checkpoint(tmp_path / "checkpoint", name, encoding)
    file = tmp_path / "new" / "book.gguf"
    argv = ("export", tmp_path / "checkpoint", "--format", "gguf", "--dtype", dtype, "--out", file)
    assert f"next: llama-completion -m {file} " in run_cli.succeeds(*argv)
    assert [path.name for path in file.parent.iterdir()] == ["book.gguf"]
    limit = {"gpt2": 2e-3}.get(name, 1e-4)
    if dtype == "bf16":
        bf16_matrices(model)
        limit = 0.1
    llama = LlamaCpp(file)
    ids = encoding.encode_ordinary(TEXT)
    assert llama.tokens(TEXT) == ids
    expected = log_probabilities(model, ids)
    found = torch.stack([llama.log_probabilities(ids[:end], 257) for end in range(1, len(ids) + 1)])
    assert (found - expected).abs().max() <= limit

    drawn = llama.ask(
        "/completion",
        prompt=TEXT,
        n_predict=100,
        temperature=0,
        ignore_eos=True,
        return_tokens=True,
    )["tokens"]
    assert len(drawn) == 100
    choices = log_probabilities(model, ids + drawn)[len(ids) - 1 : -1]
    behind = choices.amax(-1) - choices[torch.arange(100), drawn]
    assert behind.max() <= 2 * limit  # the best token, or one nearly as likely


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_llama_cpp_reads_texts_as_the_tokenizer_does(
    name: str, gpt2: Tiktoken, tmp_path: Path
) -> None:
    check_texts(name, gpt2 if name == "gpt2" else load_tokenizer("bytes"), tmp_path)


def test_llama_cpp_reads_texts_as_a_tokenizer_of_ones_own_does(tmp_path: Path) -> None:
    check_texts("qwen3", train_bpe([Path(__file__).read_text(), *TEXTS], 600), tmp_path)


def check_texts(name: str, encoding: Tiktoken, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", name, encoding)
    llama = LlamaCpp(export_gguf(tmp_path / "checkpoint", tmp_path / "a.gguf", "bf16", print))
    for text in TEXTS:
        assert llama.tokens(text) == encoding.encode_ordinary(text), text
    assert llama.ask("/tokenize", content=EOT, add_special=True)["tokens"] == [encoding.eot_token]


def test_what_a_file_says(tmp_path: Path) -> None:
    """Matrices are bf16, vectors and positions fp32; BOS and EOS are the same id."""
    write_checkpoint(tmp_path / "checkpoint", "gpt2", load_tokenizer("bytes"))
    reader = GGUFReader(export_gguf(tmp_path / "checkpoint", tmp_path / "a.gguf", "bf16", print))
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert {name for name, kind in types.items() if kind == "BF16"} == {
        "token_embd.weight",
        *(
            f"blk.{block}.{part}.weight"
            for block in range(2)
            for part in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
        ),
    }
    assert {*types.values()} == {"BF16", "F32"}
    for end in ("bos", "eos"):
        assert reader.fields[f"tokenizer.ggml.{end}_token_id"].contents() == 256
    assert reader.fields["general.name"].contents() == "imported"


def test_ids_that_the_vocabulary_skips_are_unused(tmp_path: Path) -> None:
    ranks = {bytes([i]): i for i in range(256)}
    encoding = make_tiktoken("gaps", GPT2_PATTERN, {**ranks, b"ab": 260}, {EOT: 258, "<|x|>": 263})
    model = write_checkpoint(tmp_path / "checkpoint", "qwen3", encoding)
    file = export_gguf(tmp_path / "checkpoint", tmp_path / "a.gguf", "fp32", print)
    llama = LlamaCpp(file)
    assert llama.tokens("abba") == [260, 98, 97]
    assert llama.ask("/tokenize", content="a<|x|>")["tokens"] == [97, 263]
    expected = log_probabilities(model, [260])
    assert torch.allclose(llama.log_probabilities([260], 264), expected[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("pattern", "token"), [(r"\s+|\S+", b"ab"), (GPT2_PATTERN, b"abc")], ids=["pattern", "merges"]
)
def test_a_tokenizer_that_llama_cpp_lacks_is_one_line(
    pattern: str, token: bytes, tmp_path: Path
) -> None:
    ranks = {bytes([i]): i for i in range(256)} | {token: 257}
    encoding = make_tiktoken("odd", pattern, ranks, {EOT: 256})
    write_checkpoint(tmp_path / "checkpoint", "qwen3", encoding)
    with raises_line(
        DataError, "tokenizer odd", "is not BPE like that of GPT-2", "use --format hf"
    ):
        export_gguf(tmp_path / "checkpoint", tmp_path / "a.gguf", "fp32", print)
    assert not (tmp_path / "a.gguf").exists()


def test_words_that_merges_do_not_make_need_the_flag_that_llama_cpp_assumes(tmp_path: Path) -> None:
    for name, ignores, unmade in product(("gpt2", "llama3"), (False, True), (False, True)):
        model = json.loads(family(name)["tokenizer.json"])["model"] | {"ignore_merges": ignores}
        del model["merges"][-int(unmade) or len(model["merges"]) :]
        write_family(name, tmp_path / "theirs", model=model)
        place = tmp_path / f"{name}-{ignores}-{unmade}"
        write_checkpoint(place, "qwen3", open_tokenizer(str(tmp_path / "theirs")))
        if unmade and ignores != (name == "llama3"):
            with raises_line(DataError, "is not BPE like that of GPT-2", "use --format hf"):
                export_gguf(place, place / "a.gguf", "fp32", print)
        else:
            export_gguf(place, place / "a.gguf", "fp32", print)


def test_an_import_begins_texts_as_its_tokenizer_does(tmp_path: Path) -> None:
    write_family("llama3", tmp_path / "theirs")
    tokenizer = open_tokenizer(str(tmp_path / "theirs"))
    made = new_model(GPTShape(2, 4, 64, SEQ_LEN, tokenizer.n_vocab, **MODELS["llama-scaled"]))
    for eos, in_file in ((2, 2), (2.0, tokenizer.eot_token)):
        place = tmp_path / str(eos)
        imported = {"config.json": {"bos_token_id": 1, "eos_token_id": eos}}
        huggingface._write(made, tokenizer, Location.of(place), "random", imported)
        fields = GGUFReader(export_gguf(place, place / "a.gguf", "fp32", print)).fields
        ids = [fields[f"tokenizer.ggml.{end}_token_id"].contents() for end in ("bos", "eos")]
        assert ids == [tokenizer.before[0], in_file]


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_scaled_positions_that_llama_cpp_lacks_are_one_line(name: str, tmp_path: Path) -> None:
    settings = MODELS["llama-scaled"]["settings"]
    shape = GPTShape(2, 4, 64, SEQ_LEN, 257, architecture=name, settings=settings)
    huggingface._write(
        new_model(shape), load_tokenizer("bytes"), Location.of(tmp_path / "a"), "random"
    )
    with raises_line(ConfigError, "rope_factor=4.0", f"not of a {name}; use --format hf"):
        export_gguf(tmp_path / "a", tmp_path / "a.gguf", "fp32", print)
    assert not (tmp_path / "a.gguf").exists()


def test_export_refuses_what_it_cannot_do(run_cli: RunCli, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "run", "gpt2", load_tokenizer("bytes"))
    taken = tmp_path / "taken.gguf"
    taken.touch()
    for out, words in (
        (taken, f"{taken} exists; set --out to a new file"),
        (taken / "below", "cannot write"),
        ("s3://bucket/a.gguf", "export to a local file"),
    ):
        errors = run_cli.refuses("export", tmp_path / "run", "--format", "gguf", "--out", out)
        assert words in errors
    errors = run_cli.refuses("export", tmp_path / "run", "--format", "onnx", "--out", "a")
    assert "format='onnx': must be 'hf' or 'gguf'" in errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "taken.gguf"]


@pytest.mark.parametrize("out", ["there", "there/", "new", "new/", "a/b/", "there/own.gguf"])
def test_a_directory_receives_a_file_with_the_name_of_the_run(
    out: str, run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_checkpoint(Path("run"), "gpt2", load_tokenizer("bytes"))
    Path("there").mkdir()
    Path("there", "notes.txt").write_text("mine")
    argv = ("export", "run", "--format", "gguf", "--out", out)
    shown = run_cli.succeeds(*argv)
    file = tmp_path / (out if out.endswith(".gguf") else f"{out}/imported.gguf")
    assert file.read_bytes().startswith(b"GGUF")
    assert f"next: llama-completion -m {file} " in shown
    code, _, errors = run_cli(*argv)
    assert (code, errors) == (2, f"error: {file} exists; set --out to a new file\n")
    assert Path("there", "notes.txt").read_text() == "mine"
    assert len(list(tmp_path.rglob("*.gguf"))) == 1


@pytest.mark.parametrize("name", ["gpt2", "smollm2", "llama3", "qwen2.5"])
def test_llama_cpp_reads_texts_as_the_tokenizer_of_a_family_does(name: str, tmp_path: Path) -> None:
    changes = {"normalizer": None} if name == "qwen2.5" else {}
    library = write_family(name, tmp_path / "theirs", **changes)
    tokenizer = open_tokenizer(str(tmp_path / "theirs"))
    write_checkpoint(tmp_path / "checkpoint", "qwen3", tokenizer)
    file = export_gguf(tmp_path / "checkpoint", tmp_path / "a.gguf", "fp32", print)
    fields = GGUFReader(file).fields
    assert fields["tokenizer.chat_template"].contents() == TEMPLATE
    hf = huggingface.export_checkpoint(tmp_path / "checkpoint", tmp_path / "hf", "fp32", print)
    for end, token in (("bos", tokenizer.encode_prompt("")[0]), ("eos", tokenizer.eot_token)):
        in_hf = json.loads((hf / "config.json").read_text())[f"{end}_token_id"]
        assert fields[f"tokenizer.ggml.{end}_token_id"].contents() == in_hf == token
    llama = LlamaCpp(file)
    for text in (*TEXTS, *nasty_texts()):
        assert llama.tokens(valid_text(text)) == tokenizer.encode_ordinary(text), text
    whole = llama.ask("/tokenize", content=TEXT, add_special=True)["tokens"]
    assert whole == library.encode(TEXT).ids
