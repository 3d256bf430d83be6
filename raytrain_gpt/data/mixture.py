"""What a run is trained on: one prepared dataset, or several with weights.

    data_path: data/web                                  one dataset
    data_path: data/web=0.7,data/code=0.2,data/books=0.1 a mixture, weights by tokens

A dataset of a mixture is named by the end of its path. All have the same tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from raytrain_gpt.data.mixed_order import MixedOrder
from raytrain_gpt.data.order import Ids, Order
from raytrain_gpt.data.reader import read_sequences
from raytrain_gpt.data.shards import Manifest, Split, read_manifest
from raytrain_gpt.data.tokenizer import Tokens
from raytrain_gpt.errors import ConfigError, DataError
from raytrain_gpt.storage.location import Location

BatchOrder = Order | MixedOrder

_WEIGHT = r"[0-9.]{1,20}(/[0-9]{1,20}|[eE][+-]?[0-9]{1,2})?"
"""Of few digits: a Fraction writes all zeros of 1e999999999 out."""


@dataclass(frozen=True)
class WeightedDataset:
    """One dataset of a mixture, and its fraction of the tokens of a batch."""

    directory: Location
    manifest: Manifest
    weight: Fraction


@dataclass(frozen=True)
class Mixture:
    """One dataset or several, whose sequences are numbered one dataset after the other."""

    datasets: tuple[WeightedDataset, ...]
    """At least one; the weights sum to 1."""
    read_at: float = field(default_factory=time.time, compare=False)
    """When the manifests were read, Unix time: what changes later is noticed by `read`."""

    @property
    def is_mixed(self) -> bool:
        """Whether there is more than one dataset."""
        return len(self.datasets) > 1

    @property
    def names(self) -> list[str]:
        """Names of the datasets, as in the keys of metrics."""
        return dataset_names([str(part.directory) for part in self.datasets])

    @property
    def weights(self) -> list[Fraction]:
        """Fractions of a batch's tokens, one for each dataset."""
        return [part.weight for part in self.datasets]

    @property
    def hash(self) -> str:
        """Hash of what is trained on, kept in every checkpoint; for one dataset, its manifest's."""
        if not self.is_mixed:
            return self.datasets[0].manifest.hash
        content = json.dumps([[part.manifest.hash, str(part.weight)] for part in self.datasets])
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def first(self) -> WeightedDataset:
        """The first dataset; all share its tokenizer."""
        return self.datasets[0]

    @property
    def tokenizer(self) -> str:
        """Name of the tokenizer."""
        return self.first.manifest.tokenizer

    @property
    def vocab_hash(self) -> str:
        """Hash of the tokenizer's vocabulary."""
        return self.first.manifest.vocab_hash

    @property
    def vocab_size(self) -> int:
        """Ids of the tokenizer."""
        return self.first.manifest.vocab_size

    @property
    def dtype(self) -> str:
        """Type of the token ids: uint16 or uint32."""
        return max(part.manifest.dtype for part in self.datasets)

    def split_tokens(self, split: Split) -> int:
        """Tokens in a split, over all datasets."""
        return sum(part.manifest.split_tokens(split) for part in self.datasets)

    def num_sequences(self, split: Split, seq_len: int) -> list[int]:
        """Sequences in a split of each dataset."""
        return [
            int(part.manifest.row_group_sequences(split, seq_len).sum()) for part in self.datasets
        ]

    def order(self, batch_sequences: int, seq_len: int, seed: int) -> BatchOrder:
        """The training order.

        Raises:
            DataError: too few sequences for a batch.
        """
        counts = [part.manifest.row_group_sequences("train", seq_len) for part in self.datasets]
        if not self.is_mixed:
            return Order(counts[0], batch_sequences, seq_len, seed)
        for part, own in zip(self.datasets, counts, strict=True):
            if not own.sum():
                raise DataError(
                    f"the train split of {part.directory} has no sequence of {seq_len} tokens; remove it "
                    "from data_path or set a smaller seq_len"
                )
        return MixedOrder(counts, self.weights, batch_sequences, seq_len, seed)

    def val_ids(self, seq_len: int, eval_tokens: int) -> Ids:
        """Ids, int64 (n,), of the sequences to validate on: the first ones of each dataset.

        Each dataset gets its weight of `eval_tokens`, but at least one sequence.
        """
        wanted, first_id, ids = eval_tokens // seq_len, 0, []
        for part, num in zip(self.datasets, self.num_sequences("val", seq_len), strict=True):
            ids.append(first_id + np.arange(min(num, max(1, int(part.weight * wanted)))))
            first_id += num
        return np.concatenate(ids)

    def val_ends(self, seq_len: int) -> Ids:
        """The id after the last validation sequence of each dataset, int64 (datasets,)."""
        return np.cumsum(self.num_sequences("val", seq_len))

    def read(
        self, split: Split, seq_len: int, ids: Ids, cache_bytes: int = 0
    ) -> tuple[Tokens, Ids]:
        """`read_sequences` for ids that are numbered over all datasets."""
        if not self.is_mixed:
            part = self.first
            return read_sequences(
                part.directory, part.manifest, split, seq_len, ids, cache_bytes, self.read_at
            )
        tokens: Tokens = np.zeros((len(ids), seq_len + 1), self.dtype)
        delivered = np.full(len(ids), -1, np.int64)
        first_id = 0
        for part, num in zip(self.datasets, self.num_sequences(split, seq_len), strict=True):
            own = np.flatnonzero((ids >= first_id) & (ids < first_id + num))
            tokens[own], found = read_sequences(
                part.directory,
                part.manifest,
                split,
                seq_len,
                ids[own] - first_id,
                cache_bytes,
                self.read_at,
            )
            delivered[own] = found + first_id
            first_id += num
        return tokens, delivered


def parse_data_path(data_path: str) -> list[tuple[str, Fraction]]:
    """Paths or URLs of datasets with their weights, which sum to 1.

    Raises:
        ConfigError: one of several datasets has no weight above 0.
    """
    if "," not in data_path:
        return [(data_path, Fraction(1))]
    parts = []
    for part in data_path.split(","):
        path, _, text = part.strip().rpartition("=")
        try:
            weight = Fraction(text if re.fullmatch(_WEIGHT, text := text.strip()) else 0)
        except (ValueError, ZeroDivisionError):
            weight = Fraction(0)
        if not path or weight <= 0:
            raise ConfigError(
                f"{part.strip()!r} in data_path={data_path} is not a dataset with a weight above 0; write "
                "DATASET=WEIGHT,DATASET=WEIGHT, such as data/web=0.7,data/code=0.3 (commas separate datasets)"
            )
        parts.append((path.strip(), weight))
    total = sum(weight for _, weight in parts)
    return [(path, weight / total) for path, weight in parts]


def dataset_names(paths: Sequence[str]) -> list[str]:
    """The shortest endings that tell the paths apart, in characters that trackers accept."""
    names: list[str] = []
    for depth in range(1, max(path.count("/") for path in paths) + 2):
        ends = ("/".join(path.rstrip("/").split("/")[-depth:]) for path in paths)
        names = [re.sub(r"[^\w./-]", "_", end) for end in ends]
        if len(set(names)) == len(names):
            break
    return names


def map_paths(data_path: str, change: Callable[[str], str]) -> str:
    """The same datasets and weights with every path or URL changed.

    Raises:
        ConfigError: one of several datasets has no weight above 0.
    """
    if len(parse_data_path(data_path)) == 1:
        return change(data_path)
    parts = [part.strip().rpartition("=") for part in data_path.split(",")]
    return ",".join(f"{change(path.strip())}={weight.strip()}" for path, _, weight in parts)


def read_mixture(parts: Sequence[tuple[Location, Fraction]]) -> Mixture:
    """The datasets with their manifests.

    Raises:
        DataError: one is missing, damaged or listed twice, or the tokenizers differ.
    """
    if (
        len(parts) == 1
        and re.fullmatch(rf".+=\s*{_WEIGHT}", str(parts[0][0]))
        and not parts[0][0].exists()
    ):
        path, _, weight = str(parts[0][0]).rpartition("=")
        raise DataError(
            f"data_path {path}={weight} does not exist; weights are for several datasets, as in "
            f"data/web=0.7,data/code=0.3: if {path} is the dataset, remove ={weight}"
        )
    mixture = Mixture(
        tuple(WeightedDataset(path, read_manifest(path), weight) for path, weight in parts)
    )
    directory, count = Counter(part.directory for part in mixture.datasets).most_common(1)[0]
    if count > 1:
        raise DataError(
            f"{directory} is listed {count} times in data_path; list it once, with the sum of the weights"
        )
    first = mixture.first
    for part in mixture.datasets[1:]:
        if part.manifest.vocab_hash != first.manifest.vocab_hash:
            raise DataError(
                f"{part.directory} has tokenizer {part.manifest.tokenizer}, {first.directory} has "
                f"{first.manifest.tokenizer}; prepare both with the same --tokenizer"
            )
    return mixture


def check_val_split(mixture: Mixture, seq_len: int) -> None:
    """Raise a DataError if a dataset's val split has no whole sequence."""
    for part, num in zip(mixture.datasets, mixture.num_sequences("val", seq_len), strict=True):
        if not num:
            raise DataError(
                f"the val split of {part.directory} has {part.manifest.split_tokens('val')} tokens, too few "
                f"for one sequence of {seq_len}; prepare with a larger val_fraction or set a smaller seq_len"
            )


def check_vocabulary(data: Mixture, other_hash: str, other: str) -> None:
    """Raise a DataError if the data's tokenizer is not that of `other`, which messages name."""
    if data.vocab_hash != other_hash:
        raise DataError(
            f"the data's tokenizer ({data.tokenizer}, vocabulary hash {data.vocab_hash[:12]}) "
            f"is not that of {other} ({other_hash[:12]}); prepare the data with the same tokenizer"
        )
