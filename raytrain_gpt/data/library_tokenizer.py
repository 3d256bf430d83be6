"""Tokenizers of other programs: a `tokenizer.json` whose ids are those of the library `tokenizers`.

The file is kept byte for byte, and a document is what the library makes of its text, with the ids that it
adds before it, such as a begin token, and the eot. Where the way to split text into words is a known one, and
tokens merge in the order of their ids, tiktoken computes the same ids several times faster.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import tiktoken
import tokenizers
from numpy.typing import NDArray

from raytrain_gpt.data.tokenizer import (
    BYTES,
    EOT,
    GPT2_PATTERN,
    IMPORTED,
    MAX_VOCAB_SIZE,
    PROBE,
    TOKENIZER_FILE,
    Tiktoken,
    Tokenizer,
    token_ranks,
    valid_text,
)  # fmt: skip
from raytrain_gpt.errors import DataError
from raytrain_gpt.format import preview
from raytrain_gpt.parsing import parse_json
from raytrain_gpt.storage.location import cache_directory

CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_input_names": ["input_ids", "attention_mask"],
}
"""Entries of every tokenizer_config.json; transformers 4 adds token types to the inputs by default."""
_OWN_ENTRY = "raytrain_gpt"
"""Entry of our tokenizer_config.json with `vocab_size`, the rows of the model."""
_KEPT_SETTINGS = (
    "bos_token", "unk_token", "pad_token", "additional_special_tokens", "extra_special_tokens",
    "chat_template", "model_max_length", "clean_up_tokenization_spaces", "padding_side",
)  # fmt: skip
"""Entries of a tokenizer_config.json that leave the ids of tokenizer.json as they are."""
_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>")
"""Tokens that end a document in models whose files do not say which."""

_PIECE = 2**18
"""Characters that the library encodes at once; it takes 140 bytes of memory for each byte of them."""
_NEAR = 500
"""Characters on each side of a cut in which it must not change an id."""
_MOST_TRIED = 50
_MOST_LISTED = 30
_PROBE_CPU_S = 10
_PROBE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[2]),) * 2)
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_str(sys.stdin.buffer.read().decode())
tokenizer.no_truncation()
tokenizer.no_padding()
for i in range(128):
    tokenizer.encode_batch_fast([5000 * chr(i) + sys.argv[1]])
"""
_BLANK = re.compile(r"(?<=\S)\s(?=\S)")
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")

_NFC = {"type": "NFC"}
_LLAMA2_NORMALIZER = (
    {"type": "Prepend", "prepend": "▁"},
    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
)
UNSPLIT = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
_GPT2_STEP = {**UNSPLIT, "use_regex": True}


def _by_regex(pattern: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    return [{**split, "invert": False}, UNSPLIT]


class KnownSplit(NamedTuple):
    """A way to split text into words: steps in `tokenizers`, a pattern of tiktoken, llama.cpp's name."""

    llama_cpp: str
    steps: list[dict[str, Any]]
    pattern: str


_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
GPT2 = KnownSplit("gpt-2", [_GPT2_STEP], GPT2_PATTERN)
KNOWN_SPLITS = (
    GPT2,
    KnownSplit(  # SmolLM2: digits are words
        "smollm",
        [{"type": "Digits", "individual_digits": True}, _GPT2_STEP],
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++|\p{N}| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?![^\s\p{N}])|\s",
    ),
    KnownSplit("llama-bpe", _by_regex(_LLAMA3), _LLAMA3),
    KnownSplit("qwen2", _by_regex(_QWEN2), _QWEN2),
)


def numbers_of_parts(library: tokenizers.Tokenizer, words: Iterable[str]) -> set[int]:
    """Return the numbers of tokens into which the merges of a BPE alone turn words of its vocabulary."""
    model = library.model
    ignores, model.ignore_merges = model.ignore_merges, False
    parts = {len(model.tokenize(word)) for word in words}
    model.ignore_merges = ignores
    return parts


def is_qwens(tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer normalizes and splits text as Qwen's do."""
    content = parse_json(tokenizer.files[TOKENIZER_FILE])
    is_nfc = steps_of(content.get("normalizer"), "normalizers") == [_NFC]
    return is_nfc and split_of(content) == KNOWN_SPLITS[-1]


class Unsupported(DataError):
    """A tokenizer that cannot be used; the message has the reason."""


def steps_of(part: dict[str, Any] | None, of: str = "pretokenizers") -> list[dict[str, Any]]:
    """Return the steps of a pre-tokenizer or normalizer, with defaults and without what changes no id."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [step for each in part[of] for step in steps_of(each, of)]
    step = {key: value for key, value in part.items() if key != "trim_offsets"}
    return [{"use_regex": True, **step} if step["type"] == "ByteLevel" else step]


def split_of(content: dict[str, Any]) -> KnownSplit | None:
    """Return the known way in which the content of a tokenizer.json splits words, or None."""
    steps = steps_of(content.get("pre_tokenizer"))
    return next((known for known in KNOWN_SPLITS if known.steps == steps), None)


def merged_ids(model: dict[str, Any]) -> list[int]:
    """Return the ids that the merges of a BPE make, in their order."""
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    return [int(model["vocab"]["".join(pair)]) for pair in pairs]


class FileTokenizer(Tokenizer):
    """Tokenizer of a `tokenizer.json` from elsewhere.

    Args:
        files: Name -> content of tokenizer.json, and of its tokenizer_config.json and chat template, if any.
        eot: Token that ends documents, by default the `eos_token` of the configuration or a usual one.
        rows: Number of ids, by default as many as tokens.

    Raises:
        Unsupported: the tokenizer loses text, or is too slow or too large.
        DataError: no token is known to end documents.
        ValueError, TypeError, LookupError, AttributeError: a file is damaged.
    """

    name = IMPORTED

    def __init__(
        self, files: Mapping[str, str], eot: str | None = None, rows: int | None = None
    ) -> None:
        text, config = files[TOKENIZER_FILE], parse_json(files.get(CONFIG_FILE, "{}"))
        self._content = content = parse_json(text)
        self._has_nfc, self._is_byte_level = _check(content)
        self._library = _load(text)
        added = self._library.get_added_tokens_decoder()
        self.special = {token.content: i for i, token in added.items() if token.special}
        self._ordinary = [token.content for token in added.values() if not token.special]
        for token in content.get("added_tokens", []):
            if (at := self._library.token_to_id(token["content"])) != token["id"]:
                raise Unsupported(f"its added token {token['content']!r} has id {at} in tokenizers")
        if not self._is_byte_level and any(
            not token.special and (token.lstrip or token.rstrip or token.normalized)
            for token in added.values()
        ):
            raise Unsupported("an added token takes the blanks beside it")
        vocabulary = self._library.get_vocab()
        self._tokens = {
            i: text.encode() if i in added else self._bytes_of(text)
            for text, i in vocabulary.items()
        }
        most = max(self._tokens) + 1
        self.n_vocab = rows or config.get(_OWN_ENTRY, {}).get("vocab_size", most)
        if len(self._tokens) < len(vocabulary) or not most <= self.n_vocab <= MAX_VOCAB_SIZE:
            raise Unsupported(f"its ids must be distinct numbers below {MAX_VOCAB_SIZE}")
        if not {bytes([i]) for i in range(256)} <= {*self._tokens.values()}:
            raise Unsupported("it has no token for one of the 256 bytes, so it loses text")
        eot = self._eot(eot or config.get("eos_token"))
        self.eot_token = self.special[eot]
        ours: dict[str, Any] = {**CONFIG, "eos_token": eot}
        if self.n_vocab > most:
            ours[_OWN_ENTRY] = {"vocab_size": self.n_vocab}
        ours |= {key: config[key] for key in _KEPT_SETTINGS if key in config}
        ours_text = valid_text(json.dumps(ours, indent=2, ensure_ascii=False))
        self.files = {**files, CONFIG_FILE: f"{ours_text}\n"}
        of_ids = f"{text}\0{self.eot_token}\0{self.n_vocab}"
        self.hash = hashlib.sha256(of_ids.encode()).hexdigest()
        self.lengths = np.zeros(self.n_vocab, np.int64)
        for i in self._tokens.keys() - self.special.values():
            self.lengths[i] = len(self._tokens[i])
        plain, whole = self._raw_ids("a"), self._library.encode("a").ids
        at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), len(whole))
        after = whole[at + len(plain) :]
        after += [] if after[-1:] == [self.eot_token] else [self.eot_token]
        self.keeps_bytes = self._is_byte_level and not self._has_nfc
        self.before, self.after = np.array(whole[:at], np.uint32), np.array(after, np.uint32)
        found = self.decode(self._raw_ids(PROBE)).removeprefix("" if self._is_byte_level else " ")
        expected = self.normalized(PROBE)
        if at == len(whole) or found != expected:
            lost = next((a for a, b in zip(expected, found, strict=False) if a != b), "its end")
            raise Unsupported(f"it changes text, such as {lost!a}")

    def _eot(self, stated: Any) -> str:
        stated = stated["content"] if isinstance(stated, dict) else stated
        for token in _ENDS if stated is None else [stated]:
            if token in self.special:
                return token
        raise DataError(
            f"the tokenizer has no {stated or 'known token'} to end documents; set --eot to a special "
            f"token: {[*self.special][:_MOST_LISTED]}"
        )

    def _bytes_of(self, token: str) -> bytes:
        if self._is_byte_level:
            is_bytes = BYTES.keys() >= {*token}
            return bytes(BYTES[one] for one in token) if is_bytes else token.encode()
        if self._content["model"].get("byte_fallback") and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        return token.replace("▁", " ").encode()

    def encode(self, text: str) -> NDArray[np.uint32]:
        text = valid_text(text)
        if (tokens := self._by_tiktoken(text)) is not None:
            return tokens
        return np.concatenate([self._ids(piece) for piece in self._pieces(text)])

    def encode_after(self, text: str, more: str) -> NDArray[np.uint32]:
        return self.encode(text + more)[len(self.encode(text)) :]

    def token_bytes(self, token: int) -> bytes:
        return self._tokens.get(token, b"")

    def with_rows(self, rows: int) -> FileTokenizer:
        return FileTokenizer(self.files, rows=rows)

    def __reduce__(self) -> tuple[Any, ...]:
        # The library's own pickles forget that special tokens in a text are text.
        return FileTokenizer, (self.files,)

    def _raw_ids(self, text: str) -> list[int]:
        (encoded,) = self._library.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoded.ids
        return ids

    def _ids(self, text: str) -> NDArray[np.uint32]:
        """Encode text without cutting it."""
        kept = self.normalized(text) if self._is_byte_level else None
        return self.checked(self._raw_ids, text, kept)

    def normalized(self, text: str) -> str:
        normalized: str = self._library.normalizer.normalize_str(text) if self._has_nfc else text
        return normalized

    def _pieces(self, text: str) -> Iterator[str]:
        """Cut a long text at blanks where the ids are those of the uncut text, to bound the memory."""
        start = 0
        while len(text) - start > _PIECE:
            blanks = [m.start() for m in _BLANK.finditer(text, start + _NEAR, start + _PIECE)]
            blanks.sort(key=lambda at: text[at] == " ")  # stable; some can be cut only there
            for at in blanks[: -_MOST_TRIED - 1 : -1]:
                left, right = text[at - _NEAR : at], text[at : at + _NEAR]
                both, before = self._ids(left + right).tolist(), self._ids(left).tolist()
                # Some tokenizers add the blank of a first word themselves.
                after = [before + self._ids(right[skip:]).tolist() for skip in (0, 1)]
                if both in after:
                    break
            else:
                raise DataError(
                    f"tokenizer {self.name} needs a blank to cut in {_PIECE} characters of "
                    f"{preview(text[start:], 40)}; split the document"
                )
            yield text[start:at]
            start = at + after.index(both)
        yield text[start:]

    def _by_tiktoken(self, text: str) -> NDArray[np.uint32] | None:
        """Encode text with tiktoken, or return None if the ids may differ or it fails."""
        is_same = not self._has_nfc or unicodedata.is_normalized("NFC", text)
        if self._engine is None or not is_same or any(token in text for token in self._ordinary):
            return None
        try:
            return self._engine.encode(text)
        except DataError:  # its regular expressions have other limits
            return None

    @cached_property
    def _engine(self) -> Tiktoken | None:
        """The same tokenizer in tiktoken, or None if it is none.

        With merges in the order of their ids, both merge the same pairs if merging the bytes of each token
        makes it. By induction over lengths: neighbors that only tiktoken may merge would be the last two
        parts of a token.
        """
        model, known = self._content["model"], split_of(self._content)
        odd = ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
        if known is None or any(map(model.get, odd)):
            return None
        added = {token["content"] for token in self._content.get("added_tokens", [])}
        words = {text: int(i) for text, i in model["vocab"].items() if text not in added}
        merged = merged_ids(model)
        is_same = BYTES.keys() >= {*"".join(words)} and {*merged} <= {*words.values()}
        if not is_same or merged != sorted(merged) or BYTES.keys() - words.keys():
            return None
        parts = numbers_of_parts(self._library, words)
        if 2 in parts or (parts != {1} and not self._library.model.ignore_merges):
            return None
        # Without any special token, tiktoken looks for one at every character, and takes twice the time.
        special, ranks = {EOT: self.eot_token}, token_ranks(words)
        return Tiktoken(
            tiktoken.Encoding(
                IMPORTED, pat_str=known.pattern, mergeable_ranks=ranks, special_tokens=special
            )
        )


def _check(content: dict[str, Any]) -> tuple[bool, bool]:
    """Return whether text becomes NFC, and bytes; raises Unsupported for what changes text or is random."""
    model = content["model"]
    # Older files, such as the released GPT-2's, lack the type.
    if (kind := model.get("type", "BPE" if "merges" in model else "other than BPE")) != "BPE":
        raise Unsupported(f"its model has type {preview(kind, 40)}")
    if not (model["vocab"] and isinstance(model["merges"], list)):
        raise ValueError("it has no vocabulary")
    if model.get("dropout"):
        raise Unsupported(f"its dropout of {preview(model['dropout'], 40)} makes ids random")
    is_byte_level = any(
        step["type"] == "ByteLevel" for step in steps_of(content.get("pre_tokenizer"))
    )
    normalizer = steps_of(content.get("normalizer"), "normalizers")
    for step in normalizer:
        if step not in ([_NFC] if is_byte_level else _LLAMA2_NORMALIZER):
            raise Unsupported(f"its normalizer {preview(json.dumps(step), 80)} changes text")
    return bool(normalizer) and is_byte_level, is_byte_level


def _load(text: str) -> tokenizers.Tokenizer:
    """Load a file with the library, after a probe in another process if it is new to this user."""
    key = hashlib.sha256(f"{tokenizers.__version__}\0{text}".encode()).hexdigest()
    seen = cache_directory() / "tokenizers" / key
    if not os.access(seen, os.F_OK):  # which does not raise without permission
        _probe(text)
        with contextlib.suppress(OSError):
            seen.parent.mkdir(parents=True, exist_ok=True)
            seen.touch()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # else it warns in forked processes
    library = tokenizers.Tokenizer.from_str(text)
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True
    return library


def _probe(text: str) -> None:
    """Raise Unsupported if a file cannot be loaded, or takes too long or too much memory on short texts.

    A regular expression may run for years, and the library ignores Ctrl+C in the meantime.
    """
    command = [sys.executable, "-P", "-c", _PROBE, PROBE.replace("\0", ""), str(_PROBE_CPU_S)]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}  # so that one thread is killed
    done = subprocess.run(command, input=text.encode(), capture_output=True, env=environment)
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise Unsupported(f"short texts take it more than {_PROBE_CPU_S} s of CPU time")
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise Unsupported(f"it fails: {lines[-1] if lines else f'signal {-done.returncode}'}")
