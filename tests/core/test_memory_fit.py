"""The choice of a micro-batch: what fits, as few tries as possible, and the same maths."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raytrain_gpt.config.resolved import ActivationCheckpointing
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.memory_fit import (
    ENOUGH_TOKENS,
    MODES,
    MOST_CPU_TOKENS,
    Fit,
    Needed,
    candidates,
    choose,
    counted,
    fit,
    least,
    tried,
    try_steps,
)
from raytrain_gpt.core.model import GPTShape

VOCAB_SIZE = 257
CPU = torch.device("cpu")
PER_SEQUENCE: dict[ActivationCheckpointing, int] = {"none": 10, "selective": 6, "full": 3}
STATE = 20


def config(**values: object) -> Config:
    sizes = {
        "num_layers": 2, "num_heads": 2, "embd_size": 32, "seq_len": 32,
        "global_batch_tokens": 24 * 32, "micro_batch_sequences": "auto", "use_gpu": True,
    }  # fmt: skip
    return Config().updated({**sizes, **values})


def within(limit: int, asked: list[tuple[int, ActivationCheckpointing]] | None = None) -> Needed:
    """A device with so many bytes, on which needs grow with the sequences."""

    def needed(sequences: int, mode: ActivationCheckpointing) -> int | None:
        if asked is not None:
            asked.append((sequences, mode))
        num_bytes = STATE + sequences * PER_SEQUENCE[mode]
        return num_bytes if num_bytes <= limit else None

    return needed


def test_candidates_are_the_divisors_of_a_ranks_share() -> None:
    assert candidates(config(), 1) == [1, 2, 3, 4, 6, 8, 12, 24]
    assert candidates(config(), 2) == [1, 2, 3, 4, 6, 12]
    assert candidates(config(), 24) == [1]
    assert candidates(config(micro_batch_sequences=4), 2) == [4]


def test_a_cpu_gets_no_more_tokens_than_it_is_fast_with_but_a_whole_sequence() -> None:
    batch = 64 * MOST_CPU_TOKENS
    for seq_len, largest in ((MOST_CPU_TOKENS // 16, 16), (MOST_CPU_TOKENS, 1), (batch, 1)):
        on_cpu = config(use_gpu=False, seq_len=seq_len, global_batch_tokens=batch)
        assert candidates(on_cpu, 1)[-1] == largest
        assert candidates(on_cpu.updated({"use_gpu": True}), 1)[-1] == batch // seq_len


@given(
    sizes=st.sets(st.integers(1, 64), min_size=1).map(sorted),
    limit=st.integers(0, 700),
    wrong=st.integers(-300, 300),
    enough=st.integers(1, 64),
)
def test_the_largest_that_fits_is_found_however_wrong_the_guess(
    sizes: Sequence[int], limit: int, wrong: int, enough: int
) -> None:
    asked: list[tuple[int, ActivationCheckpointing]] = []
    found = choose(sizes, MODES, within(limit, asked), within(limit + wrong), enough)
    largest = {
        mode: max((n for n in sizes if STATE + n * PER_SEQUENCE[mode] <= limit), default=0)
        for mode in MODES
    }
    expected = next((m for m in MODES if largest[m] >= min(enough, sizes[-1])), None)
    if expected is None:
        expected = max(MODES, key=lambda mode: largest[mode])
    if not largest[expected]:
        assert found is None
    else:
        needed_bytes = STATE + largest[expected] * PER_SEQUENCE[expected]
        assert found == Fit(largest[expected], expected, needed_bytes)
    assert len(asked) == len(set(asked))


def test_more_memory_is_never_used_for_fewer_sequences_at_the_same_recomputing() -> None:
    sizes = [1, 2, 3, 4, 6, 8, 12, 24]
    found = [choose(sizes, MODES, within(n), within(n), 4) for n in range(300)]
    assert found[0] is None
    for little, much in itertools.pairwise(f for f in found if f is not None):
        assert MODES.index(much.activation_checkpointing) <= MODES.index(
            little.activation_checkpointing
        )
        if much.activation_checkpointing == little.activation_checkpointing:
            assert much.sequences >= little.sequences
    assert found[-1] == Fit(24, "none", 260)


def test_a_right_guess_costs_two_tries() -> None:
    asked: list[tuple[int, ActivationCheckpointing]] = []
    found = choose([1, 2, 4, 8, 16], MODES, within(70, asked), within(70), 4)
    assert found == Fit(4, "none", 60)
    assert asked == [(4, "none"), (8, "none")]


def test_recomputing_only_where_too_little_fits_without() -> None:
    seq_len = ENOUGH_TOKENS // 4
    auto = config(
        seq_len=seq_len, global_batch_tokens=24 * seq_len, activation_checkpointing="auto"
    )
    chosen = [fit(auto, 1, within(limit)) for limit in (22, 23, 43, 44, 59, 60)]
    assert chosen == [
        None,
        Fit(1, "full", 23),
        Fit(6, "full", 38),
        Fit(4, "selective", 44),
        Fit(6, "selective", 56),
        Fit(4, "none", 60),
    ]
    fixed = auto.updated({"activation_checkpointing": "none"})
    assert fit(fixed, 1, within(44)) == Fit(2, "none", 40)


def test_what_is_counted_grows_and_the_least_is_what_fits_last() -> None:
    auto = config(activation_checkpointing="auto")
    shape = GPTShape.of(auto, VOCAB_SIZE)
    endless = counted(auto, 1, shape, bf16=True, limit_bytes=float("inf"))
    for mode in MODES:
        needs = [endless(n, mode) for n in candidates(auto, 1)]
        assert needs == sorted(n for n in needs if n is not None)
    last = least(auto, 1, shape, bf16=True)
    assert fit(auto, 1, counted(auto, 1, shape, True, last.needed_bytes)) == last
    assert fit(auto, 1, counted(auto, 1, shape, True, last.needed_bytes - 1)) is None


def out_of_memory_above(
    room: int, tries: list[int]
) -> Callable[[int, ActivationCheckpointing], int]:
    """Real steps on the CPU, with an end of memory at some size."""

    def steps(sequences: int, mode: ActivationCheckpointing) -> int:
        tries.append(sequences)
        if sequences > room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return try_steps(config(), sequences, mode, 2, VOCAB_SIZE, CPU)

    return steps


@pytest.mark.parametrize(("room", "tries"), [(4, [4, 6]), (12, [4, 6, 12]), (2, [4, 3, 2])])
def test_real_steps_decide_and_running_out_of_memory_is_an_answer(
    room: int, tries: list[int]
) -> None:
    seen: list[int] = []
    guess = within(STATE + 4 * PER_SEQUENCE["none"])
    found = fit(config(), 2, tried(out_of_memory_above(room, seen)), guess)
    assert found == Fit(room, "none", 0)
    assert seen == tries


def test_what_is_wrong_with_a_step_besides_memory_is_not_swallowed() -> None:
    def steps(_sequences: int, _mode: ActivationCheckpointing) -> int:
        raise RuntimeError("no kernel image is available")

    with pytest.raises(RuntimeError, match="no kernel image"):
        fit(config(), 1, tried(steps))


@pytest.mark.parametrize("mode", MODES)
def test_steps_that_are_tried_are_the_runs_own(mode: ActivationCheckpointing) -> None:
    """With accumulation, dropout and bf16."""
    values = {"dropout": 0.1, "precision": "bf16"}
    assert try_steps(config(**values), 3, mode, 2, VOCAB_SIZE, CPU) == 0
