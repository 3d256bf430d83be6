"""The training data of a run: one prepared dataset, or a weighted mixture.

    data_path: data/web                                  one dataset
    data_path: data/web=0.7,data/code=0.2,data/books=0.1 a mixture, weights by tokens

A dataset of a mixture is named by the end of its path. All share one tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from raytrain_gpt.data.mixed_order import MixedOrder
from raytrain_gpt.data.order import Ids, Order, Position
from raytrain_gpt.data.reader import read_sequences
from raytrain_gpt.data.shards import Manifest, Split, read_manifest
from raytrain_gpt.data.tokenizer import Tokens
from raytrain_gpt.errors import ConfigError, DataError
from raytrain_gpt.format import shell
from raytrain_gpt.storage.location import Location

BatchOrder = Order | MixedOrder

_WEIGHT = r"[0-9.]{1,20}(/[0-9]{1,20}|[eE][+-]?[0-9]{1,2})?"
"""Limits the digits: a Fraction would expand 1e999999999."""


@dataclass(frozen=True)
class WeightedDataset:
    """One dataset of a mixture; `weight` is its fraction of a batch's tokens."""

    directory: Location
    manifest: Manifest
    weight: Fraction


@dataclass(frozen=True)
class Mixture:
    """One dataset or several, with sequence ids numbered dataset by dataset."""

    datasets: tuple[WeightedDataset, ...]
    """At least one; the weights sum to 1."""

    @property
    def is_mixed(self) -> bool:
        return len(self.datasets) > 1

    @property
    def names(self) -> list[str]:
        return dataset_names([str(part.directory) for part in self.datasets])

    @property
    def weights(self) -> list[Fraction]:
        return [part.weight for part in self.datasets]

    @property
    def hash(self) -> str:
        """Hash of the training data, stored in every checkpoint; for one dataset, its manifest's hash."""
        if not self.is_mixed:
            return self.datasets[0].manifest.hash
        content = json.dumps([[part.manifest.hash, str(part.weight)] for part in self.datasets])
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def start(self) -> Position:
        """Data position of a new run."""
        return Position(0, self.hash)

    @property
    def tokenizer(self) -> str:
        return self.datasets[0].manifest.tokenizer

    @property
    def vocab_hash(self) -> str:
        return self.datasets[0].manifest.vocab_hash

    @property
    def vocab_size(self) -> int:
        return self.datasets[0].manifest.vocab_size

    @property
    def dtype(self) -> str:
        return max(part.manifest.dtype for part in self.datasets)

    def split_tokens(self, split: Split) -> int:
        return sum(part.manifest.split_tokens(split) for part in self.datasets)

    def num_sequences(self, split: Split, seq_len: int) -> list[int]:
        return [
            int(part.manifest.row_group_sequences(split, seq_len).sum()) for part in self.datasets
        ]

    def order(self, batch_sequences: int, seq_len: int, seed: int) -> BatchOrder:
        """Make the training order; raises a DataError if sequences are too few for a batch."""
        counts = [part.manifest.row_group_sequences("train", seq_len) for part in self.datasets]
        if not self.is_mixed:
            return Order(counts[0], batch_sequences, seq_len, seed)
        for dataset, row_groups in zip(self.datasets, counts, strict=True):
            if not row_groups.sum():
                raise DataError(
                    f"the train split of {dataset.directory} is shorter than one sequence of {seq_len} "
                    "tokens; remove it from data_path or set a smaller seq_len"
                )
        return MixedOrder(counts, self.weights, batch_sequences, seq_len, seed)

    def val_ids(self, seq_len: int, eval_tokens: int) -> Ids:
        """Return ids of the first validation sequences of each dataset, int64 (n,).

        `eval_tokens` are divided by weight, with at least one sequence per dataset.
        """
        total, first_id, ids = eval_tokens // seq_len, 0, []
        for dataset, num in zip(self.datasets, self.num_sequences("val", seq_len), strict=True):
            ids.append(first_id + np.arange(min(num, max(1, int(dataset.weight * total)))))
            first_id += num
        return np.concatenate(ids)

    def val_ends(self, seq_len: int) -> Ids:
        """Return the id after each dataset's last validation sequence, int64 (datasets,)."""
        return np.cumsum(self.num_sequences("val", seq_len))

    def read(self, split: Split, seq_len: int, ids: Ids) -> tuple[Tokens, Ids]:
        """Read sequences by their ids over all datasets; see `read_sequences`."""
        if not self.is_mixed:
            data = self.datasets[0]
            return read_sequences(data.directory, data.manifest, split, seq_len, ids)
        tokens: Tokens = np.zeros((len(ids), seq_len + 1), self.dtype)
        delivered = np.full(len(ids), -1, np.int64)
        first_id = 0
        for data, num in zip(self.datasets, self.num_sequences(split, seq_len), strict=True):
            rows = np.flatnonzero((ids >= first_id) & (ids < first_id + num))
            local_ids = ids[rows] - first_id
            tokens[rows], delivered_ids = read_sequences(
                data.directory, data.manifest, split, seq_len, local_ids
            )
            delivered[rows] = delivered_ids + first_id
            first_id += num
        return tokens, delivered


def parse_data_path(data_path: str) -> list[tuple[str, Fraction]]:
    """Parse paths or URLs and weights, which sum to 1; raises a ConfigError if one is missing."""
    if "," not in data_path:
        return [(data_path, Fraction(1))]
    datasets = []
    for item in data_path.split(","):
        path, _, text = item.strip().rpartition("=")
        try:
            weight = Fraction(text if re.fullmatch(_WEIGHT, text := text.strip()) else 0)
        except (ValueError, ZeroDivisionError):
            weight = Fraction(0)
        if not path or weight <= 0:
            raise ConfigError(
                f"{item.strip()!r} in data_path={data_path} is not a dataset with a weight above 0; write "
                "DATASET=WEIGHT,DATASET=WEIGHT, such as data/web=0.7,data/code=0.3 (commas separate datasets)"
            )
        datasets.append((path.strip(), weight))
    total = sum(weight for _, weight in datasets)
    return [(path, weight / total) for path, weight in datasets]


def dataset_names(paths: Sequence[str]) -> list[str]:
    """Return the shortest distinct path endings, in characters that trackers accept."""
    names: list[str] = []
    for depth in range(1, max(path.count("/") for path in paths) + 2):
        ends = ("/".join(path.rstrip("/").split("/")[-depth:]) for path in paths)
        names = [re.sub(r"[^\w./-]", "_", end) for end in ends]
        if len(set(names)) == len(names):
            break
    return names


def map_paths(data_path: str, change: Callable[[str], str]) -> str:
    """Apply `change` to every path or URL; raises as `parse_data_path`."""
    if len(parse_data_path(data_path)) == 1:
        return change(data_path)
    items = [item.strip().rpartition("=") for item in data_path.split(",")]
    return ",".join(f"{change(path.strip())}={weight.strip()}" for path, _, weight in items)


def read_mixture(weighted: Sequence[tuple[Location, Fraction]]) -> Mixture:
    """Read the datasets' manifests; raises a DataError for damage, repetition or different tokenizers."""
    mixture = Mixture(
        tuple(WeightedDataset(path, read_manifest(path), weight) for path, weight in weighted)
    )
    directory, count = Counter(data.directory for data in mixture.datasets).most_common(1)[0]
    if count > 1:
        raise DataError(
            f"{directory} is listed {count} times in data_path; list it once, with the sum of the weights"
        )
    first = mixture.datasets[0]
    for data in mixture.datasets[1:]:
        if data.manifest.vocab_hash != first.manifest.vocab_hash:
            raise DataError(
                f"{data.directory} has another tokenizer ({data.manifest.tokenizer}) than {first.directory} "
                f"({first.manifest.tokenizer}); prepare it again with --tokenizer {shell(first.directory)}"
            )
    return mixture


def check_val_split(mixture: Mixture, seq_len: int) -> None:
    for data, num in zip(mixture.datasets, mixture.num_sequences("val", seq_len), strict=True):
        if not num:
            raise DataError(
                f"the val split of {data.directory} has {data.manifest.split_tokens('val')} tokens, too few "
                f"for one sequence of {seq_len}; prepare with a larger val_fraction or set a smaller seq_len"
            )


def check_vocabulary(data: Mixture, other_hash: str, other: str) -> None:
    """Raise a DataError if the data's tokenizer is not that of the checkpoint `other`."""
    if data.vocab_hash != other_hash:
        raise DataError(
            f"the data's tokenizer ({data.tokenizer}, vocabulary hash {data.vocab_hash[:12]}) "
            f"does not match {other} ({other_hash[:12]}); prepare the data with --tokenizer {other}"
        )
