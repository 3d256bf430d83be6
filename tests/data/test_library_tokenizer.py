"""Tokenizers of other programs: the ids of `tokenizers`, in documents of any length and kind."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from raytrain_gpt.data import library_tokenizer
from raytrain_gpt.data.library_tokenizer import FileTokenizer
from raytrain_gpt.data.tokenizer import valid_text
from raytrain_gpt.data.tokenizer_file import open_tokenizer, read_tokenizer
from raytrain_gpt.errors import DataError
from tests.conftest import RunCli, raises_line
from tests.data.families import EOTS, FAMILIES, family, nasty_texts, write_family
from tests.data.shard_tools import made_text

KNOWN = {"gpt2", "smollm2", "llama3", "qwen2.5", "qwen3"}
Change = Callable[[dict[str, Any]], object]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def opened(place: Path, eot: str | None = None) -> FileTokenizer:
    found = open_tokenizer(str(place), eot)
    assert isinstance(found, FileTokenizer)
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_are_those_of_the_library(name: str, tmp_path: Path) -> None:
    theirs, ours = write_family(name, tmp_path), opened(tmp_path)
    again = pickle.loads(pickle.dumps(ours))
    again._engine = None  # the library alone
    assert (ours._engine is not None) == (name in KNOWN)
    assert again.hash == ours.hash
    for text in map(valid_text, nasty_texts()):
        ids = theirs.encode(text).ids
        document = ours.encode_document(text)
        assert document.tolist() == [*ids, ours.eot_token], text
        assert document.dtype == np.uint32
        assert [*ours.before, *ours.encode(text)] == ids
        assert again.encode(text).tolist() == ours.encode_ordinary(text)
    assert ours.token_bytes(ours.eot_token).decode() == EOTS.get(name, "<|endoftext|>")
    assert ours.lengths[ours.eot_token] == 0
    begin = ["<s>", "<|begin_of_text|>"]
    assert ours.decode(ours.before) in ("", *begin)
    assert ours.encode_prompt("") == (ours.before.tolist() or [ours.eot_token])
    joined = [*ours.encode("a man"), *ours.encode_after("a man", " sat.")]
    assert joined == theirs.encode("a man sat.", add_special_tokens=False).ids
    assert ours.decode(ours.encode("naïve 日本\n")).strip(" ") == "naïve 日本\n"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_long_document_is_cut_where_its_ids_stay(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, ours = write_family(name, tmp_path), opened(tmp_path)
    monkeypatch.setattr(library_tokenizer, "_PIECE", 3000)
    ours._engine, fast = None, ours._engine
    nasty = "\n".join(text for text in nasty_texts() if len(text) < 12)
    for text in (made_text(20_000), valid_text(nasty) * 9, Path(__file__).read_text()):
        assert len([*ours._pieces(text)]) > 2
        assert ours.encode(text).tolist() == theirs.encode(text, add_special_tokens=False).ids
    with raises_line(DataError, "needs a blank to cut in 3000 characters", "split the document"):
        ours.encode("x" * 10_000)
    ours._engine = fast
    assert name not in KNOWN or len(ours.encode("x" * 10_000)) > 100


def test_the_configuration_is_made_ours(tmp_path: Path) -> None:
    write_family("qwen3", tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(
        '{"model_input_names": ["input_ids", "token_type_ids"], "pad_token": "\\ud800"}'
    )
    ours = json.loads(opened(tmp_path).files[file.name])
    assert ours["model_input_names"] == ["input_ids", "attention_mask"]
    assert ours["pad_token"] == "\ufffd"
    file.write_bytes(b"\xff")
    with raises_line(DataError, f"{file} is damaged"):
        opened(tmp_path)


def test_a_document_ends_as_the_files_or_the_user_say(tmp_path: Path, run_cli: RunCli) -> None:
    write_family("qwen3", tmp_path)
    assert opened(tmp_path, "<|im_end|>").decode([opened(tmp_path, "<|im_end|>").eot_token])
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    ended = opened(tmp_path)
    assert ended.token_bytes(ended.eot_token) == b"<|im_end|>"
    (tmp_path / "tokenizer_config.json").unlink()
    usual = opened(tmp_path)
    assert usual.token_bytes(usual.eot_token) == b"<|endoftext|>"
    assert len({usual.hash, ended.hash, usual.with_rows(2000).hash}) == 3
    assert usual.with_rows(2000).n_vocab == 2000
    (tmp_path / "a.txt").write_text("to be\n" * 50)
    for eot, words in (
        ("<tool_call>", "set --eot to a special token: ['<|endoftext|>'"),
        ("x", ""),
    ):
        arguments = ("prepare", tmp_path / "a.txt", "--out", tmp_path / "out", "--eot", eot)
        assert words in run_cli.refuses(*arguments, "--tokenizer", tmp_path)
        line = run_cli.refuses(*arguments, "--tokenizer", "bytes")
        assert f"tokenizer bytes ends documents with <|endoftext|>, not {eot}; remove" in line
    run_cli.succeeds("prepare", tmp_path / "a.txt", "--out", tmp_path / "out", "--eot", "<|im_end|>",
                     "--tokenizer", tmp_path)  # fmt: skip
    prepared = read_tokenizer(tmp_path / "out")
    assert prepared.token_bytes(prepared.eot_token) == b"<|im_end|>"


UNIGRAM = {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 0}


def nested(kind: str, depth: int = 100) -> dict[str, Any]:
    step = {"type": "Replace", "pattern": {"String": "x"}, "content": "x" * 1000}
    return {"type": "Sequence", kind: [step] * depth}


def split_by(pattern: str, behavior: str = "Isolated") -> dict[str, Any]:
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "use_regex": False,
        "trim_offsets": True,
    }
    return {"type": "Sequence", "pretokenizers": [cut, level]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(model=UNIGRAM), "its model has type 'Unigram'"),
        (lambda c: c["model"].update(type="WordPiece"), "its model has type 'WordPiece'"),
        (lambda c: c["model"].update(dropout=0.1), "dropout of 0.1 makes ids random"),
        (lambda c: c.update(normalizer={"type": "Lowercase"}), "Lowercase\"}' changes text"),
        (lambda c: c.update(normalizer={"type": "NFKC"}), "NFKC\"}' changes text"),
        (lambda c: c.update(normalizer=nested("normalizers")), "Replace"),
        (lambda c: c["added_tokens"][-1].update(id=5000), "in tokenizers"),
        (
            lambda c: c["model"]["vocab"].update({"ÿÿÿ": c["model"]["vocab"].pop("ÿ")}),
            "no token for one of the 256 bytes",
        ),
        (lambda c: c.update(pre_tokenizer=split_by(r"\s+", "Removed")), "it changes text, such as ' '"),
        (lambda c: c.update(pre_tokenizer=split_by("x{0,2000}x{0,2000}y")), "short texts take it more"),
        (lambda c: c.update(pre_tokenizer=split_by("(")), "it fails: "),
        (lambda c: c.update(decoder={"type": "Precompiled"}), "it fails: "),
    ],
)  # fmt: skip
def test_what_is_refused_is_refused_in_one_line(
    change: Change, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "short texts" in words:
        monkeypatch.setattr(library_tokenizer, "_PROBE_CPU_S", 2)
    content = json.loads(family("gpt2")["tokenizer.json"])
    change(content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with raises_line(DataError, "tokenizer.json is not supported", "set --tokenizer", words):
        open_tokenizer(str(tmp_path))


def test_a_word_that_takes_the_blanks_beside_it_is_refused(tmp_path: Path) -> None:
    for word in (AddedToken("</s>", rstrip=True, special=False), "neu"):
        theirs = write_family("llama2", tmp_path)
        theirs.add_tokens([word])
        (tmp_path / "tokenizer.json").write_text(theirs.to_str())
        with raises_line(DataError, "is not supported (an added token takes the blanks beside it)"):
            open_tokenizer(str(tmp_path))


def test_a_huge_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(10**10)
    with raises_line(DataError, "it has 10000000000 bytes, above 67108864"):
        open_tokenizer(str(tmp_path))


def test_a_file_is_probed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_family("gpt2", tmp_path)
    opened(tmp_path)
    monkeypatch.setattr(library_tokenizer, "_probe", lambda text: pytest.fail("probed again"))
    library_tokenizer._load((tmp_path / "tokenizer.json").read_text())
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/{'x' * 300}")  # which no system opens
    opened(tmp_path)


def test_other_merges_are_left_to_the_library(tmp_path: Path) -> None:
    """Neither an order that differs from the ids' nor a token that merges do not make may change ids."""
    for change in ("order", "unmade"):
        content = json.loads(family("gpt2")["tokenizer.json"])
        merges = content["model"]["merges"]
        if change == "order":
            merges[0], merges[9] = merges[9], merges[0]
        else:
            del merges[5]
        theirs: Library = write_family("gpt2", tmp_path, model=content["model"])
        ours = opened(tmp_path)
        assert ours._engine is None
        for text in (made_text(3000), *map(valid_text, nasty_texts())):
            assert ours.encode_document(text).tolist() == [*theirs.encode(text).ids, ours.eot_token]
