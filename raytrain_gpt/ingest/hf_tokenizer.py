"""Convert between tiktoken and Hugging Face's `tokenizer.json` with the same ids.

tiktoken merges the two neighbors whose joint token has the lowest rank; `tokenizers` merges the first pair of
a list. In every trained vocabulary, merging a token's bytes ends with that token, so the list of these last
merges, ordered by rank, gives the same tokenizer.

A regular expression first splits the text into words, in two dialects: tiktoken uses fancy-regex,
`tokenizers` uses Oniguruma. GPT-2's pattern is built into `tokenizers` (`ByteLevel`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping
from typing import Any

import tiktoken
from tiktoken_ext.openai_public import r50k_pat_str  # type: ignore[import-untyped]

from raytrain_gpt.data.tokenizer import (
    EOT,
    TOKENIZER_FILE,
    load_tokenizer,
    make_encoding,
    read_tokenizer_file,
    tokenizer_names,
)
from raytrain_gpt.errors import DataError, damage_as, reason
from raytrain_gpt.format import Log
from raytrain_gpt.parsing import parse_json
from raytrain_gpt.storage.location import Location

HF_TOKENIZER_FILE = "tokenizer.json"
HF_TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_VOCABULARY_FILE, _MERGES_FILE = "vocab.json", "merges.txt"
"""The format before `tokenizer.json`."""

GPT2_PATTERN: str = r50k_pat_str
_GPT2_RANKS_SHA256 = "b580654d2e5d585af6dcee97b9cdd3a14a00503812dd6b9d4ea23a20da8bf49f"
"""Hash of GPT-2's tokens in order of rank: one line of hex per token."""
_IMPORTED = "imported"
"""Name of an unrecognized tokenizer."""
_OWN_KEY = "tiktoken"
"""Entry of tokenizer_config.json for the name and pattern, which `tokenizers` drops."""

_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}
_NFC = {"type": "NFC"}
_TAG = re.compile(r"</?[\w|]+>")
_POSSESSIVE = re.compile(r"(\{\d+(?:,\d*)?\})\+")
_ESCAPE = r"\\(?:[pP]\{(?:[CLMNPSZ][a-z]?|Han)\}|[sSdDrnt]|[!-/:;=?@\[-_{-~])"
_CLASS = rf"\[\^?+(?:{_ESCAPE}|&(?!&)|~(?!~)|[^\\\[\]&~-](?:-[^\\\[\]&~-])?+)++\]"
_SAME_IN_BOTH = re.compile(
    rf"(?>(?:{_ESCAPE}|{_CLASS}|[^\\\[\](){{}}|?*+^$]|\))(?:[?*+]\+?+|\{{\d+(?:,\d*)?\}})?+"
    # Oniguruma also matches one character for two, such as ﬁ for fi.
    r"|\(\?i:(?![^)]*(?:f[fil]|s[st]))(?:[a-z'’|]|\[[a-z]+\])++\)\??+|\((?:\?[:=!])?+|\||\\z)*+"
)
"""Syntax that both dialects read in the same way; tests compare them."""
_DOLLAR = re.compile(rf"({_ESCAPE}|{_CLASS})|\$")

_MAX_SQUARED_BYTES = 2**27
"""Limit of the squared lengths of all tokens, 50 times those of GPT-2; their merges take 3 s."""
_TokenRanks = Mapping[bytes, int]


_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_CHARACTER = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(0x100 + i) for i, byte in enumerate(_OTHERS)
}
"""GPT-2's printable character for each byte: the byte itself, else the next one from U+0100 on."""
_BYTE = {character: byte for byte, character in _CHARACTER.items()}


def printable(token: bytes) -> str:
    return "".join(_CHARACTER[byte] for byte in token)


def _bytes(text: str) -> bytes:
    return bytes(_BYTE[character] for character in text)


def token_ranks(vocabulary: Mapping[str, int]) -> dict[bytes, int]:
    """Convert printable tokens with their ids to bytes, in the order of the ids."""
    return {_bytes(text): i for text, i in sorted(vocabulary.items(), key=lambda item: item[1])}


def merges_of(ranks: _TokenRanks) -> dict[bytes, tuple[bytes, bytes]]:
    """Return token -> the last pair merged when its bytes are merged, in order of rank.

    Single bytes are omitted, and tokens that merging does not produce. Raises DataError if it takes too long.
    """
    if (squares := sum(len(token) ** 2 for token in ranks)) > _MAX_SQUARED_BYTES:
        raise _Unsupported(
            f"squared lengths of tokens sum to {squares}, above {_MAX_SQUARED_BYTES}"
        )
    last_merges, none = {}, max(ranks.values(), default=0) + 1
    for token in sorted(ranks, key=ranks.__getitem__):
        symbols = [token[i : i + 1] for i in range(len(token))]
        pairs = [ranks.get(a + b, none) for a, b in itertools.pairwise(symbols)]
        while len(symbols) > 2 and (lowest := min(pairs)) != none:
            at = pairs.index(lowest)
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
            del pairs[at]
            for i in range(max(0, at - 1), min(at + 1, len(pairs))):
                pairs[i] = ranks.get(symbols[i] + symbols[i + 1], none)
        if len(symbols) == 2 and all(symbol in ranks for symbol in symbols):
            last_merges[token] = (symbols[0], symbols[1])
    return last_merges


def hf_tokenizer_files(encoding: tiktoken.Encoding, seq_len: int) -> dict[str, str]:
    """Return name -> content of the files that `AutoTokenizer` loads as the same tokenizer.

    One difference remains: only `tokenizers` recognizes special tokens in a text.
    """
    ranks: _TokenRanks = encoding._mergeable_ranks
    special: Mapping[str, int] = encoding._special_tokens
    merges = merges_of(ranks)
    vocabulary = {printable(token): rank for token, rank in ranks.items()} | dict(special)
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token_id,
                "content": content,
                **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
                "special": True,
            }
            for content, token_id in sorted(special.items(), key=lambda item: item[1])
        ],
        "normalizer": None,
        "pre_tokenizer": _pre_tokenizer(encoding._pat_str, bool(merges)),
        "post_processor": {**_BYTE_LEVEL, "trim_offsets": False},
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            # Lets `tokenizers` match tokens that no merge produces if they equal a word.
            "ignore_merges": any(len(token) > 1 and token not in merges for token in ranks),
            "vocab": dict(sorted(vocabulary.items(), key=lambda item: item[1])),
            "merges": [f"{printable(left)} {printable(right)}" for left, right in merges.values()],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": EOT,
        "eos_token": EOT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": seq_len,
        _OWN_KEY: {"name": encoding.name, "pattern": encoding._pat_str},
    }
    return {
        HF_TOKENIZER_FILE: json.dumps(tokenizer, ensure_ascii=False, indent=1) + "\n",
        HF_TOKENIZER_CONFIG_FILE: json.dumps(config, ensure_ascii=False, indent=2) + "\n",
    }


def _pre_tokenizer(pattern: str, has_merges: bool) -> dict[str, Any]:
    if pattern == GPT2_PATTERN:
        return {**_BYTE_LEVEL, "use_regex": True}
    if not has_merges:  # word boundaries change nothing
        return _BYTE_LEVEL
    split = {"Regex": _oniguruma(pattern)}
    _check_dialects(split["Regex"])
    return {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": split, "behavior": "Isolated", "invert": False},
            _BYTE_LEVEL,
        ],
    }


def _oniguruma(pattern: str) -> str:
    """Convert a pattern to Oniguruma, where `$` also ends lines and `{1,3}+` is not possessive.

    Possessive repetition, which only saves time in these patterns, is dropped.
    """
    return _POSSESSIVE.sub(r"\1", _DOLLAR.sub(lambda match: match[1] or r"\z", pattern))


def _check_dialects(pattern: str) -> None:
    if odd := _SAME_IN_BOTH.sub("", pattern, count=1):
        raise _Unsupported(
            f"tiktoken and Hugging Face may read {odd[:20]!a} in patterns differently"
        )


def with_last_id(encoding: tiktoken.Encoding, last_id: int) -> tiktoken.Encoding:
    """Add a special token as the last id, for an embedding with more rows; ids between have no text."""
    special = {**encoding._special_tokens, f"<|unused_{last_id}|>": last_id}
    return make_encoding(_IMPORTED, encoding._pat_str, encoding._mergeable_ranks, special)


def open_tokenizer(name: str, log: Log) -> tiktoken.Encoding:
    """Load a tokenizer by name, or from a directory or file in our format or Hugging Face's.

    Raises a DataError like `load_tokenizer`, `read_tokenizer_file` and `read_hf_tokenizer`.
    """
    place = Location.of(name)
    file = place if place.is_file() else place / TOKENIZER_FILE
    if name in tokenizer_names() or not file.is_file():
        return load_tokenizer(name)
    with damage_as(DataError, f"tokenizer {file}"):
        is_own = "ranks" in parse_json(file.read_bytes())
    return read_tokenizer_file(file) if is_own else _read_hf_file(file, log)


def read_hf_tokenizer(directory: Location, log: Log) -> tiktoken.Encoding | None:
    """Convert a Hugging Face directory's tokenizer to tiktoken with the same ids; None without one.

    Warns that NFC normalization is dropped. Raises a DataError if the tokenizer is damaged, or not a
    byte-level BPE like GPT-2's with `<|endoftext|>`.
    """
    file = directory / HF_TOKENIZER_FILE
    if not file.is_file():
        older = [directory / name for name in (_VOCABULARY_FILE, _MERGES_FILE)]
        if not all(part.is_file() for part in older):
            return None
        file = older[0]
    return _read_hf_file(file, log)


def _read_hf_file(file: Location, log: Log) -> tiktoken.Encoding:
    try:
        with damage_as(DataError, f"tokenizer {file}"):
            content = parse_json(file.read_bytes())
            if file.name == _VOCABULARY_FILE:
                content = _content_of(content, (file.parent / _MERGES_FILE).read_text())
            if content.get("normalizer") is not None:
                log(f"{file}: dropping its NFC normalization; normalize text that is not in NFC")
            return _encoding_of(content, _exported_name(file.parent))
    except _Unsupported as error:
        raise DataError(
            f"tokenizer {file} is not supported ({error}); set --tokenizer to one with the same ids"
        ) from None


def _encoding_of(content: dict[str, Any], written: tuple[str, str] | None) -> tiktoken.Encoding:
    """Convert the content of a file; `written` is the name and pattern that our export wrote beside it."""
    special, ranks = _special(content), _ranks(content)
    pattern = _pattern(content["pre_tokenizer"])
    if pattern is None and any(len(token) > 1 for token in ranks):
        raise _Unsupported("its pre_tokenizer has no pattern")
    # The export's name counts only if its pattern still matches the tokenizer.
    if written is None or pattern not in (written[1], _oniguruma(written[1]), None):
        written = _recognized_name(ranks, pattern)
    try:
        return make_encoding(*written, ranks, special)
    except ValueError as error:
        raise _Unsupported(reason(error)) from None


class _Unsupported(DataError):
    """A tokenizer unlike GPT-2's; the message has the reason."""


def _content_of(ids: dict[str, int], merges: str) -> dict[str, Any]:
    """Convert `vocab.json` and `merges.txt` to the form of `tokenizer.json`."""
    lines = [line for line in merges.splitlines() if line and not line.startswith("#version")]
    made = {line.replace(" ", "") for line in lines}
    special = {text: i for text, i in ids.items() if len(text) > 1 and text not in made}
    return {
        "model": {"type": "BPE", "vocab": ids, "merges": lines},
        "added_tokens": [{"content": t, "id": i, "special": True} for t, i in special.items()],
        "pre_tokenizer": {**_BYTE_LEVEL, "use_regex": True},
    }


def _ranks(content: dict[str, Any]) -> dict[bytes, int]:
    """Return token -> id, after checking that merging in the order of the ids is equivalent."""
    model = content["model"]
    # Older files, such as the released GPT-2's, lack the type.
    if model.get("type", "BPE") != "BPE" or content.get("normalizer") not in (None, _NFC):
        raise _Unsupported(f"type {model.get('type')}, normalizer {content.get('normalizer')}")
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "dropout"):
        if model.get(key):
            raise _Unsupported(f"it has {key} {model[key]!r}")
    added = {token["content"] for token in content["added_tokens"]}
    texts = {text: int(i) for text, i in model["vocab"].items() if text not in added}
    if odd := [text for text in texts if not _BYTE.keys() >= set(text) or not text]:
        raise _Unsupported(f"its token {odd[0]!r} is not written as bytes")
    ranks = token_ranks(texts)
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise _Unsupported(f"it has no token for byte {missing[0]}")
    listed = [tuple(m.split(" ") if isinstance(m, str) else m) for m in model["merges"]]
    pairs = [(_bytes(left), _bytes(right)) for left, right in listed]
    order = [ranks[left + right] for left, right in pairs]
    if order != sorted(order):
        raise _Unsupported("its merges are not in the order of the ids")
    derived = merges_of(ranks)
    if not set(derived.values()) <= set(pairs):
        raise _Unsupported("its list of merges is incomplete")
    unmade = [token for token in ranks if len(token) > 1 and token not in derived]
    if unmade and not model.get("ignore_merges"):
        raise _Unsupported(f"no merge makes its token {unmade[0]!r}")
    return ranks


def _special(content: dict[str, Any]) -> dict[str, int]:
    tokens = content["added_tokens"]
    contents = [token["content"] for token in tokens if not token["special"]]
    # Qwen's <think> and the like, which hardly occur in text, are special for us.
    if ordinary := [text for text in contents if not _TAG.fullmatch(text)]:
        raise _Unsupported(f"its added token {ordinary[0]!r} is not a special one")
    special = {str(token["content"]): int(token["id"]) for token in tokens}
    if EOT not in special:
        raise _Unsupported(f"it has no {EOT}")
    return special


def _pattern(pre_tokenizer: dict[str, Any]) -> str | None:
    """Return the pattern for Oniguruma (tiktoken's if it is GPT-2's), or None without one."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    *splits, last = steps
    if last["type"] != "ByteLevel" or last["add_prefix_space"] or len(splits) > 1:
        raise _Unsupported("its pre_tokenizer is not ByteLevel without add_prefix_space")
    if not splits:
        return GPT2_PATTERN if last.get("use_regex", True) else None
    (split,) = splits
    pattern = str(split["pattern"].get("Regex"))
    plain = split["type"] == "Split" and split["behavior"] == "Isolated" and not split["invert"]
    if not plain or last.get("use_regex", True) or "Regex" not in split["pattern"]:
        raise _Unsupported("its pre_tokenizer is not one Split by a pattern, and ByteLevel")
    return pattern


def _exported_name(directory: Location) -> tuple[str, str] | None:
    """Return the name and pattern written by our export."""
    file = directory / HF_TOKENIZER_CONFIG_FILE
    entry = parse_json(file.read_bytes()).get(_OWN_KEY) if file.is_file() else None
    return None if entry is None else (str(entry["name"]), str(entry["pattern"]))


def _recognized_name(ranks: _TokenRanks, pattern: str | None) -> tuple[str, str]:
    """Return name and pattern; the name must be exact, since a dataset's vocab_hash contains it."""
    if pattern is None:
        by_bytes = load_tokenizer("bytes")
        name = by_bytes.name if ranks == by_bytes._mergeable_ranks else _IMPORTED
        return name, by_bytes._pat_str
    lines = "".join(f"{token.hex()}\n" for token in sorted(ranks, key=ranks.__getitem__))
    if pattern == GPT2_PATTERN and hashlib.sha256(lines.encode()).hexdigest() == _GPT2_RANKS_SHA256:
        return "gpt2", pattern
    if pattern != GPT2_PATTERN:
        _check_dialects(pattern)
    return _IMPORTED, pattern
