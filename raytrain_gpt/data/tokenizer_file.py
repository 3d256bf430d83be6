"""Tokenizers as Hugging Face's `tokenizer.json`, in datasets, checkpoints and exports: the same ids.

tiktoken merges the two neighbors whose joint token has the lowest rank; `tokenizers` merges the first pair of
a list. In every trained vocabulary, merging a token's bytes ends with that token, so the list of these last
merges, ordered by rank, gives the same tokenizer.

A regular expression first splits the text into words, in two dialects: tiktoken uses fancy-regex,
`tokenizers` uses Oniguruma. GPT-2's pattern is built into `tokenizers` (`ByteLevel`).
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import tiktoken
from tiktoken_ext.openai_public import r50k_pat_str  # type: ignore[import-untyped]
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from raytrain_gpt.data.documents import refuse_lfs_pointer
from raytrain_gpt.data.tokenizer import EOT, load_tokenizer, make_encoding, tokenizer_names
from raytrain_gpt.errors import DataError, damage_as
from raytrain_gpt.format import Log, listed, preview
from raytrain_gpt.parsing import parse_json
from raytrain_gpt.storage.location import Location, LocationLike

TOKENIZER_FILE = "tokenizer.json"
GPT2_PATTERN: str = r50k_pat_str
_GPT2_RANKS_SHA256 = "b580654d2e5d585af6dcee97b9cdd3a14a00503812dd6b9d4ea23a20da8bf49f"
"""Hash of GPT-2's tokens in order of rank: one line of hex per token."""
_OWN_KEY = "tiktoken"
"""Entry of the model for tiktoken's name and pattern, which `tokenizers` ignores."""
IMPORTED = "imported"
"""Name of an unrecognized tokenizer."""

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


class _Unsupported(DataError):
    """A tokenizer unlike GPT-2's; the message has the reason."""


def _printable(token: bytes) -> str:
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


@lru_cache(maxsize=2)
def tokenizer_json(encoding: tiktoken.Encoding) -> str:
    """Return the content of `tokenizer.json`, which Hugging Face loads as the same tokenizer.

    One difference remains: only `tokenizers` recognizes special tokens in a text. Raises a DataError if the
    dialects may read the pattern differently.
    """
    ranks, special = encoding._mergeable_ranks, encoding._special_tokens
    merges = merges_of(ranks)
    model = models.BPE(
        {_printable(token): rank for token, rank in ranks.items()} | special,
        [(_printable(left), _printable(right)) for left, right in merges.values()],
        # Lets `tokenizers` match words that are tokens but that merges do not produce.
        ignore_merges=any(len(token) > 1 and token not in merges for token in ranks),
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(encoding._pat_str, bool(merges))
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in sorted(special, key=special.__getitem__)]
    )
    content = json.loads(tokenizer.to_str())
    content["model"][_OWN_KEY] = {"name": encoding.name, "pattern": encoding._pat_str}
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n"


def _pre_tokenizer(pattern: str, has_merges: bool) -> pre_tokenizers.PreTokenizer:
    if pattern == GPT2_PATTERN:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    unsplit = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if not has_merges:  # word boundaries have no effect
        return unsplit
    theirs = _oniguruma(pattern)
    _check_dialects(theirs)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(theirs), "isolated"), unsplit])


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


def open_tokenizer(name: str, log: Log) -> tiktoken.Encoding:
    """Load a tokenizer by name, or from a `tokenizer.json` or a directory with one.

    Raises a DataError like `load_tokenizer` and `read_tokenizer_file`.
    """
    place = Location.of(name)
    file = place if place.is_file() else place / TOKENIZER_FILE
    if name in tokenizer_names() or not file.is_file():
        return load_tokenizer(name)
    return read_tokenizer_file(file, log)


def read_tokenizer(directory: LocationLike) -> tiktoken.Encoding:
    """Read a dataset's or checkpoint's tokenizer; raises a DataError if it is missing or damaged."""
    return read_tokenizer_file(Location.of(directory) / TOKENIZER_FILE)


def read_tokenizer_file(path: Location, log: Log = lambda line: None) -> tiktoken.Encoding:
    """Read a `tokenizer.json` of ours, of any version, or of a byte-level BPE like GPT-2's.

    Warns that NFC normalization is dropped. Raises a DataError if the file is damaged or of another kind.
    """
    advice = (
        "; use another --tokenizer or checkpoint, or repeat the command that prepared the dataset"
    )
    try:
        with damage_as(DataError, f"tokenizer {path}", advice):
            refuse_lfs_pointer(path)
            content = parse_json(path.read_bytes())
            if "ranks" in content:
                return _encoding_of_ranks(content)
            encoding = _encoding_of(content)
            if content.get("normalizer") is not None:
                log(f"{path}: dropping its NFC normalization; normalize text that is not in NFC")
            return encoding
    except _Unsupported as error:
        raise DataError(
            f"tokenizer {path} is not supported ({error}); set --tokenizer to one with the same ids"
        ) from None


def _encoding_of_ranks(content: dict[str, Any]) -> tiktoken.Encoding:
    """Convert the content of a file of our first format: name, pattern, tokens with their ids."""
    ranks = {base64.b64decode(token): rank for token, rank in content["ranks"]}
    if len(ranks) < len(content["ranks"]):
        raise ValueError("it has a token twice")
    return make_encoding(content["name"], content["pattern"], ranks, content["special_tokens"])


def _encoding_of(content: dict[str, Any]) -> tiktoken.Encoding:
    model, vocabulary = content["model"], content["model"]["vocab"]
    # Older files, such as the released GPT-2's, lack the type.
    if (kind := model.get("type", "BPE" if "merges" in model else "other than BPE")) != "BPE":
        raise _Unsupported(f"its model has type {kind}")
    special = _special(content)
    ranks = _ranks(model, {text: i for text, i in vocabulary.items() if text not in special})
    if (own := model.get(_OWN_KEY)) is not None:  # then the vocabulary decides, not the merges
        return make_encoding(own["name"], own["pattern"], ranks, special)
    if content.get("normalizer") not in (None, _NFC):
        raise _Unsupported(f"it has a normalizer {preview(content['normalizer'], 80)}")
    pattern = _pattern(content.get("pre_tokenizer"))
    _check_merges(model, ranks, special)
    if pattern is None and any(len(token) > 1 for token in ranks):
        raise _Unsupported("its pre_tokenizer has no pattern")
    try:
        return make_encoding(*_recognized_name(ranks, pattern), ranks, special)
    except ValueError as error:  # Hugging Face reads it
        raise _Unsupported(str(error)) from None


def _ranks(model: dict[str, Any], vocabulary: Mapping[str, int]) -> dict[bytes, int]:
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "dropout"):
        if model.get(key):
            raise _Unsupported(f"it has {key} {model[key]!r}")
    if odd := [text for text in vocabulary if not _BYTE.keys() >= set(text) or not text]:
        raise _Unsupported(f"its token {odd[0]!r} is not written as bytes")
    return token_ranks({text: int(i) for text, i in vocabulary.items()})


def _check_merges(model: dict[str, Any], ranks: _TokenRanks, special: Mapping[str, int]) -> None:
    """Check that merging in the order of the ids is equivalent to the merges of a file."""
    merges = [tuple(m.split(" ") if isinstance(m, str) else m) for m in model["merges"]]
    if odd := [a + b for a, b in merges if not special.keys().isdisjoint((a, b, a + b))]:
        raise _Unsupported(f"it merges to {odd[0]!r}, which has a special token")
    pairs = [(_bytes(left), _bytes(right)) for left, right in merges]
    order = [ranks[left + right] for left, right in pairs]
    if order != sorted(order):
        raise _Unsupported("its merges are not in the order of the ids")
    derived = merges_of(ranks)
    if not set(derived.values()) <= set(pairs):
        raise _Unsupported("its list of merges is incomplete")
    unmade = [token for token in ranks if len(token) > 1 and token not in derived]
    if unmade and not model.get("ignore_merges"):
        raise _Unsupported(f"no merge makes its token {preview(unmade[0], 40)}")


def _special(content: dict[str, Any]) -> dict[str, int]:
    tokens = content.get("added_tokens", [])
    contents = [token["content"] for token in tokens if not token["special"]]
    # Qwen's <think> and the like, which hardly occur in text, are special for us.
    if ordinary := [text for text in contents if not _TAG.fullmatch(text)]:
        raise _Unsupported(f"its added token {ordinary[0]!r} is not a special one")
    special = {str(token["content"]): int(token["id"]) for token in tokens}
    if EOT not in special:
        raise _Unsupported(f"it has no {EOT}")
    return special


def _pattern(pre_tokenizer: dict[str, Any] | None) -> str | None:
    """Return the pattern for Oniguruma (tiktoken's if it is GPT-2's), or None without one."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer]) if pre_tokenizer else []
    match steps:
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]:
            return None
        case [{"type": "ByteLevel", "add_prefix_space": False}]:
            return GPT2_PATTERN
        case [
            {"type": "Split", "pattern": {"Regex": str(pattern)}} as split,
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ] if split["behavior"] == "Isolated" and not split["invert"]:
            _check_dialects(pattern)
            return pattern
    raise _Unsupported(
        f"its pre_tokenizer is {listed(step['type'] for step in steps)}, not ByteLevel without "
        "add_prefix_space, or that after a Split by a pattern"
    )


def _recognized_name(ranks: _TokenRanks, pattern: str | None) -> tuple[str, str]:
    """Return name and pattern; the name must be exact, since a dataset's vocab_hash contains it."""
    if pattern is None:
        by_bytes = load_tokenizer("bytes")
        name = by_bytes.name if ranks == by_bytes._mergeable_ranks else IMPORTED
        return name, by_bytes._pat_str
    lines = "".join(f"{token.hex()}\n" for token in sorted(ranks, key=ranks.__getitem__))
    is_gpt2 = hashlib.sha256(lines.encode()).hexdigest() == _GPT2_RANKS_SHA256
    return "gpt2" if is_gpt2 and pattern == GPT2_PATTERN else IMPORTED, pattern
