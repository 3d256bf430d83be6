"""Tokenizers in and out of Hugging Face's `tokenizer.json`, with the same ids.

tiktoken merges the two neighbours whose joint token has the lowest rank; `tokenizers` merges the pair
that stands first in a list. Where every token is what the merging of its own bytes ends with, as in
all vocabularies that were trained, the list of these last merges, by rank, is the same tokenizer.

The text is cut into words by a regular expression first, in two dialects: fancy-regex reads tiktoken's
and Oniguruma reads that of `tokenizers`. GPT-2's own is built into `tokenizers` (`ByteLevel`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tiktoken
from tiktoken_ext.openai_public import r50k_pat_str  # type: ignore[import-untyped]

from raytrain_gpt.data.tokenizer import EOT, load_tokenizer
from raytrain_gpt.errors import DataError

HF_TOKENIZER_FILE = "tokenizer.json"
HF_TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
VOCAB_FILES = ("vocab.json", "merges.txt")
"""What `tokenizer.json` was before there was one."""

GPT2_PATTERN: str = r50k_pat_str
GPT2_RANKS_SHA256 = "b580654d2e5d585af6dcee97b9cdd3a14a00503812dd6b9d4ea23a20da8bf49f"
"""Of GPT-2's tokens, by rank: hex, a line each."""
IMPORTED = "imported"
"""Name of a tokenizer that is none we know."""
_OWN_KEY = "tiktoken"
"""In tokenizer_config.json: the name and pattern, which `tokenizers` has no place for."""

_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}
_POSSESSIVE = re.compile(r"(\{\d+(?:,\d*)?\})\+")
_DIALECTS_DIFFER = re.compile(rf"(?<!\\)[$^](?![^\[]*\])|{_POSSESSIVE.pattern}|\(\?[a-z]*[msx]")

Collectives = Mapping[bytes, int]


def _characters() -> dict[int, str]:
    """GPT-2's printable character for each byte: itself, or the next one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    moved = {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    return {byte: moved.get(byte, chr(byte)) for byte in range(256)}


_CHARACTER = _characters()
_BYTE = {character: byte for byte, character in _CHARACTER.items()}


def _text(token: bytes) -> str:
    return "".join(_CHARACTER[byte] for byte in token)


def _bytes(text: str) -> bytes:
    return bytes(_BYTE[character] for character in text)


def merges_of(ranks: Collectives) -> dict[bytes, tuple[bytes, bytes]]:
    """Token -> the two parts that the merging of its bytes puts together last, by rank.

    Tokens of one byte, and those that the merging of their bytes does not end with, have none.
    """
    found = {}
    for token in sorted(ranks, key=ranks.__getitem__):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pairs = [ranks.get(a + b, -1) for a, b in itertools.pairwise(parts)]
            known = [rank for rank in pairs if rank >= 0]
            if not known:
                break
            at = pairs.index(min(known))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2 and all(part in ranks for part in parts):
            found[token] = (parts[0], parts[1])
    return found


def hf_tokenizer_files(encoding: tiktoken.Encoding, seq_len: int) -> dict[str, str]:
    """What `AutoTokenizer` loads as the same tokenizer.

    A special token in a text is one there, as `tokenizers` has it; tiktoken's `encode_ordinary` takes it
    for text.

    Args:
        encoding: The tokenizer.
        seq_len: The model's context, in tokens.

    Returns:
        File name -> content.
    """
    ranks: Collectives = encoding._mergeable_ranks
    special: Mapping[str, int] = encoding._special_tokens
    merges = merges_of(ranks)
    vocabulary = {_text(token): rank for token, rank in ranks.items()} | dict(special)
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
            # A token that merging does not make is found where it is a whole word.
            "ignore_merges": any(len(token) > 1 and token not in merges for token in ranks),
            "vocab": dict(sorted(vocabulary.items(), key=lambda item: item[1])),
            "merges": [f"{_text(left)} {_text(right)}" for left, right in merges.values()],
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
    if not has_merges:  # where the words end decides nothing
        return _BYTE_LEVEL
    split = {"Regex": _oniguruma(pattern)}
    return {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": split, "behavior": "Isolated", "invert": False},
            _BYTE_LEVEL,
        ],
    }


def _oniguruma(pattern: str) -> str:
    """Oniguruma ends lines at `$` and repeats at `{1,3}+`; giving nothing back is for speed only."""
    return _POSSESSIVE.sub(r"\1", pattern.replace("$", r"\z"))


def read_hf_tokenizer(directory: Path) -> tiktoken.Encoding | None:
    """The tokenizer in a Hugging Face directory as tiktoken's, with the same ids.

    Returns:
        None if there is none in the directory.

    Raises:
        DataError: it is damaged, or no byte-level BPE as GPT-2's with `<|endoftext|>`.
    """
    path = directory / HF_TOKENIZER_FILE
    vocabulary, merges = (directory / name for name in VOCAB_FILES)
    try:
        if path.is_file():
            content = json.loads(path.read_text("utf-8"))
        elif vocabulary.is_file() and merges.is_file():
            path = vocabulary
            content = _content_of(vocabulary.read_text("utf-8"), merges.read_text("utf-8"))
        else:
            return None
        special, ranks = _special(content), _ranks(content)
        ids = [*ranks.values(), *special.values()]
        if len(set(ids)) != len(ids):
            raise _Other("two of its tokens have the same id")
        found = _pattern(content["pre_tokenizer"])
        if found is None and any(len(token) > 1 for token in ranks):
            raise _Other("its pre_tokenizer has no pattern")
        name, pattern = _own_name(directory, found) or _known_name(ranks, found)
        return tiktoken.Encoding(
            name=name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
        )
    except _Other as error:
        raise DataError(
            f"tokenizer {path} is not one that raytrain-gpt can read ({error}); name another one with "
            "the same ids by --tokenizer"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise DataError(f"tokenizer {path} is damaged ({what})") from None


class _Other(Exception):
    """Not a tokenizer as GPT-2's; says why."""


def _content_of(vocabulary: str, merges: str) -> dict[str, Any]:
    """`vocab.json` and `merges.txt` as the content of `tokenizer.json`."""
    ids: dict[str, int] = json.loads(vocabulary)
    lines = [line for line in merges.splitlines() if line and not line.startswith("#version")]
    made = {line.replace(" ", "") for line in lines}
    special = {text: i for text, i in ids.items() if len(text) > 1 and text not in made}
    return {
        "model": {"type": "BPE", "vocab": ids, "merges": lines},
        "added_tokens": [{"content": t, "id": i, "special": True} for t, i in special.items()],
        "pre_tokenizer": {**_BYTE_LEVEL, "use_regex": True},
    }


def _ranks(content: dict[str, Any]) -> dict[bytes, int]:
    """Token -> id, seen to be merged in the order of the ids.

    Raises:
        _Other: merging by ids would be another tokenizer.
    """
    model = content["model"]
    # Files of older versions, as that of the released GPT-2, do not name the type.
    if model.get("type", "BPE") != "BPE" or content.get("normalizer") is not None:
        raise _Other(f"type {model.get('type')}, normalizer {content.get('normalizer')}")
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "dropout"):
        if model.get(key):
            raise _Other(f"it has {key} {model[key]!r}")
    added = {token["content"] for token in content["added_tokens"]}
    texts = {text: int(i) for text, i in model["vocab"].items() if text not in added}
    if odd := [text for text in texts if not _BYTE.keys() >= set(text) or not text]:
        raise _Other(f"its token {odd[0]!r} is not written as bytes")
    ranks = {_bytes(text): i for text, i in texts.items()}
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise _Other(f"it has no token for byte {missing[0]}")
    listed = [tuple(m.split(" ") if isinstance(m, str) else m) for m in model["merges"]]
    pairs = [(_bytes(left), _bytes(right)) for left, right in listed]
    order = [ranks[left + right] for left, right in pairs]
    if order != sorted(order):
        raise _Other("its merges are not in the order of the ids")
    own = merges_of(ranks)
    if not set(own.values()) <= set(pairs):
        raise _Other("its merges are not all that its tokens have")
    if not model.get("ignore_merges") and (unmade := _unmade(ranks, own)):
        raise _Other(f"no merge makes its token {unmade!r}")
    return ranks


def _unmade(ranks: Collectives, merges: Mapping[bytes, Any]) -> bytes | None:
    return next((token for token in ranks if len(token) > 1 and token not in merges), None)


def _special(content: dict[str, Any]) -> dict[str, int]:
    tokens = content["added_tokens"]
    if ordinary := [token["content"] for token in tokens if not token["special"]]:
        raise _Other(f"its added token {ordinary[0]!r} is not a special one")
    special = {str(token["content"]): int(token["id"]) for token in tokens}
    if EOT not in special:
        raise _Other(f"it has no {EOT}")
    return special


def _pattern(pre_tokenizer: dict[str, Any]) -> str | None:
    """The pattern in Oniguruma's dialect, GPT-2's in tiktoken's; None for a tokenizer without one."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    *splits, last = steps
    if last["type"] != "ByteLevel" or last["add_prefix_space"] or len(splits) > 1:
        raise _Other("its pre_tokenizer is not ByteLevel without add_prefix_space")
    if not splits:
        return GPT2_PATTERN if last.get("use_regex", True) else None
    (split,) = splits
    pattern = str(split["pattern"].get("Regex"))
    plain = split["type"] == "Split" and split["behavior"] == "Isolated" and not split["invert"]
    if not plain or last.get("use_regex", True) or "Regex" not in split["pattern"]:
        raise _Other("its pre_tokenizer is not one Split by a pattern, and ByteLevel")
    return pattern


def _own_name(directory: Path, pattern: str | None) -> tuple[str, str] | None:
    """Name and pattern as our own export wrote them, if they are still those of the tokenizer."""
    path = directory / HF_TOKENIZER_CONFIG_FILE
    if not path.is_file():
        return None
    own = json.loads(path.read_text("utf-8")).get(_OWN_KEY)
    if own is None or pattern not in (own["pattern"], _oniguruma(own["pattern"]), None):
        return None
    return str(own["name"]), str(own["pattern"])


def _known_name(ranks: Collectives, pattern: str | None) -> tuple[str, str]:
    """Named so that data prepared with the same vocabulary fits: its hash has the name in it."""
    if pattern is None:
        own = load_tokenizer("bytes")
        return own.name if ranks == own._mergeable_ranks else IMPORTED, own._pat_str
    lines = "".join(f"{token.hex()}\n" for token in sorted(ranks, key=ranks.__getitem__))
    if pattern == GPT2_PATTERN and hashlib.sha256(lines.encode()).hexdigest() == GPT2_RANKS_SHA256:
        return "gpt2", pattern
    if pattern != GPT2_PATTERN and _DIALECTS_DIFFER.search(pattern):
        raise _Other(f"its pattern {pattern!r} means something else to tiktoken")
    return IMPORTED, pattern
