"""Tokenizers that travel with the data.

`Tokenizer` is the interface. `Tiktoken` has tiktoken's named ones, the built-in byte-level `bytes` (256 bytes
and `<|endoftext|>`) and those trained here, and writes them as Hugging Face's `tokenizer.json`, with the same
ids. A file of another program is a `library_tokenizer.FileTokenizer`. Every dataset and checkpoint stores its
own, so workers never download one.

tiktoken merges the two neighbors whose joint token has the lowest rank; `tokenizers` merges the first pair of
a list. In every trained vocabulary, merging a token's bytes ends with that token, so the list of these last
merges, ordered by rank, gives the same tokenizer.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from typing import Annotated, Any, Literal

import numpy as np
import tiktoken
from numpy.typing import NDArray
from pydantic import AfterValidator
from tiktoken_ext.openai_public import r50k_pat_str  # type: ignore[import-untyped]
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as LibraryTokenizer

from raytrain_gpt.errors import DataError
from raytrain_gpt.format import preview

EOT = "<|endoftext|>"
MAX_VOCAB_SIZE = 2**24
_MAX_TOKEN_BYTES = 2**12
MAX_NAME_LENGTH = 100
TOKENIZER_FILE = "tokenizer.json"
GPT2_PATTERN: str = r50k_pat_str
OWN_KEY = "tiktoken"
"""Entry of the model in `tokenizer.json` for tiktoken's name and pattern, which `tokenizers` ignores."""
IMPORTED = "imported"
"""Name of an unrecognized tokenizer."""
_MAX_SQUARED_BYTES = 2**27
"""Limit of the squared lengths of all tokens, 50 times those of GPT-2; their merges take 3 s."""
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_CHARACTER = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(0x100 + i) for i, byte in enumerate(_OTHERS)
}
"""GPT-2's printable character for each byte: the byte itself, else the next one from U+0100 on."""
BYTES = {character: byte for byte, character in _CHARACTER.items()}
PROBE = (
    f"Aa don't é日本😀 1234 ١{string.printable}ⅷ½ǅʰe\u0301\u0903\u20dd\u203f\u2014«»€\u02c6©\u00ad\u200b"
    "\ue000\u0378\U0010ffff\u00a0\u2028\u2029\u3000\x85\x00\r\n\r\n  \n\n ß'ſK''  "
)
"""Text of every Unicode category, in the mixtures that patterns distinguish."""


def _hash(text: str) -> str:
    if not re.fullmatch("[0-9A-Za-z]{0,64}", text):
        raise ValueError("a hash must have at most 64 letters and digits")
    return text


Hash = Annotated[str, AfterValidator(_hash)]
"""Hash read from a file; messages and model cards show it unescaped."""
Tokens = NDArray[np.uint16] | NDArray[np.uint32]
Dtype = Literal["uint16", "uint32"]


def valid_text(text: str) -> str:
    """Return the text, with U+FFFD for each lone surrogate, which only JSON allows, as tiktoken does."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def token_dtype(vocab_size: int) -> Dtype:
    return "uint16" if vocab_size <= 2**16 else "uint32"


class Tokenizer(ABC):
    """Text to token ids and back.

    Attributes:
        n_vocab: Number of ids, with those that have no token.
        hash: Hash of everything that determines the ids of a text.
        files: Name -> content of the files that restore it; Hugging Face reads them as well.
        lengths: Bytes of text of each id, int64 (n_vocab,); 0 for special tokens and ids without a token.
        eot_token: Id that ends every document.
        before: Ids before the text of every document, uint32 (few,).
        after: Ids after it, of which the last is `eot_token`, uint32 (few,).
        keeps_bytes: Whether the bytes of the tokens are always those of the text.
    """

    name: str
    n_vocab: int
    eot_token: int
    before: NDArray[np.uint32] = np.empty(0, np.uint32)
    after: NDArray[np.uint32]
    keeps_bytes = True
    hash: str
    files: dict[str, str]
    lengths: NDArray[np.int64]

    @abstractmethod
    def encode(self, text: str) -> NDArray[np.uint32]:
        """Encode text, uint32 (tokens,); raises a DataError if the tokenizer fails or drops text.

        Special tokens in the text are ordinary text.
        """

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """Return the text of an id, which may be part of a character; empty for an id without a token."""

    @abstractmethod
    def with_rows(self, rows: int) -> Tokenizer:
        """Return this tokenizer with `rows` ids, as many as a model has; those added have no text."""

    def normalized(self, text: str) -> str:
        """Return the text that is encoded; that of valid text only."""
        return text

    def encode_ordinary(self, text: str) -> list[int]:
        """Encode text as tiktoken's method of this name, for evaluations of users."""
        ids: list[int] = self.encode(text).tolist()
        return ids

    def encode_document(self, text: str) -> NDArray[np.uint32]:
        """Encode a document with the ids before and after it: uint32 (tokens,)."""
        return np.concatenate((self.before, self.encode(text), self.after))

    def encode_after(self, text: str, more: str) -> NDArray[np.uint32]:
        """Encode what follows a text, uint32 (tokens,)."""
        return self.encode(more)

    def encode_prompt(self, prompt: str) -> list[int]:
        """Encode a prompt; an empty one becomes `eot_token`, which precedes every document."""
        return [*self.before.tolist(), *self.encode(prompt).tolist()] or [self.eot_token]

    def decode(self, tokens: Iterable[int]) -> str:
        """Decode any tokens that a model may sample; invalid UTF-8 becomes U+FFFD."""
        return self.decode_bytes(tokens).decode("utf-8", "replace")

    def decode_bytes(self, tokens: Iterable[int]) -> bytes:
        return b"".join(map(self.token_bytes, tokens))

    def bytes_per_id(self, size: int) -> NDArray[np.int64]:
        """Return `lengths` padded with zeros, int64 (size,)."""
        return np.pad(self.lengths, (0, size - self.n_vocab))

    def checked(
        self, encode: Callable[[str], Any], text: str, expected: str | None
    ) -> NDArray[np.uint32]:
        """Encode text; raises a DataError if that fails, or not all bytes of what is expected are kept."""
        why = "it drops the rest"
        try:
            tokens = np.asarray(encode(text), np.uint32)
        except BaseException as error:  # a panic of Rust code is not an Exception
            if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
                raise
            tokens, expected, why = np.empty(0, np.uint32), text, " ".join(str(error).split())
        if expected is None:
            return tokens
        num_bytes = len(expected.encode())
        parts = range(0, len(tokens), 2**14)  # which stay in the processor's cache
        kept = sum(int(self.lengths[tokens[i : i + 2**14]].sum()) for i in parts)
        if kept != num_bytes:
            raise DataError(
                f"tokenizer {self.name} encodes {kept} of {num_bytes} bytes of {preview(text, 40)}: {why}"
                "; shorten it or use another tokenizer"
            )
        return tokens


class Tiktoken(Tokenizer):
    """A `tiktoken.Encoding`, with the `tokenizer.json` it was read from, if any."""

    def __init__(self, encoding: tiktoken.Encoding, file: str | None = None) -> None:
        self.encoding, self._file = encoding, file
        self.name, self.n_vocab = encoding.name, encoding.n_vocab
        self.eot_token = encoding.eot_token
        self.after = np.array([self.eot_token], np.uint32)

    def encode(self, text: str) -> NDArray[np.uint32]:
        text = valid_text(text)
        return self.checked(
            partial(self.encoding.encode_to_numpy, disallowed_special=()), text, text
        )

    def token_bytes(self, token: int) -> bytes:
        try:
            return bytes(self.encoding.decode_single_token_bytes(token))
        except KeyError:
            return b""

    @cached_property
    def lengths(self) -> NDArray[np.int64]:  # type: ignore[override]
        lengths = np.zeros(self.n_vocab, np.int64)
        for token, rank in self.encoding._mergeable_ranks.items():
            lengths[rank] = len(token)
        return lengths

    @cached_property
    def hash(self) -> str:  # type: ignore[override]
        ranks = sorted(self.encoding._mergeable_ranks.items(), key=lambda item: item[1])
        content = {
            "name": self.name,
            "pattern": self.encoding._pat_str,
            "special_tokens": dict(sorted(self.encoding._special_tokens.items())),
            "ranks": [[base64.b64encode(token).decode(), rank] for token, rank in ranks],
        }
        return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()

    @cached_property
    def files(self) -> dict[str, str]:  # type: ignore[override]
        return {TOKENIZER_FILE: self._file or _tokenizer_json(self.encoding)}

    def with_rows(self, rows: int) -> Tiktoken:
        # A special token takes the last id; ids between have no text.
        special = self.encoding._special_tokens | {f"<|unused_{rows - 1}|>": rows - 1}
        ranks = self.encoding._mergeable_ranks
        return make_tiktoken(IMPORTED, self.encoding._pat_str, ranks, special)


def tokenizer_names() -> list[str]:
    return ["bytes", *tiktoken.list_encoding_names()]


def load_tokenizer(name: str) -> Tiktoken:
    """Load `bytes`, or tiktoken's encoding of this name (cached or downloaded).

    Raises a DataError if the name is unknown, `<|endoftext|>` is missing, or reading and downloading fail.
    """
    if name == "bytes":
        # Pieces of 16 characters were fastest: 21 MB/s per core, against 8 MB/s for single characters.
        ranks = {bytes([i]): i for i in range(256)}
        pattern = r"(?s).{1,16}"
        return Tiktoken(
            tiktoken.Encoding(
                name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={EOT: 256}
            )
        )
    if name not in tokenizer_names():
        raise DataError(
            f"unknown tokenizer {name}; use one of {', '.join(tokenizer_names())}, bpe:VOCAB_SIZE to train "
            "one, or a tokenizer.json, dataset or checkpoint"
        )
    try:
        encoding = tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:  # requests' errors are OSErrors
        raise DataError(
            f"tokenizer {name} is neither in TIKTOKEN_CACHE_DIR nor can it be downloaded "
            f"({type(error).__name__}); set TIKTOKEN_CACHE_DIR to a cache that has it, or use bytes"
        ) from None
    if EOT not in encoding.special_tokens_set:
        raise DataError(f"tokenizer {name} has no {EOT} to end documents; use gpt2 or bytes")
    return Tiktoken(encoding)


def make_tiktoken(
    name: str,
    pattern: str,
    ranks: dict[bytes, int],
    special: dict[str, int],
    file: str | None = None,
) -> Tiktoken:
    """Make a tokenizer from untrusted fields; tiktoken itself panics on most errors checked here.

    Raises:
        ValueError: the fields are inconsistent, or the pattern is invalid or drops text.
        TypeError: a field has a wrong type.
    """
    if not (isinstance(name, str) and name.isprintable() and 0 < len(name) <= MAX_NAME_LENGTH):
        raise ValueError(f"its name must have 1 to {MAX_NAME_LENGTH} printable characters")
    ids = [*ranks.values(), *special.values()]
    if not all(type(i) is int and 0 <= i < MAX_VOCAB_SIZE for i in ids) or len(set(ids)) < len(ids):
        raise ValueError(f"its ids must be distinct numbers below {MAX_VOCAB_SIZE}")
    if EOT not in special:
        raise ValueError(f"it has no {EOT}")
    if not all(bytes([byte]) in ranks for byte in range(256)):
        raise ValueError("it has no token for one of the 256 bytes")
    if max(map(len, ranks)) > _MAX_TOKEN_BYTES:
        raise ValueError(f"it has a token of more than {_MAX_TOKEN_BYTES} bytes")
    # In this tokenizer an empty match is a token; without it, tiktoken panics.
    own_ranks = {b"": 256} | {bytes([i]): i for i in range(256)}
    probe = tiktoken.Encoding("", pat_str=pattern, mergeable_ranks=own_ranks, special_tokens={})
    if 256 in (ids := probe.encode(PROBE, disallowed_special=())):
        raise ValueError(f"its pattern {preview(pattern, 80)} matches empty text")
    kept = bytes(ids).decode().ljust(len(PROBE), "\ufffd")
    if dropped := [lost for lost, left in zip(PROBE, kept, strict=True) if lost != left]:
        raise ValueError(f"its pattern {preview(pattern, 80)} drops text such as {dropped[0]!a}")
    encoding = tiktoken.Encoding(
        name=name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
    )
    return Tiktoken(encoding, file)


def _printable(token: bytes) -> str:
    return "".join(_CHARACTER[byte] for byte in token)


def token_ranks(vocabulary: Mapping[str, int]) -> dict[bytes, int]:
    """Convert printable tokens with their ids to bytes, in the order of the ids; may raise KeyError."""
    in_order = sorted(vocabulary.items(), key=lambda item: item[1])
    return {bytes(map(BYTES.__getitem__, text)): i for text, i in in_order}


def merges_of(ranks: Mapping[bytes, int]) -> dict[bytes, tuple[bytes, bytes]]:
    """Return token -> the last pair merged when its bytes are merged, in order of rank.

    Single bytes are omitted, and tokens that merging does not produce. Raises DataError if it takes too long.
    """
    if (squares := sum(len(token) ** 2 for token in ranks)) > _MAX_SQUARED_BYTES:
        raise DataError(f"squared lengths of tokens sum to {squares}, above {_MAX_SQUARED_BYTES}")
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


def _tokenizer_json(encoding: tiktoken.Encoding) -> str:
    """Return the content of `tokenizer.json`, which Hugging Face loads as the same tokenizer.

    One difference remains: only `tokenizers` recognizes special tokens in a text.
    """
    ranks, special = encoding._mergeable_ranks, encoding._special_tokens
    merges = merges_of(ranks)
    model = models.BPE(
        {_printable(token): rank for token, rank in ranks.items()} | special,
        [(_printable(left), _printable(right)) for left, right in merges.values()],
        # Lets `tokenizers` match words that are tokens but that merges do not produce.
        ignore_merges=any(len(token) > 1 and token not in merges for token in ranks),
    )
    tokenizer = LibraryTokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(encoding._pat_str, bool(merges))
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in sorted(special, key=special.__getitem__)]
    )
    content = json.loads(tokenizer.to_str())
    content["model"][OWN_KEY] = {"name": encoding.name, "pattern": encoding._pat_str}
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n"


def _pre_tokenizer(pattern: str, has_merges: bool) -> pre_tokenizers.PreTokenizer:
    if pattern == GPT2_PATTERN:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    unsplit = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if not has_merges:  # word boundaries have no effect
        return unsplit
    # tiktoken's patterns differ from those of `tokenizers` only here, where `$` also ends lines and `{1,3}+`
    # is not possessive.
    theirs = pattern.replace("{1,3}+", "{1,3}").replace("++$", r"++\z")
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(theirs), "isolated"), unsplit])
