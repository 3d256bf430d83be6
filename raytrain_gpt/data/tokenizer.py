"""Tokenizers that travel with the data.

A tokenizer is a `tiktoken.Encoding`: a named one of tiktoken, or the built-in byte-level `bytes` (256 bytes
and `<|endoftext|>`). Every dataset and checkpoint stores its own, see `tokenizer_file`, so workers never
download one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import string
from collections.abc import Iterable
from functools import lru_cache
from typing import Annotated, Literal

import numpy as np
import tiktoken
from numpy.typing import NDArray
from pydantic import AfterValidator

from raytrain_gpt.errors import DataError
from raytrain_gpt.format import preview

EOT = "<|endoftext|>"
MAX_VOCAB_SIZE = 2**24
_MAX_TOKEN_BYTES = 2**12
MAX_NAME_LENGTH = 100
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


def tokenizer_names() -> list[str]:
    return ["bytes", *tiktoken.list_encoding_names()]


def load_tokenizer(name: str) -> tiktoken.Encoding:
    """Load `bytes`, or tiktoken's encoding of this name (cached or downloaded).

    Raises a DataError if the name is unknown, `<|endoftext|>` is missing, or reading and downloading fail.
    """
    if name == "bytes":
        # Pieces of 16 characters were fastest: 21 MB/s per core, against 8 MB/s for single characters.
        ranks = {bytes([i]): i for i in range(256)}
        return tiktoken.Encoding(
            name, pat_str=r"(?s).{1,16}", mergeable_ranks=ranks, special_tokens={EOT: 256}
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
    return encoding


def valid_text(text: str) -> str:
    """Return the text, with U+FFFD for each lone surrogate, which only JSON allows, as tiktoken does."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def encode(encoding: tiktoken.Encoding, text: str) -> NDArray[np.uint32]:
    """Encode text, uint32 (tokens,); raises a DataError if the tokenizer fails or drops text.

    Special tokens in the text are ordinary text.
    """
    text = valid_text(text)
    num_bytes = len(text.encode())
    why = "its pattern does not match the rest"  # which tiktoken drops
    try:
        tokens = encoding.encode_to_numpy(text, disallowed_special=())
    except BaseException as error:  # a panic of tiktoken's Rust code is not an Exception
        if not isinstance(error, ValueError) and type(error).__module__ != "pyo3_runtime":
            raise
        tokens, why = np.empty(0, np.uint32), " ".join(str(error).split())
    lengths = bytes_per_id(encoding, encoding.max_token_value + 1)
    parts = range(0, len(tokens), 2**14)  # which stay in the processor's cache
    if (kept := sum(int(lengths[tokens[i : i + 2**14]].sum()) for i in parts)) != num_bytes:
        raise DataError(
            f"tokenizer {encoding.name} encodes {kept} of {num_bytes} bytes of {preview(text, 40)}: {why}"
            "; shorten it or use another tokenizer"
        )
    return np.asarray(tokens)


def encode_document(encoding: tiktoken.Encoding, text: str) -> NDArray[np.uint32]:
    """Encode one document as `encode` does, and append `eot`: uint32 (tokens + 1,)."""
    tokens = encode(encoding, text)
    ids = np.empty(len(tokens) + 1, np.uint32)
    ids[:-1], ids[-1] = tokens, encoding.eot_token
    return ids


def prompt_tokens(encoding: tiktoken.Encoding, prompt: str) -> list[int]:
    """Encode a prompt; an empty one becomes `eot`, which precedes every document."""
    return encode(encoding, prompt).tolist() or [encoding.eot_token]


def token_dtype(vocab_size: int) -> Dtype:
    return "uint16" if vocab_size <= 2**16 else "uint32"


@lru_cache(maxsize=4)
def bytes_per_id(encoding: tiktoken.Encoding, size: int) -> NDArray[np.int64]:
    """Count the text bytes of each token id, int64 (size,); 0 for special and padded ids."""
    lengths = np.zeros(size, np.int64)
    for token, rank in encoding._mergeable_ranks.items():
        lengths[rank] = len(token)
    return lengths


def token_to_bytes(encoding: tiktoken.Encoding, token: int) -> bytes:
    """Return the bytes of a token; empty for gaps in the vocabulary, as in cl100k_base."""
    try:
        return bytes(encoding.decode_single_token_bytes(token))
    except KeyError:
        return b""


def decode_tokens(encoding: tiktoken.Encoding, tokens: Iterable[int]) -> str:
    """Decode any tokens that a model may sample; invalid UTF-8 becomes U+FFFD."""
    return b"".join(token_to_bytes(encoding, token) for token in tokens).decode("utf-8", "replace")


def vocab_hash(encoding: tiktoken.Encoding) -> str:
    """Hash name, pattern, tokens and their ids."""
    ranks = sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1])
    content = {
        "name": encoding.name,
        "pattern": encoding._pat_str,
        "special_tokens": dict(sorted(encoding._special_tokens.items())),
        "ranks": [[base64.b64encode(token).decode(), rank] for token, rank in ranks],
    }
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()


def make_encoding(
    name: str, pattern: str, ranks: dict[bytes, int], special: dict[str, int]
) -> tiktoken.Encoding:
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
    return tiktoken.Encoding(
        name=name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
    )
