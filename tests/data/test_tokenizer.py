"""Tokenizers: text survives encoding and decoding, and a dataset stores its tokenizer."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

import pytest

import raytrain_gpt
from raytrain_gpt.data.tokenizer import (
    EOT,
    PROBE,
    Tokenizer,
    load_tokenizer,
    make_tiktoken,
    token_dtype,
)
from raytrain_gpt.errors import DataError
from tests.conftest import raises_line
from tests.data.shard_tools import TEXTS, made_text


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_a_document_comes_back_closed_by_eot(tokenizer: str, text: str) -> None:
    encoding = load_tokenizer(tokenizer)
    tokens = encoding.encode_document(text).tolist()
    assert tokens[-1] == encoding.eot_token
    assert tokens.count(encoding.eot_token) == 1
    assert encoding.decode_bytes(tokens[:-1]) == text.encode()


def test_a_very_long_word_comes_back(tokenizer: str) -> None:
    encoding = load_tokenizer(tokenizer)
    tokens = encoding.encode_document("x" * 100_000)
    assert encoding.decode_bytes(tokens[:-1].tolist()) == b"x" * 100_000


def test_bytes_are_their_own_ids() -> None:
    tokens = load_tokenizer("bytes").encode_document("aé<|endoftext|>")
    assert tokens.tolist() == [*"aé<|endoftext|>".encode(), 256]


def test_a_lone_surrogate_becomes_the_replacement_character(tokenizer: str) -> None:
    encoding = load_tokenizer(tokenizer)
    tokens = encoding.encode_document("a\ud800b")
    assert encoding.decode(tokens[:-1].tolist()) == "a\ufffdb"


@pytest.mark.parametrize(
    ("pattern", "text", "why"),
    [
        (
            "[^丁]",
            "a\ud800丁b",
            "encodes 5 of 8 bytes of 'a\ufffd丁b': it drops the rest",
        ),
        ("(?=丁)|[^丁]", "丁", "encodes 0 of 3 bytes of '丁': range end index"),
        (r"(?:(?!\S)a|a)+(a+a+)+b(?!c)|(?s).", "a" * 60, "Max limit for backtracking"),
        (r"\s+(?!\S)|\s|\S", " " * 2_000_000 + "a", "Max stack size"),
    ],
)
def test_text_that_a_tokenizer_cannot_encode_is_one_line(pattern: str, text: str, why: str) -> None:
    encoding = make_tiktoken("odd", pattern, {bytes([i]): i for i in range(256)}, {EOT: 256})
    with raises_line(DataError, "tokenizer odd", why, "use another tokenizer"):
        encoding.encode_document(text)


def test_all_text_is_encoded_by_the_function_that_counts_bytes() -> None:
    files = Path(raytrain_gpt.__file__).parent.rglob("*.py")
    calls = re.compile(r"\.encode_(ordinary|to_numpy|batch)\b")
    assert [file.name for file in files if calls.search(file.read_text())] == ["tokenizer.py"]


def test_the_probe_has_every_unicode_category() -> None:
    every = {unicodedata.category(chr(i)) for i in range(0x110000)} - {"Cs"}
    assert {*map(unicodedata.category, PROBE)} == every


def test_token_bytes_add_up_to_the_text(tokenizer: str) -> None:
    encoding = load_tokenizer(tokenizer)
    lengths = encoding.bytes_per_id(encoding.n_vocab + 50)
    text = made_text(2000) + TEXTS["control"]
    assert lengths[encoding.encode_document(text)].sum() == len(text.encode())
    assert lengths[encoding.eot_token] == 0
    assert not lengths[encoding.n_vocab :].any()


def test_an_id_that_the_vocabulary_leaves_out_has_no_text() -> None:
    ranks = {bytes([i]): i for i in range(256)}
    encoding = make_tiktoken("gap", "(?s).", ranks, {EOT: 300})
    assert encoding.decode([104, 280, 105, 0xC3]) == "hi\ufffd"


def test_gpt2_ids_are_those_of_the_released_model(gpt2: Tokenizer) -> None:
    tokens = gpt2.encode_document("Hello, I am a language model,").tolist()
    assert tokens == [15496, 11, 314, 716, 257, 3303, 2746, 11, 50256]
    assert gpt2.n_vocab == 50257


def test_the_vocabulary_hash_tells_tokenizers_apart() -> None:
    encoding = load_tokenizer("bytes")
    ranks = {bytes([i ^ 1]): i for i in range(256)}
    other = make_tiktoken("bytes", encoding.encoding._pat_str, ranks, {EOT: 256})
    assert other.hash != encoding.hash


def test_ids_are_uint16_where_the_vocabulary_fits() -> None:
    assert token_dtype(2**16) == "uint16"
    assert token_dtype(2**16 + 1) == "uint32"


def test_an_unknown_tokenizer_is_named_with_those_there_are() -> None:
    with raises_line(DataError, "gpt3", "bytes", "gpt2", "cl100k_base"):
        load_tokenizer("gpt3")
