"""Tokenizers that travel with the data.

A tokenizer is a `tiktoken.Encoding`: one that tiktoken knows by name, or the built-in byte-level `bytes`
(256 bytes and `<|endoftext|>`). Every dataset and checkpoint carries all of it (ranks, pattern, special
tokens) in `tokenizer.json`, so that no worker ever downloads one.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable
from typing import Literal

import numpy as np
import tiktoken
from numpy.typing import NDArray

from raytrain_gpt.errors import DataError
from raytrain_gpt.storage.location import Location, Place

EOT = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"

Tokens = NDArray[np.uint16] | NDArray[np.uint32]
Dtype = Literal["uint16", "uint32"]


def load_tokenizer(name: str) -> tiktoken.Encoding:
    """A tokenizer by name: `bytes`, or any encoding that tiktoken reads from its cache or downloads.

    Raises:
        DataError: unknown name, no `<|endoftext|>`, or it can be neither read nor downloaded.
    """
    if name == "bytes":
        # Sixteen characters a piece is the fastest split measured: 21 MB/s a core, one a piece: 8 MB/s.
        ranks = {bytes([i]): i for i in range(256)}
        return tiktoken.Encoding(
            name, pat_str=r"(?s).{1,16}", mergeable_ranks=ranks, special_tokens={EOT: 256}
        )
    if name not in tiktoken.list_encoding_names():
        known = ", ".join(["bytes", *tiktoken.list_encoding_names()])
        raise DataError(f"unknown tokenizer {name}; use one of {known}")
    try:
        encoding = tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:  # requests' errors are OSErrors
        raise DataError(
            f"tokenizer {name} is neither in TIKTOKEN_CACHE_DIR nor can it be downloaded "
            f"({type(error).__name__}); set TIKTOKEN_CACHE_DIR to a filled cache, or use bytes"
        ) from None
    if EOT not in encoding.special_tokens_set:
        raise DataError(f"tokenizer {name} has no {EOT} to close documents with; use gpt2 or bytes")
    return encoding


def encode_document(encoding: tiktoken.Encoding, text: str) -> NDArray[np.uint32]:
    """Token ids of one document, closed by `eot`: uint32 (tokens + 1,).

    Special tokens inside the text are treated as ordinary text; a lone surrogate, which JSON can
    express but UTF-8 cannot, becomes a question mark.
    """
    try:
        tokens = encoding.encode_to_numpy(text, disallowed_special=())
    except UnicodeEncodeError:
        text = text.encode("utf-8", "replace").decode()
        tokens = encoding.encode_to_numpy(text, disallowed_special=())
    closed = np.empty(len(tokens) + 1, np.uint32)
    closed[:-1], closed[-1] = tokens, encoding.eot_token
    return closed


def token_dtype(vocab_size: int) -> Dtype:
    """uint16 where every id fits, else uint32."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def token_bytes(encoding: tiktoken.Encoding, size: int) -> NDArray[np.int64]:
    """Bytes of text that each token id stands for, int64 (size,); 0 for special and padded ids."""
    lengths = np.zeros(size, np.int64)
    for token, rank in encoding._mergeable_ranks.items():
        lengths[rank] = len(token)
    return lengths


def bytes_of(encoding: tiktoken.Encoding, token: int) -> bytes:
    """The bytes of a token; empty for ids that the vocabulary skips, as cl100k_base does."""
    try:
        return bytes(encoding.decode_single_token_bytes(token))
    except KeyError:
        return b""


def text_of(encoding: tiktoken.Encoding, tokens: Iterable[int]) -> str:
    """The text of any tokens that a model may sample; what is not UTF-8 becomes U+FFFD."""
    return b"".join(bytes_of(encoding, token) for token in tokens).decode("utf-8", "replace")


def vocab_hash(encoding: tiktoken.Encoding) -> str:
    """Hash of everything that decides which ids a text becomes."""
    return hashlib.sha256(tokenizer_json(encoding).encode()).hexdigest()


def tokenizer_json(encoding: tiktoken.Encoding) -> str:
    """The content of `tokenizer.json`: one line, the same for the same vocabulary."""
    ranks = sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1])
    content = {
        "name": encoding.name,
        "pattern": encoding._pat_str,
        "special_tokens": dict(sorted(encoding._special_tokens.items())),
        "ranks": [[base64.b64encode(token).decode(), rank] for token, rank in ranks],
    }
    return json.dumps(content, separators=(",", ":"))


def read_tokenizer(directory: Place) -> tiktoken.Encoding:
    """The tokenizer that a dataset or checkpoint carries.

    Raises:
        DataError: `tokenizer.json` is missing or damaged.
    """
    path = Location.of(directory) / TOKENIZER_FILE
    try:
        content = json.loads(path.read_text())
        return tiktoken.Encoding(
            name=content["name"],
            pat_str=content["pattern"],
            mergeable_ranks={base64.b64decode(token): rank for token, rank in content["ranks"]},
            special_tokens=content["special_tokens"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"cannot read tokenizer {path}: {error}; repeat the command that prepared the dataset, or "
            "use another checkpoint"
        ) from None
