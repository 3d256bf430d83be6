"""The micro-batch that fits a device: the largest by prediction, and advice where none does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain_gpt.config.resolved import ActivationCheckpointing
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.memory import MemoryModel
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.train.memory_fit import (
    MAX_CPU_TOKENS,
    MAX_GPU_TOKENS,
    MIN_EFFICIENT_TOKENS,
    MODES,
    MemoryFit,
    MemorySearch,
)

VOCAB_SIZE = 257
PER_SEQUENCE: dict[ActivationCheckpointing, int] = {"none": 10, "selective": 6, "full": 3}
STATE = 20


def config(**values: object) -> Config:
    sizes = {
        "num_layers": 2, "num_heads": 2, "embd_size": 32, "seq_len": 32,
        "global_batch_tokens": 24 * 32, "micro_batch_sequences": "auto", "use_gpu": True,
    }  # fmt: skip
    return Config().updated({**sizes, **values})


@dataclass(frozen=True)
class Table(MemorySearch):
    """Search with a made-up prediction, which grows with the sequences."""

    def predict(self, sequences: int, mode: ActivationCheckpointing) -> float:
        return STATE + sequences * PER_SEQUENCE[mode]


def table(config: Config, world_size: int = 1) -> Table:
    return Table(config, world_size, model_of(config, world_size))


def model_of(config: Config, world_size: int = 1) -> MemoryModel:
    return MemoryModel.of(config, world_size, GPTShape.of(config, VOCAB_SIZE), bf16=True)


def sizes(config: Config, world_size: int) -> list[int]:
    return table(config, world_size).sizes


def test_candidates_are_the_divisors_of_a_ranks_share() -> None:
    assert sizes(config(), 1) == [1, 2, 3, 4, 6, 8, 12, 24]
    assert sizes(config(), 2) == [1, 2, 3, 4, 6, 12]
    assert sizes(config(), 24) == [1]
    assert sizes(config(micro_batch_sequences=4), 2) == [4]
    assert sizes(config(micro_batch_sequences=8), 2) == [6]
    huge = config(seq_len=1, global_batch_tokens=10**11)
    assert sizes(huge, 1)[-1] == 64_000
    assert sizes(huge.updated({"use_gpu": False}), 1)[-1] == 2048


@pytest.mark.parametrize(("use_gpu", "most"), [(False, MAX_CPU_TOKENS), (True, MAX_GPU_TOKENS)])
def test_a_device_gets_no_more_tokens_than_it_is_fast_with_but_a_whole_sequence(
    use_gpu: bool, most: int
) -> None:
    batch = 64 * most
    for seq_len, largest in ((most // 16, 16), (most, 1), (batch, 1)):
        given = config(use_gpu=use_gpu, seq_len=seq_len, global_batch_tokens=batch)
        assert sizes(given, 1)[-1] == largest


def auto(share: int, enough: int) -> Config:
    """Return a configuration with `share` sequences; `enough` of them suffice without recomputing."""
    seq_len = MIN_EFFICIENT_TOKENS // enough
    return config(
        seq_len=seq_len, global_batch_tokens=share * seq_len, activation_checkpointing="auto"
    )


@given(
    share=st.integers(1, 64),
    limit=st.integers(0, 700),
    enough=st.sampled_from([1, 2, 4, 8, 16, 32, 64]),
)
def test_the_largest_that_fits_is_found_and_recomputes_only_if_it_is_small(
    share: int, limit: int, enough: int
) -> None:
    search = table(auto(share, enough))
    largest = {
        mode: max((n for n in search.sizes if search.predict(n, mode) <= limit), default=0)
        for mode in MODES
    }
    expected = next((m for m in MODES if largest[m] >= min(enough, share)), None)
    if expected is None:
        expected = max(MODES, key=lambda mode: largest[mode])
    found = search.largest(limit)
    if not largest[expected]:
        assert found is None
    else:
        needed_bytes = search.predict(largest[expected], expected)
        assert found == MemoryFit(largest[expected], expected, needed_bytes)


@pytest.mark.slow
def test_what_is_predicted_grows_and_the_least_is_what_fits_last() -> None:
    wanted = config(activation_checkpointing="auto")
    search = MemorySearch(wanted, 1, model_of(wanted))
    for mode in MODES:
        needs = [search.predict(n, mode) for n in search.sizes]
        assert needs == sorted(needs)
    least = search.smallest()
    assert search.largest(least.needed_bytes) == least
    assert search.largest(least.needed_bytes - 1) is None


@pytest.mark.parametrize(
    ("values", "num_workers", "ways"),
    [
        ({}, 1, "set activation_checkpointing to auto, lower num_layers"),
        ({"activation_checkpointing": "full"}, 2, "set parallel to fsdp, lower num_layers"),
        ({"micro_batch_sequences": 3, "exact": True}, 2, "set micro_batch_sequences to 1, "),
        ({"micro_batch_sequences": 3}, 1, "set micro_batch_sequences to auto, "),
    ],
)
def test_what_does_not_fit_is_answered_with_the_settings_that_can_still_save_memory(
    values: dict[str, Any], num_workers: int, ways: str
) -> None:
    run = config(**values)
    search = MemorySearch(run, num_workers, model_of(run, num_workers))
    assert search.advice.startswith(ways)
    assert "fsdp" not in search.advice or not run.train.exact
