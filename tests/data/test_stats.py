"""Statistics of a dataset, compared with plain counts over all its tokens at once."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain_gpt.data.shards import SPLITS
from raytrain_gpt.data.stats import QUANTILES, SplitStats, count_dataset, facts, histogram_edges
from raytrain_gpt.data.tokenizer import read_tokenizer
from tests.data.shard_tools import all_tokens, made_text, prepare_here, write_dataset, write_jsonl


def nothing(done: int, total: int) -> None:
    """Show no progress."""


def plain_lengths(tokens: np.ndarray, eot: int) -> list[int]:
    """Return the lengths of documents, `eot` included, and of any tokens after the last `eot`."""
    lengths, open_tokens = [], 0
    for token in tokens.tolist():
        open_tokens += 1
        if token == eot:
            lengths.append(open_tokens)
            open_tokens = 0
    return lengths + [open_tokens] * (open_tokens > 0)


def stats_of(lengths: list[int]) -> SplitStats:
    counts = sorted(Counter(lengths).items())
    ids = np.array([sum(lengths)], np.int64)
    return SplitStats(*np.array(counts, np.int64).T, ids)


def test_documents_are_counted_across_row_groups_and_shards(tmp_path: Path) -> None:
    """Tokens are random, so documents start and end anywhere."""
    manifest = write_dataset(tmp_path / "d", train=(5000, 333, 1, 70), val=(20, 500))
    seen: list[tuple[int, int]] = []
    found = count_dataset(tmp_path / "d", manifest, lambda *now: seen.append(now))
    for split in SPLITS:
        tokens = all_tokens(tmp_path / "d", manifest, split)
        expected = Counter(plain_lengths(tokens, manifest.eot_token))
        pairs = zip(found[split].lengths.tolist(), found[split].documents.tolist(), strict=True)
        assert dict(pairs) == expected
        assert list(found[split].lengths) == sorted(expected)
        assert found[split].id_counts.tolist() == [int((tokens == i).sum()) for i in range(257)]
        assert found[split].num_tokens == len(tokens)
    total = sum(shard.tokens for shard in manifest.shards)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


@given(lengths=st.lists(st.integers(1, 400), min_size=1, max_size=60))
def test_quantiles_are_exact(lengths: list[int]) -> None:
    stats = stats_of(lengths)
    for fraction in QUANTILES:
        assert stats.quantile(fraction) == np.quantile(lengths, fraction, method="inverted_cdf")
    assert stats.quantile(1.0) == max(lengths)


@given(lengths=st.lists(st.integers(1, 10**6), min_size=1, max_size=60))
def test_a_histogram_has_every_document_and_token_once(lengths: list[int]) -> None:
    edges = histogram_edges(max(lengths))
    documents, tokens = stats_of(lengths).histogram(edges)
    expected, _ = np.histogram(lengths, [*edges[:-1], edges[-1] - 0.5])
    assert documents.tolist() == expected.tolist()
    assert documents.sum() == len(lengths)
    assert tokens.sum() == sum(lengths)


@pytest.mark.parametrize("longest", [1, 2, 3, 5, 64, 65, 1023, 1024, 10**9])
def test_the_bins_reach_from_1_to_the_longest(longest: int) -> None:
    edges = histogram_edges(longest)
    assert edges[0] == 1
    assert edges[-1] > longest
    assert (np.diff(edges) > 0).all()
    assert (edges[2:] <= edges[1:-1] * 2).all()


def test_entropy_is_that_of_the_frequencies() -> None:
    one = np.array([1], np.int64)
    assert SplitStats(one, one, np.array([4, 0], np.int64)).entropy_bits == 0
    assert SplitStats(one, one, np.full(256, 3, np.int64)).entropy_bits == pytest.approx(8)
    counts = np.array([7, 2, 1], np.int64)
    expected = -sum(p * math.log2(p) for p in (0.7, 0.2, 0.1))
    assert SplitStats(one, one, counts).entropy_bits == pytest.approx(expected)


def test_facts_agree_with_the_text_and_are_json(tmp_path: Path, tokenizer: str) -> None:
    texts = [made_text(200 + 50 * i, seed=i) for i in range(120)]
    source, out = write_jsonl(tmp_path / "a.jsonl", texts), tmp_path / "out"
    manifest = prepare_here([source], out, tokenizer, val_tokens=2000)
    stats = count_dataset(out, manifest, nothing)
    edges = histogram_edges(max(int(one.lengths[-1]) for one in stats.values()))
    found = facts(stats, read_tokenizer(out), edges)
    assert json.loads(json.dumps(found)) == found
    for split in SPLITS:
        shards = manifest.split_shards(split)
        tokens = all_tokens(out, manifest, split)
        one = found[split]
        assert one["documents"] == sum(shard.documents for shard in shards)
        assert one["tokens"] == manifest.split_tokens(split)
        assert one["text_bytes"] == sum(shard.text_bytes for shard in shards)
        assert one["bytes_per_token"] == one["text_bytes"] / one["tokens"]
        assert one["vocabulary"]["ids"] == len(np.unique(tokens))
        assert sum(one["histogram"]["documents"]) == one["documents"]
        most = one["vocabulary"]["most_frequent"]
        assert [m["id"] for m in most] == [i for i, _ in sorted(
            Counter(tokens.tolist()).items(), key=lambda item: (-item[1], item[0])
        )][: len(most)]  # fmt: skip
    unseen = set(all_tokens(out, manifest, "val").tolist()) - set(
        all_tokens(out, manifest, "train").tolist()
    )
    expected = sum(int((all_tokens(out, manifest, "val") == i).sum()) for i in unseen)
    assert (found["train"]["tokens_not_in_train"], found["val"]["tokens_not_in_train"]) == (
        0,
        expected,
    )
