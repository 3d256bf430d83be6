"""Mixtures of generated datasets: parsing of `data_path`, refused inputs, and sequences read."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from raytrain_gpt.data.mixture import (
    Mixture,
    check_val_split,
    dataset_names,
    map_paths,
    parse_data_path,
    read_mixture,
)
from raytrain_gpt.data.reader import read_sequences
from raytrain_gpt.data.shards import write_manifest
from raytrain_gpt.errors import ConfigError, DataError
from raytrain_gpt.storage.location import Location
from tests.conftest import raises_line
from tests.data.shard_tools import write_dataset

TRAIN = {"web": [700, 33], "code": [500], "books": [300, 90]}
VAL = {"web": [200], "code": [90], "books": [60]}


@pytest.fixture
def mixture(tmp_path: Path) -> Mixture:
    """Return a mixture of three datasets with weights 0.7, 0.2 and 0.1."""
    for seed, name in enumerate(TRAIN):
        write_dataset(tmp_path / name, train=TRAIN[name], val=VAL[name], seed=seed)
    weights = [Fraction(7, 10), Fraction(2, 10), Fraction(1, 10)]
    return read_mixture(
        [(Location.of(tmp_path / n), weight) for n, weight in zip(TRAIN, weights, strict=True)]
    )


def test_one_path_is_one_dataset() -> None:
    for path in ("data/web", "s3://bucket/date=2026", "a=0.7"):
        assert parse_data_path(path) == [(path, 1)]


def test_weights_are_exact_and_sum_to_one() -> None:
    thirds = parse_data_path("a=1,b=1, s3://bucket/date=2026=1")
    assert thirds == [(path, Fraction(1, 3)) for path in ("a", "b", "s3://bucket/date=2026")]
    decimal = parse_data_path("a=0.7,b=0.2,c=0.1")
    assert [weight for _, weight in decimal] == [Fraction(n, 10) for n in (7, 2, 1)]
    assert parse_data_path("a=1e-3,b=9.99E-1")[0] == ("a", Fraction(1, 1000))


@pytest.mark.parametrize(
    "data_path",
    [
        *("a=0.7,b", "a,b", "a=0.7,b=0", "a=1,b=-1", "a=x,b=1", "a=1,", "=1,b=1", "a=1/0,b=1"),
        *("a=1e999999999,b=1", "a=1e-999999999,b=1", f"a={'9' * 5000},b=1", "a=0/1,b=1", "a=.,b=1"),
    ],
)
def test_what_is_no_dataset_with_a_weight_is_refused(data_path: str) -> None:
    with raises_line(ConfigError, "write DATASET=WEIGHT"):
        map_paths(data_path, str)


def test_paths_change_and_weights_stay() -> None:
    assert map_paths("data/web", str.upper) == "DATA/WEB"
    assert map_paths("a=0.70, b = 1/3", lambda path: f"/x/{path}") == "/x/a=0.70,/x/b=1/3"


def test_sequences_are_numbered_over_all_datasets(mixture: Mixture) -> None:
    sizes = mixture.num_sequences("train", 16)
    starts = np.cumsum(sizes) - sizes
    ids = np.random.default_rng(0).permutation(np.r_[-1, np.arange(sum(sizes)), -1])
    tokens, delivered = mixture.read("train", 16, ids)
    assert delivered.tolist() == ids.tolist()
    for part, start, num in zip(mixture.datasets, starts, sizes, strict=True):
        own, _ = read_sequences(part.directory, part.manifest, "train", 16, np.arange(num))
        for i in range(num):
            assert (tokens[ids == start + i] == own[i]).all()
    assert not tokens[ids < 0].any()


def test_the_validation_has_every_dataset_by_its_weight(mixture: Mixture) -> None:
    assert mixture.num_sequences("val", 8) == [24, 10, 7]
    assert mixture.val_ids(8, eval_tokens=8 * 20).tolist() == [*range(14), *range(24, 28), 34, 35]
    assert len(mixture.val_ids(8, eval_tokens=10**9)) == 24 + 10 + 7
    assert mixture.val_ids(8, eval_tokens=1).tolist() == [0, 24, 34]
    assert mixture.val_ends(8).tolist() == [24, 34, 41]


def test_the_hash_is_of_the_data_and_the_weights(mixture: Mixture) -> None:
    parts = [(part.directory, part.weight) for part in mixture.datasets]
    assert read_mixture(parts).hash == mixture.hash
    assert read_mixture(parts[:1]).hash == mixture.datasets[0].manifest.hash
    other = [(parts[0][0], Fraction(6, 10)), (parts[1][0], Fraction(3, 10)), parts[2]]
    assert len({mixture.hash, read_mixture(other).hash, read_mixture(parts[::-1]).hash}) == 3


def test_names_are_the_ends_of_paths_that_tell_them_apart() -> None:
    assert dataset_names(["/d/web"]) == ["web"]
    assert dataset_names(["/d/web/", "s3://b/code"]) == ["web", "code"]
    assert dataset_names(["s3://b/web/gpt2", "s3://b/code/gpt2"]) == ["web/gpt2", "code/gpt2"]
    assert dataset_names(["/d/date=2026", "/d/a b+c"]) == ["date_2026", "a_b_c"]
    assert dataset_names(["/d/a=b", "/e/a+b"]) == ["d/a_b", "e/a_b"]


def test_a_dataset_stands_there_once(mixture: Mixture) -> None:
    web = mixture.datasets[0].directory
    with pytest.raises(DataError, match="web is listed 2 times in data_path; list it once"):
        read_mixture([(web, Fraction(1, 2)), (web, Fraction(1, 2))])


def test_datasets_of_other_tokenizers_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        manifest = write_dataset(tmp_path / name, train=[100], val=[50])
    other = manifest.model_copy(update={"tokenizer": "other", "vocab_hash": "0" * 64})
    write_manifest(tmp_path / "b", other)
    with pytest.raises(
        DataError,
        match=r"b has another tokenizer \(other\) than .*a \(bytes\); prepare it again with --tokenizer .*a$",
    ):
        read_mixture([(Location.of(tmp_path / name), Fraction(1, 2)) for name in ("a", "b")])


def test_every_dataset_needs_a_sequence_of_both_splits(mixture: Mixture, tmp_path: Path) -> None:
    check_val_split(mixture, 32)
    with pytest.raises(DataError, match=r"val split of .*web has 200 tokens"):
        check_val_split(mixture, 64)
    write_dataset(tmp_path / "tiny", train=[8], val=[50])
    both = read_mixture([(Location.of(tmp_path / n), Fraction(1, 2)) for n in ("web", "tiny")])
    with pytest.raises(
        DataError, match=r"train split of .*tiny is shorter than one sequence of 8 tokens"
    ):
        both.order(batch_sequences=4, seq_len=8, seed=1)
