"""`auto` memory settings: reuse on resume, log lines and errors, and real runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raytrain_gpt.checkpoint.catalog import Catalog, Checkpoint
from raytrain_gpt.config.plan import Plan
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.memory import TrainingMemory
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.errors import ClusterError, TrainingFailed
from raytrain_gpt.events import Events
from raytrain_gpt.storage.location import Location
from raytrain_gpt.train import memory_fit
from raytrain_gpt.train.launch import train
from raytrain_gpt.train.memory_fit import (
    MIN_EFFICIENT_TOKENS,
    MODES,
    GpuFacts,
    MemoryFit,
    MemorySearch,
    fit_from_checkpoint,
    fit_memory,
)
from raytrain_gpt.train.rank import train_rank
from raytrain_gpt.train.worker_group import RankJob
from tests.checkpoint.test_catalog import state
from tests.conftest import raises_line
from tests.made_runs import MakeConfig

VOCAB_SIZE = 257


def config(**values: object) -> Config:
    sizes = {
        "num_layers": 2, "num_heads": 2, "embd_size": 32, "seq_len": 32,
        "global_batch_tokens": 24 * 32, "micro_batch_sequences": "auto",
        "activation_checkpointing": "auto",
        "precision": "fp32",  # `auto` depends on the CPU
    }  # fmt: skip
    workers = {"num_workers": 2, "use_gpu": False, "cpus_per_worker": 2}
    return Config().updated({**sizes, **workers, **values})


BEFORE = Plan.of(config(), 2, 4, "selective").config


@pytest.mark.parametrize(
    ("changes", "world_size", "kept"),
    [
        ({}, 2, MemoryFit(4, "selective")),
        ({"micro_batch_sequences": 4}, 2, MemoryFit(4, "selective")),
        ({"micro_batch_sequences": 6}, 2, None),
        ({}, 1, None),
        ({"compile": True}, 2, None),
        ({"global_batch_tokens": 20 * 32}, 2, None),
    ],
)
def test_a_run_keeps_what_its_checkpoint_had_while_the_same_fits(
    changes: dict[str, object], world_size: int, kept: MemoryFit | None
) -> None:
    stored = replace(state(20), config=BEFORE.model_dump(), num_workers=2)
    before = Checkpoint(Location.of("step=00000020"), stored, 0)
    assert fit_from_checkpoint(config(**changes), world_size, before) == kept


def test_numbers_stay_and_nobody_is_asked() -> None:
    given = config(micro_batch_sequences=6, activation_checkpointing="none")
    plan = fit_memory(given, 2, VOCAB_SIZE, pytest.fail)
    assert plan.config.field_values() == given.field_values()
    assert (plan.world_size, plan.worker_sequences, plan.micro_batches_per_step) == (2, 12, 2)
    lines: list[str] = []
    larger = config(micro_batch_sequences=8, activation_checkpointing="none")
    fewer = fit_memory(larger, 4, 1, lines.append)
    assert fewer.config.train.micro_batch_sequences == 6
    assert (fewer.worker_sequences, fewer.micro_batches_per_step) == (6, 1)
    assert lines == ["micro_batch_sequences 8 -> 6, to divide the 6 sequences per worker and step"]


@pytest.mark.slow
def test_much_memory_needs_no_recomputing_and_little_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[str] = []

    def fit(gigabytes: float) -> Plan:
        gpu = GpuFacts("H100", gigabytes * 1e9, bf16=True)
        monkeypatch.setattr(memory_fit, "gpu_facts", lambda _: gpu)
        return fit_memory(config(use_gpu=True), 2, VOCAB_SIZE, lines.append)

    train = fit(80).config.train
    assert (train.micro_batch_sequences, train.activation_checkpointing) == (12, "none")
    assert lines[0].startswith(
        "micro_batch_sequences auto: 12 of 12, activation_checkpointing auto: none (about "
    )
    assert lines[0].endswith(" of 71.5 GB of H100)")
    ways = (
        "with activation_checkpointing=full",
        "set parallel to fsdp, lower num_layers",
        "1 × 32 tokens",
        "may use only 0 B of H100",
    )
    with raises_line(ClusterError, *ways):
        fit(1)
    assert len(lines) == 1


PER_SEQUENCE: dict[str, int] = {"none": 10, "selective": 6, "full": 3}
STATE = 20


def searched(**values: object) -> Config:
    return config(**{"use_gpu": True, "activation_checkpointing": "none", **values})


@dataclass(frozen=True)
class Table(MemorySearch):
    """Search with a made-up prediction, which grows with the sequences."""

    def predict(self, sequences: int, mode: str) -> TrainingMemory:
        return TrainingMemory(STATE, 0, 0, sequences * PER_SEQUENCE[mode], 0)


def table(config: Config, world_size: int = 1) -> Table:
    return Table(config, GPTShape.of(config, VOCAB_SIZE), True, world_size)


def sizes(config: Config, world_size: int) -> list[int]:
    return table(config, world_size).sizes


def test_candidates_are_the_divisors_of_a_ranks_share() -> None:
    assert sizes(searched(), 1) == [1, 2, 3, 4, 6, 8, 12, 24]
    assert sizes(searched(), 2) == [1, 2, 3, 4, 6, 12]
    assert sizes(searched(), 24) == [1]
    assert sizes(searched(micro_batch_sequences=4), 2) == [4]
    assert sizes(searched(micro_batch_sequences=8), 2) == [6]
    huge = searched(seq_len=1, global_batch_tokens=10**11)
    assert sizes(huge, 1)[-1] == 64_000
    assert sizes(huge.updated({"use_gpu": False}), 1)[-1] == 2048


def auto(share: int, enough: int) -> Config:
    """Return a configuration with `share` sequences; `enough` of them suffice without recomputing."""
    seq_len = MIN_EFFICIENT_TOKENS // enough
    return searched(
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
        mode: max((n for n in search.sizes if search.predict(n, mode).total <= limit), default=0)
        for mode in MODES
    }
    expected = next((m for m in MODES if largest[m] >= min(enough, share)), None)
    if expected is None:
        expected = max(MODES, key=lambda mode: largest[mode])
    found = search.largest(limit)
    if not largest[expected]:
        assert found is None
    else:
        needed_bytes = search.predict(largest[expected], expected).total
        assert found == MemoryFit(largest[expected], expected, needed_bytes)


def test_what_is_predicted_grows_and_the_least_is_what_fits_last() -> None:
    wanted = searched(activation_checkpointing="auto")
    search = MemorySearch.of(wanted, 1, VOCAB_SIZE, bf16=True)
    for mode in MODES:
        needs = [search.predict(n, mode).total for n in search.sizes]
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
    run = searched(**values)
    search = MemorySearch.of(run, num_workers, VOCAB_SIZE, bf16=True)
    assert search.advice.startswith(ways)
    assert "fsdp" not in search.advice or not run.train.exact


AUTO = {
    "micro_batch_sequences": "auto", "activation_checkpointing": "auto",
    "max_steps": 20, "checkpoint_every_steps": 10, "eval_every_steps": 10, "dropout": 0.1,
}  # fmt: skip


def fits_six(spec: RankJob) -> Events:
    """Train, but run out of memory with more than six sequences; runs in the worker."""
    micro = spec.plan.config.train.micro_batch_sequences
    if micro > 6:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    yield from train_rank(spec)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.ray)])
def test_a_lack_of_memory_halves_the_micro_batch_and_the_checkpoint_remembers_it(
    num_workers: int, make_config: MakeConfig
) -> None:
    lines: list[str] = []
    short = {**AUTO, "num_workers": num_workers, "run_name": f"short-of-memory-{num_workers}"}
    summary = train(make_config(**short, max_failures=0), lines.append, fits_six)
    said = "out of memory with micro_batch_sequences 12; the next attempt uses 6"
    assert lines.count(said) == 1
    newest = Catalog(summary.run_dir).complete()[-1]
    assert newest.state.config["train"]["micro_batch_sequences"] == 6
    lines.clear()
    train(make_config(**{**short, "max_steps": 30}, max_failures=0), lines.append, fits_six)
    (kept,) = [line for line in lines if line.startswith("micro_batch_sequences auto: 6 of 12")]
    assert kept.endswith("from the checkpoint of step 20")
    changed = [line for line in lines if line.startswith("changed since that checkpoint")]
    assert changed == ["changed since that checkpoint: max_steps 20 -> 30"]
    assert said not in lines


def test_one_sequence_that_is_too_much_is_one_line(make_config: MakeConfig) -> None:
    def fits_none(spec: RankJob) -> Events:
        yield from ()
        raise torch.OutOfMemoryError("CUDA out of memory")

    values = {"micro_batch_sequences": 1, "num_workers": 0, "run_name": "no-memory"}
    with raises_line(TrainingFailed, "micro_batch_sequences=1", "lower num_layers"):
        train(make_config(**values), print, fits_none)
