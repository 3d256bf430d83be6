"""`data stats --compare`: what tokenizers would make of a dataset's text, and what its bytes would cost.

New ones are trained on a sample of the training split; all are counted on a sample of the validation split.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import tiktoken

from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.registry import count_model
from raytrain_gpt.data.shards import Manifest, Split, read_row_group
from raytrain_gpt.data.tokenizer import decode_tokens, encode_document, read_tokenizer
from raytrain_gpt.errors import DataError
from raytrain_gpt.format import Log, table
from raytrain_gpt.ingest.hf_tokenizer import open_tokenizer
from raytrain_gpt.ingest.train_tokenizer import new_vocab_size, train_bpe
from raytrain_gpt.storage.location import Location

SAMPLE_BYTES = 20_000_000
"""Text of each split to read at most."""


@dataclass(frozen=True)
class ComparedTokenizer:
    """A tokenizer on the validation text.

    Attributes:
        bytes_per_token: UTF-8 bytes of text per token, ends of documents included.
        embedding_share: Fraction of the model's parameters in embeddings and head.
        flops_per_byte: FLOPs of training on a byte of text.
    """

    tokenizer: str
    vocab_size: int
    bytes_per_token: float
    embedding_share: float
    flops_per_byte: float


def compare_tokenizers(
    directory: Location, manifest: Manifest, names: list[str], config: Config, log: Log
) -> list[ComparedTokenizer]:
    """Compare tokenizers for a model of `config`; raises a DataError like `prepare`."""
    own = read_tokenizer(directory)
    sizes = {name: new_vocab_size(name) for name in names}
    train = list(_texts(directory, manifest, "train", own)) if any(sizes.values()) else []
    val = list(_texts(directory, manifest, "val", own))
    num_bytes = sum(len(text.encode()) for text in val)
    if not num_bytes:
        raise DataError(
            f"the val split of {directory} has no text to compare; prepare one with text"
        )
    compared = []
    for name, size in sizes.items():
        encoding = open_tokenizer(name, log) if size is None else train_bpe(train, size)
        tokens = sum(len(encode_document(encoding, text)) for text in val)
        counts = count_model(GPTShape.of(config, encoding.n_vocab))
        compared.append(
            ComparedTokenizer(
                name,
                encoding.n_vocab,
                num_bytes / tokens,
                counts.embedding_parameters / counts.num_parameters,
                counts.flops_per_token * tokens / num_bytes,
            )
        )
    return compared


def comparison_table(rows: list[ComparedTokenizer]) -> list[str]:
    cells = [
        (
            row.tokenizer,
            f"{row.vocab_size:,}",
            f"{row.bytes_per_token:.2f}",
            f"{row.embedding_share:.0%}",
            f"{row.flops_per_byte:.3g}",
        )
        for row in rows
    ]
    return table(["tokenizer"], ["ids", "bytes/token", "embedding", "FLOPs/byte"], cells)


def _texts(
    directory: Location, manifest: Manifest, split: Split, own: tiktoken.Encoding
) -> Iterator[str]:
    """Yield texts of row groups spread over a split; documents are cut at the ends of row groups."""
    groups = [
        (shard, index)
        for shard in manifest.split_shards(split)
        for index in range(-(-shard.tokens // manifest.row_group_tokens))
    ]
    # Fibonacci hashing: any prefix of this order is spread evenly.
    order = sorted(range(len(groups)), key=lambda i: i * 0.6180339887498949 % 1)
    left = SAMPLE_BYTES
    for i in order:
        tokens = read_row_group(directory, manifest, *groups[i])
        ends = np.flatnonzero(tokens == manifest.eot_token)
        for document in np.split(tokens, ends + 1):
            text = decode_tokens(own, document[document != manifest.eot_token].tolist())
            if text:
                yield text[:left]
            left -= len(text.encode())
            if left <= 0:
                return
