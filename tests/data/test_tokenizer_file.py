"""Files of tokenizers: Hugging Face loads them with the same ids, and others are read."""

from __future__ import annotations

import base64
import json
import random
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from raytrain_gpt.data.tokenizer import EOT, load_tokenizer, vocab_hash
from raytrain_gpt.data.tokenizer_file import (
    GPT2_PATTERN,
    TOKENIZER_FILE,
    merges_of,
    read_tokenizer_file,
    tokenizer_json,
)
from raytrain_gpt.errors import DataError
from raytrain_gpt.format import Log
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
NASTY = [
    "don’t x’S 'ſt", "e\u0301 a\u200db ﬆ ﬀ SS ẞ İ K", "१२३ ½Ⅷ 12345678", "aaaaaaa aab abab b",
    "foo_bar.baz(1,2)[3]{4}", "हिन्दी ไทย 日本語", "👩‍👩‍👧 🏳️", "a&b&&c~~d--e^f|g", "\x1c\u180e\u2028",
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
def made(trained: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> tiktoken.Encoding:
    """Return an encoding with the ids of `trained`, a different pattern, a gap, and an unmergeable token."""
    found = read(tmp_path_factory.mktemp("trained"), trained.to_str())
    ranks = {**found._mergeable_ranks, b"quixotic": 600}
    assert max(found._mergeable_ranks.values()) < 600
    special = {EOT: 0, "<|pad|>": 700}
    return tiktoken.Encoding(
        "made", pat_str=POSSESSIVE, mergeable_ranks=ranks, special_tokens=special
    )


@pytest.fixture(
    scope="module", params=["bytes", pytest.param("gpt2", marks=pytest.mark.slow), "made"]
)
def encoding(request: pytest.FixtureRequest) -> tiktoken.Encoding:
    if request.param == "bytes":
        return load_tokenizer("bytes")
    found: tiktoken.Encoding = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def pair(encoding: tiktoken.Encoding) -> tuple[tiktoken.Encoding, Tokenizer]:
    """Return an encoding, and the tokenizer that `tokenizers` loads from its file."""
    return encoding, Tokenizer.from_str(tokenizer_json(encoding))


def check_same(encoding: tiktoken.Encoding, tokenizer: Tokenizer, texts: Iterable[str]) -> None:
    for text in texts:
        ids = encoding.encode_ordinary(text)
        assert tokenizer.encode(text).ids == ids, repr(text)
        assert tokenizer.decode(ids) == encoding.decode(ids)


def test_ids_are_those_of_tiktoken(pair: tuple[tiktoken.Encoding, Tokenizer]) -> None:
    texts = [text for name, text in TEXTS.items() if name != "eot as text"]
    check_same(
        *pair, [*texts, *WHITESPACE, *HOSTILE, "quixotic", " quixotic", made_text(20_000, 3)]
    )


@settings(max_examples=40)
@given(text=MADE)
def test_ids_of_any_text_are_those_of_tiktoken(
    pair: tuple[tiktoken.Encoding, Tokenizer], text: str
) -> None:
    check_same(*pair, [text])


def test_a_special_token_has_its_id(pair: tuple[tiktoken.Encoding, Tokenizer]) -> None:
    encoding, tokenizer = pair
    for text, token_id in encoding._special_tokens.items():
        assert tokenizer.token_to_id(text) == token_id
    assert tokenizer.encode(f"a{EOT}b").ids == encoding.encode(f"a{EOT}b", allowed_special="all")


def read(directory: Path, text: str, log: Log = print) -> tiktoken.Encoding:
    """Read a file with this text."""
    (directory / TOKENIZER_FILE).write_text(text, "utf-8")
    return read_tokenizer_file(Location.of(directory / TOKENIZER_FILE), log)


def of_first_format(encoding: tiktoken.Encoding) -> dict[str, Any]:
    """Return the content of the file that earlier versions wrote."""
    ranks = encoding._mergeable_ranks.items()
    return {
        "name": encoding.name,
        "pattern": encoding._pat_str,
        "special_tokens": encoding._special_tokens,
        "ranks": [[base64.b64encode(token).decode(), rank] for token, rank in ranks],
    }


def test_what_was_written_is_read_as_the_same_tokenizer(
    encoding: tiktoken.Encoding, tmp_path: Path
) -> None:
    for text in (tokenizer_json(encoding), json.dumps(of_first_format(encoding))):
        again = read(tmp_path, text)
        assert vocab_hash(again) == vocab_hash(encoding)
    assert encoding.name == "gpt2" or tokenizer_json(again) == tokenizer_json(encoding)


@pytest.mark.slow
def test_built_in_tokenizers_keep_their_hashes_and_are_recognized(
    gpt2: tiktoken.Encoding, tmp_path: Path
) -> None:
    """Data that was prepared with one, also by an earlier version, fits an imported model."""
    for encoding in (load_tokenizer("bytes"), gpt2):
        saved = Tokenizer.from_str(tokenizer_json(encoding)).to_str()
        assert vocab_hash(read(tmp_path, saved)) == vocab_hash(encoding)
    assert vocab_hash(load_tokenizer("bytes"))[:16] == "25685bad8a6c4c39"
    assert vocab_hash(gpt2)[:16] == "27cd5e33928c1585"


@pytest.mark.parametrize("form", ["new", "old"])
def test_a_tokenizer_from_elsewhere_has_the_same_ids(
    trained: Tokenizer, form: str, tmp_path: Path
) -> None:
    content = json.loads(trained.to_str())
    if form == "old":  # like the file of the released GPT-2
        for part, key in (("model", "type"), ("pre_tokenizer", "use_regex")):
            del content[part][key]
        for key in ("byte_fallback", "ignore_merges"):
            content["model"].pop(key, None)
        content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    found = read(tmp_path, json.dumps(content))
    assert found.eot_token == trained.token_to_id(EOT) == 0
    assert (found.n_vocab, found._pat_str) == (trained.get_vocab_size(), GPT2_PATTERN)
    check_same(found, trained, [*WHITESPACE, *HOSTILE, made_text(20_000, 5)])


def split(pattern: str) -> dict[str, Any]:
    """Return a pre_tokenizer with a custom pattern."""
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return {"type": "Sequence", "pretokenizers": [cut, level]}


QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = (
    CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CL100K_EXPORTED = POSSESSIVE.replace("{1,3}+", "{1,3}").replace("$", r"\z")
DOLLARS = r" ?\p{L}+|[$!]+|\$|\p{N}{1,3}(?=(?:\d{3})*(?!\d))|\s+|."


@pytest.fixture(scope="module")
def unsplit() -> dict[str, Any]:
    """Return the file of a BPE trained without a pattern, so that ids show where a pattern splits."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        min_frequency=1,
        special_tokens=[EOT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*NASTY, *WHITESPACE, *HOSTILE], trainer)
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    return content


@pytest.mark.parametrize("pattern", [LLAMA3, O200K, QWEN_PATTERN, CL100K_EXPORTED, DOLLARS])
def test_a_pattern_of_its_own_is_kept_and_exported(
    pattern: str, unsplit: dict[str, Any], tmp_path: Path
) -> None:
    text = json.dumps(unsplit | {"pre_tokenizer": split(pattern)})
    found = read(tmp_path, text)
    for theirs in (text, tokenizer_json(found)):
        check_same(found, Tokenizer.from_str(theirs), [*NASTY, *WHITESPACE, *HOSTILE])


SAME_PARTS = [
    r"\p{L}", r"\p{N}", r"\P{L}", r"\p{Lu}", r"\p{M}", r"\p{Han}", r"\s", r"\S", r"\d", r"\D", r"\n",
    ".", "a", "b", " ", "'", "&", "日", r"\-", r"\$", r"\^", "[a-z]", "[^a-z]", r"[^\s\p{L}\p{N}]",
    r"[^\S\n]", "[ab&^]", r"[\-.]", "[一-龥]", "(?:ab|a)", "(a|ab)", r"(?!\S)", r"(?=\d)",
    "(?i:'s|'ll)", "(?i:[sdmt]|ve)", "(?i:k)", r"\z",
]  # fmt: skip
ODD_PARTS = [
    r"\w", r"\W", r"\b", r"a\Kb", r"[\w&&a]", "[a~~b]", "[[:alpha:]]", r"\pL", r"\>", "b{2}?", "b??",
    r"\d{1,3}+", r"\p{L}{2}{3}", "^a", "a$", r"(?i:\p{Ll})", "(?i:ß)", "(?i:st)+", "(?m).", "(?~ab)",
]  # fmt: skip


def test_patterns_that_are_accepted_give_the_ids_of_tokenizers(
    unsplit: dict[str, Any], tmp_path: Path
) -> None:
    draw, num_same = random.Random(5), 0
    for case in range(60):
        parts = [draw.choice(SAME_PARTS) for _ in range(draw.choice((1, 2, 3, 4)))]
        is_odd = case % 4 == 0
        if is_odd:
            parts[draw.randrange(len(parts))] = ODD_PARTS[case // 4 % len(ODD_PARTS)]
        pattern = ""
        for part in parts:
            # Alternatives that may be empty are refused, so most of them end in a part that is not.
            after = draw.choice(("", "+|", "{2}|", "{1,3}|", "++|", "?", "*", "{2,}", "?+", "*+"))
            plain = part in ODD_PARTS or part.startswith(("(?!", "(?=", r"\z", "(?i"))
            pattern += part + (after.lstrip("?*+{}123,") if plain else after)
        pattern += r"\n|[^a]|a"
        text = json.dumps(unsplit | {"pre_tokenizer": split(pattern)})
        found, refusal = None, ""
        try:
            found = read(tmp_path, text)
        except DataError as error:
            refusal = str(error)
        assert found is None or not is_odd, pattern
        if found is None:
            assert is_odd or re.search("matches empty|drops text", refusal), (pattern, refusal)
            continue
        drawn = "".join(draw.choices([*"ab 'S'sſ\n\r\t1$-&.日é😀²Ⅷ\u3000\u0301ß"], k=30))
        theirs = Tokenizer.from_str(text)
        for one in [drawn, *NASTY, *WHITESPACE]:
            assert found.encode_ordinary(one) == theirs.encode(one).ids, (pattern, one)
        num_same += 1
    assert num_same > 30


def test_a_tokenizer_like_qwens_is_carried(trained: Tokenizer, tmp_path: Path) -> None:
    """It has a custom pattern, NFC normalization, non-special added tokens, and fewer ids than rows."""
    tokenizer = Tokenizer.from_str(trained.to_str())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<think>", "</think>", "<|fim_pad|>"])
    lines: list[str] = []
    found = read(tmp_path, tokenizer.to_str(), lines.append)
    assert [line.split(": ")[1].split(";")[0] for line in lines] == [
        "dropping its NFC normalization"
    ]
    texts = [*WHITESPACE, "can't CAN'T 12345", "naïve 日本", made_text(20_000, 5)]
    check_same(found, tokenizer, texts)
    assert found._special_tokens["</think>"] == tokenizer.token_to_id("</think>")


SPACES = {"content": "   ", "id": 900, "special": False, "lstrip": False, "rstrip": False}
SPACES |= {"single_word": False, "normalized": False}
DIGITS = {"type": "Digits", "individual_digits": True}
UNIGRAM = {"vocab": [["a", 0.0]], "unk_id": 0}


def digits_before(content: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": [DIGITS, content["pre_tokenizer"]]}


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(model={"type": "Unigram", **UNIGRAM}), ["type Unigram"]),
        (lambda c: c.update(model=UNIGRAM), ["type other than BPE"]),
        (lambda c: c.update(normalizer={"type": "NFD"}), ["normalizer", "NFD"]),
        (lambda c: c["model"].update(byte_fallback=True), ["byte_fallback"]),
        (
            lambda c: c["model"]["vocab"].update(A=c["model"]["vocab"]["B"]),
            ["ids must be distinct"],
        ),
        (lambda c: c["model"].update(end_of_word_suffix="</w>"), ["end_of_word_suffix"]),
        (lambda c: c["model"]["vocab"].update({"統一": 900}), ["not written as bytes"]),
        (lambda c: c["model"]["vocab"].update(quixotic=900), ["no merge makes", "quixotic"]),
        (lambda c: c["model"]["merges"].reverse(), ["not in the order of the ids"]),
        (lambda c: c["added_tokens"].append(SPACES), ["'   ' is not a special one"]),
        (lambda c: c["added_tokens"][0].update(content="</s>"), [f"no {EOT}"]),
        (lambda c: c["pre_tokenizer"].update(add_prefix_space=True), ["add_prefix_space"]),
        (lambda c: c["pre_tokenizer"].update(use_regex=False), ["no pattern"]),
        (lambda c: c.update(pre_tokenizer=split("a|^a|.")), ["may read '^a|.' in patterns diff"]),
        (lambda c: c.update(pre_tokenizer=split(r" ?\p{L}+|\p{N}+")), ["drops text such as"]),
        (lambda c: c.update(pre_tokenizer={"type": "Whitespace"}), ["pre_tokenizer is Whitespace"]),
        (lambda c: c.update(pre_tokenizer=None), ["pre_tokenizer is none"]),
        (lambda c: c.update(pre_tokenizer=DIGITS), ["pre_tokenizer is Digits, not"]),
        (
            lambda c: c.update(pre_tokenizer=digits_before(c)),
            ["pre_tokenizer is Digits, ByteLevel"],
        ),
        (lambda c: c["model"]["vocab"].pop("ÿ"), ["no token for one of the 256 bytes"]),
        (lambda c: c["added_tokens"].append(SPACES | {"content": "th", "special": True}), ["'th'"]),
        (lambda c: c.pop("added_tokens"), [f"no {EOT}"]),
    ],
)
def test_another_kind_of_tokenizer_is_refused(
    change: Change, words: list[str], trained: Tokenizer, tmp_path: Path
) -> None:
    content = json.loads(trained.to_str())
    change(content)
    Tokenizer.from_str(json.dumps(content))  # it is no damage
    with raises_line(DataError, f"{TOKENIZER_FILE} is not supported", "set --tokenizer", *words):
        read(tmp_path, json.dumps(content))


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
        content = json.loads(tokenizer_json(load_tokenizer("bytes")))
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
