"""Statistics of a dataset, counted in one pass: document lengths and id frequencies.

Memory holds one row group, and a count per id and per document length. Lengths sum to the tokens, so at most
sqrt(2 · tokens) of them differ: memory is bounded and quantiles are exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tiktoken
from numpy.typing import NDArray

from raytrain_gpt.data.shards import SPLITS, Manifest, Split, read_row_group
from raytrain_gpt.data.tokenizer import bytes_per_id, decode_tokens
from raytrain_gpt.storage.location import LocationLike

QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
NUM_TOP_IDS = 20
_BINS_PER_OCTAVE = 4


@dataclass(frozen=True)
class SplitStats:
    """Counts of one split.

    Attributes:
        lengths: Distinct document lengths in tokens with `eot`, ascending, int64 (n,).
        documents: Documents of each length, int64 (n,).
        id_counts: Occurrences of each id, int64 (vocab_size,).
    """

    lengths: NDArray[np.int64]
    documents: NDArray[np.int64]
    id_counts: NDArray[np.int64]

    @property
    def num_documents(self) -> int:
        """Documents; tokens after the last `eot` count as one."""
        return int(self.documents.sum())

    @property
    def num_tokens(self) -> int:
        return int(self.id_counts.sum())

    @property
    def entropy_bits(self) -> float:
        """Entropy of the id frequencies in bits per token, the loss of the best unigram model."""
        frequencies = self.id_counts[self.id_counts > 0] / max(1, self.num_tokens)
        return float(-(frequencies * np.log2(frequencies)).sum()) + 0.0  # not -0.0

    def quantile(self, fraction: float) -> int:
        """Return the smallest length that at least this fraction of documents does not exceed."""
        at = np.searchsorted(np.cumsum(self.documents), fraction * self.num_documents)
        return int(self.lengths[min(int(at), len(self.lengths) - 1)])

    def histogram(self, edges: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Count documents and tokens in length bins [edges[i], edges[i + 1]), int64 (bins,) each."""
        documents, _ = np.histogram(self.lengths, edges, weights=self.documents)
        tokens, _ = np.histogram(self.lengths, edges, weights=self.documents * self.lengths)
        return documents, tokens


def count_dataset(
    directory: LocationLike, manifest: Manifest, progress: Callable[[int, int], None]
) -> dict[Split, SplitStats]:
    """Count a dataset, or raise a DataError; `progress` gets done and total tokens after each row group."""
    total, done = sum(shard.tokens for shard in manifest.shards), 0
    stats: dict[Split, SplitStats] = {}
    for split in SPLITS:
        id_counts = np.zeros(manifest.vocab_size, np.int64)
        documents: Counter[int] = Counter()
        unfinished = 0  # tokens since the last eot: a document may continue in the next row group
        for shard in manifest.split_shards(split):
            for index in range(-(-shard.tokens // manifest.row_group_tokens)):
                tokens = read_row_group(directory, manifest, shard, index)
                id_counts += np.bincount(tokens, minlength=manifest.vocab_size)
                ends = np.flatnonzero(tokens == manifest.eot_token)
                lengths = np.diff(ends, prepend=-1 - unfinished)
                documents.update(lengths.tolist())
                unfinished += len(tokens) - int(lengths.sum())
                done += len(tokens)
                progress(done, total)
        if unfinished:
            documents[unfinished] += 1
        pairs = np.array(sorted(documents.items()), np.int64).reshape(-1, 2)
        stats[split] = SplitStats(pairs[:, 0], pairs[:, 1], id_counts)
    return stats


def histogram_edges(longest: int) -> NDArray[np.int64]:
    """Return bin edges up to the longest length, int64 (bins + 1,), each about 1.19 times the last."""
    octaves = int(np.ceil(np.log2(longest + 1)))
    steps = np.arange(octaves * _BINS_PER_OCTAVE + 1) / _BINS_PER_OCTAVE
    return np.unique(np.round(2.0**steps).astype(np.int64))


def facts(
    stats: dict[Split, SplitStats], encoding: tiktoken.Encoding, edges: NDArray[np.int64]
) -> dict[str, Any]:
    """Return the statistics of each split as JSON types; `edges` are those of the histogram."""
    in_train = stats["train"].id_counts > 0
    return {split: _split_facts(one, in_train, encoding, edges) for split, one in stats.items()}


def _split_facts(
    stats: SplitStats,
    in_train: NDArray[np.bool_],
    encoding: tiktoken.Encoding,
    edges: NDArray[np.int64],
) -> dict[str, Any]:
    counts, vocab_size = stats.id_counts, len(stats.id_counts)
    text_bytes = int((counts * bytes_per_id(encoding, vocab_size)).sum())
    ids = int((counts > 0).sum())
    documents, tokens = stats.histogram(edges)
    most_frequent = np.argsort(-counts, kind="stable")[: min(NUM_TOP_IDS, ids)].tolist()
    return {
        "tokens": stats.num_tokens,
        "documents": stats.num_documents,
        "text_bytes": text_bytes,
        "bytes_per_token": text_bytes / max(1, stats.num_tokens),
        "document_tokens": {
            "mean": stats.num_tokens / max(1, stats.num_documents),
            "min": int(stats.lengths[0]),
            **{f"p{fraction * 100:g}": stats.quantile(fraction) for fraction in QUANTILES},
            "max": int(stats.lengths[-1]),
        },
        "vocabulary": {
            "ids": ids,
            "vocab_size": vocab_size,
            "coverage": ids / vocab_size,
            "entropy_bits": stats.entropy_bits,
            "most_frequent": [
                {
                    "id": token,
                    "text": decode_tokens(encoding, [token]),
                    "fraction": int(counts[token]) / stats.num_tokens,
                }
                for token in most_frequent
            ],
        },
        "histogram": {
            "edges": edges.tolist(),
            "documents": documents.tolist(),
            "tokens": tokens.tolist(),
        },
        "tokens_not_in_train": int(counts[~in_train].sum()),
    }
