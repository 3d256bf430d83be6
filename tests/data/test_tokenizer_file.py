"""Files of tokenizers: Hugging Face loads them with the same ids, and others are read."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from raytrain_gpt.data.tokenizer import (
    EOT,
    TOKENIZER_FILE,
    Tiktoken,
    load_tokenizer,
    make_tiktoken,
    merges_of,
    token_ranks,
)
from raytrain_gpt.data.tokenizer_file import read_tokenizer_file
from raytrain_gpt.errors import DataError
from raytrain_gpt.storage.location import Location
from tests.conftest import raises_line
from tests.data.shard_tools import TEXTS, made_text

POSSESSIVE = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
"""cl100k's pattern, with all syntax that the two regex dialects read differently."""

WHITESPACE = [
    " ", "  ", "a ", "a  b", "\n\n a", "a\r\n\r\n", "\t \n", "x \u00a0y", "12345 678", "\x85 ",
]  # fmt: skip
HOSTILE = [
    "can't CAN'T 'S 'ſ", "naïve e\u0301", "a\u200db", "ﬁ ß ǅ", "١٢٣½Ⅷ", "$^\\z$\n$", "aaaaaaa",
]  # fmt: skip
PIECES = st.sampled_from([*"ab 'S'll\n\r\t1$", "the", "model", "日", "😀", "é", "\u3000", "\u0301"])
MADE = st.one_of(st.text(max_size=40), st.lists(PIECES, max_size=40).map("".join))


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    """Return a byte-level BPE trained by `tokenizers`, with `<|endoftext|>` as id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=[EOT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([made_text(20_000), Path(__file__).read_text()], trainer)
    return tokenizer


@pytest.fixture(scope="module")
def made(trained: Tokenizer) -> Tiktoken:
    """Return an encoding with the ids of `trained`, a different pattern, a gap, and an unmergeable token."""
    vocabulary = trained.get_vocab(with_added_tokens=False)
    ranks = token_ranks({text: i for text, i in vocabulary.items() if text != EOT})
    assert max(ranks.values()) < 600
    special = {EOT: 0, "<|pad|>": 700}
    return make_tiktoken("made", POSSESSIVE, {**ranks, b"quixotic": 600}, special)


@pytest.fixture(
    scope="module", params=["bytes", pytest.param("gpt2", marks=pytest.mark.slow), "made"]
)
def encoding(request: pytest.FixtureRequest) -> Tiktoken:
    if request.param == "bytes":
        return load_tokenizer("bytes")
    found: Tiktoken = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def pair(encoding: Tiktoken) -> tuple[Tiktoken, Tokenizer]:
    """Return an encoding, and the tokenizer that `tokenizers` loads from its file."""
    return encoding, Tokenizer.from_str(encoding.files[TOKENIZER_FILE])


def check_same(encoding: Tiktoken, tokenizer: Tokenizer, texts: Iterable[str]) -> None:
    for text in texts:
        ids = encoding.encode_ordinary(text)
        assert tokenizer.encode(text).ids == ids, repr(text)
        assert tokenizer.decode(ids) == encoding.decode(ids)


def test_ids_are_those_of_tiktoken(pair: tuple[Tiktoken, Tokenizer]) -> None:
    texts = [text for name, text in TEXTS.items() if name != "eot as text"]
    check_same(
        *pair, [*texts, *WHITESPACE, *HOSTILE, "quixotic", " quixotic", made_text(20_000, 3)]
    )


@settings(max_examples=40)
@given(text=MADE)
def test_ids_of_any_text_are_those_of_tiktoken(pair: tuple[Tiktoken, Tokenizer], text: str) -> None:
    check_same(*pair, [text])


def test_a_special_token_has_its_id(pair: tuple[Tiktoken, Tokenizer]) -> None:
    encoding, tokenizer = pair
    for text, token_id in encoding.encoding._special_tokens.items():
        assert tokenizer.token_to_id(text) == token_id
    assert tokenizer.encode(f"a{EOT}b").ids == encoding.encoding.encode(
        f"a{EOT}b", allowed_special="all"
    )


def read(directory: Path, text: str) -> Tiktoken:
    """Read a file with this text."""
    (directory / TOKENIZER_FILE).write_text(text, "utf-8")
    found = read_tokenizer_file(Location.of(directory / TOKENIZER_FILE))
    assert isinstance(found, Tiktoken)
    return found


def of_first_format(encoding: Tiktoken) -> dict[str, Any]:
    """Return the content of the file that earlier versions wrote."""
    ranks = encoding.encoding._mergeable_ranks.items()
    return {
        "name": encoding.name,
        "pattern": encoding.encoding._pat_str,
        "special_tokens": encoding.encoding._special_tokens,
        "ranks": [[base64.b64encode(token).decode(), rank] for token, rank in ranks],
    }


def test_what_was_written_is_read_as_the_same_tokenizer(encoding: Tiktoken, tmp_path: Path) -> None:
    for text in (encoding.files[TOKENIZER_FILE], json.dumps(of_first_format(encoding))):
        again = read(tmp_path, text)
        assert again.hash == encoding.hash
    assert encoding.name == "gpt2" or again.files[TOKENIZER_FILE] == encoding.files[TOKENIZER_FILE]


@pytest.mark.slow
def test_built_in_tokenizers_keep_their_hashes_and_are_recognized(
    gpt2: Tiktoken, tmp_path: Path
) -> None:
    """Data that was prepared with one, also by an earlier version, fits an imported model."""
    for encoding in (load_tokenizer("bytes"), gpt2):
        saved = Tokenizer.from_str(encoding.files[TOKENIZER_FILE]).to_str()
        assert read(tmp_path, saved).hash == encoding.hash
    assert load_tokenizer("bytes").hash[:16] == "25685bad8a6c4c39"
    assert gpt2.hash[:16] == "27cd5e33928c1585"


def test_a_pointer_of_git_lfs_is_no_damaged_tokenizer(tmp_path: Path) -> None:
    with raises_line(DataError, f"{TOKENIZER_FILE} is a Git LFS pointer; run git lfs pull"):
        read(tmp_path, "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("name", "a\nb", "100 printable characters"),
        ("name", "", "100 printable characters"),
        ("name", 5, "100 printable characters"),
        ("pattern", "", "matches empty text"),
        ("pattern", "x*", "matches empty text"),
        ("pattern", "(", "position"),
        ("pattern", r" ?\p{L}+|\p{N}+", "drops text such as"),
        ("special_tokens", {}, f"no {EOT}"),
        ("special_tokens", {EOT: 255}, "must be distinct numbers"),
        ("special_tokens", {EOT: 10**9}, "must be distinct numbers"),
        ("special_tokens", {EOT: "256"}, "must be distinct numbers"),
        ("ranks", [], "256 bytes"),
        ("ranks", [["AA==", 0], ["AA==", 1]], "twice"),
    ],
)
def test_a_tokenizer_whose_parts_do_not_fit_is_refused(
    tmp_path: Path, key: str, value: object, words: str
) -> None:
    content = of_first_format(load_tokenizer("bytes")) | {key: value}
    with raises_line(DataError, TOKENIZER_FILE, words):
        read(tmp_path, json.dumps(content))
    if key in ("name", "pattern"):
        content = json.loads(load_tokenizer("bytes").files[TOKENIZER_FILE])
        content["model"]["tiktoken"][key] = value
        with raises_line(DataError, TOKENIZER_FILE, words):
            read(tmp_path, json.dumps(content))


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"model": 3}', '{"model": {"type": "BPE"}}', '{"ranks": 3}', "[" * 20_000],
)
def test_a_damaged_tokenizer_is_refused(text: str, tmp_path: Path) -> None:
    with raises_line(DataError, TOKENIZER_FILE, "is damaged", "repeat the command that prepared"):
        read(tmp_path, text)


def test_merges_of_very_long_tokens_are_refused() -> None:
    with raises_line(DataError, "squared lengths of tokens sum to", "above"):
        merges_of({b"a" * length: length for length in range(1, 800)})
