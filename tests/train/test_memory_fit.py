"""`auto` memory settings: reuse on resume, memory of the nodes, log lines and errors, and real runs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.cluster.capacity import Node, Resources
from raytrain_gpt.config.resolved import RunPlan
from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import ClusterError, TrainingFailed
from raytrain_gpt.tracking.summary import RunSummary
from raytrain_gpt.train.launch import train
from raytrain_gpt.train.memory_fit import (
    PROCESS_BYTES,
    MemoryFit,
    cpu_limit_bytes,
    fit_from_checkpoint,
    fit_memory,
)
from raytrain_gpt.train.worker import train_worker
from raytrain_gpt.train.worker_group import WorkerSpec
from tests.checkpoint.test_catalog import state
from tests.conftest import raises_line
from tests.runs import MakeConfig, restarted_from, weights

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


def nodes(*found: Node) -> Resources:
    return Resources(found, ours=False)


BEFORE = RunPlan.of(config(), 2, 4, "selective").config


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
    before = replace(state(20), config=BEFORE.model_dump(), num_workers=2)
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


def test_the_memory_of_a_node_is_shared_by_its_workers() -> None:
    def limit(world_size: int, *found: Node) -> float:
        return cpu_limit_bytes(config(), world_size, VOCAB_SIZE, nodes(*found))

    one = limit(1, Node(8, 0, 16e9))
    assert 12e9 < one < 14e9
    assert limit(1, Node(8, 0, 16e9), Node(8, 0, 8e9)) < one / 1.9
    assert limit(1, Node(8, 0, 16e9), Node(1, 0, 1e9)) == one  # too few CPUs for a worker
    assert limit(2, Node(8, 0, 16e9)) == pytest.approx(limit(1, Node(8, 0, 8e9)))
    assert limit(9, Node(8, 0, 16e9)) == limit(4, Node(8, 0, 16e9)) < 4e9
    assert math.isinf(limit(2, Node(8, 0)))


@pytest.mark.slow
def test_much_memory_needs_no_recomputing_and_little_is_one_line() -> None:
    lines: list[str] = []
    there = nodes(Node(8, 0, 64e9))

    def fit(given: Config) -> RunPlan:
        return fit_memory(given, 2, VOCAB_SIZE, lines.append, lambda: there)

    train = fit(config()).config.train
    assert (train.micro_batch_sequences, train.activation_checkpointing) == (12, "none")
    assert lines[0].startswith(
        "micro_batch_sequences auto: 12 of 12, activation_checkpointing auto: none ("
    )
    assert lines[0].endswith(" per worker, estimated)")
    there = nodes(Node(8, 0, PROCESS_BYTES))
    ways = (
        "with activation_checkpointing=full",
        "set parallel to fsdp, lower num_layers",
        "1 × 32 tokens",
    )
    with raises_line(ClusterError, *ways):
        fit(config())
    assert len(lines) == 1


AUTO = {
    "micro_batch_sequences": "auto", "activation_checkpointing": "auto",
    "max_steps": 20, "checkpoint_every_steps": 10, "eval_every_steps": 10, "dropout": 0.1,
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(make_config: MakeConfig) -> RunSummary:
    """Train an uninterrupted run with `auto`."""
    lines: list[str] = []
    summary = train(make_config(**AUTO, run_name="auto"), lines.append)
    assert sum(line.startswith("micro_batch_sequences auto: 12 of 12") for line in lines) == 1
    return summary


@pytest.mark.slow
def test_a_run_with_auto_goes_on_as_the_unbroken_one(
    whole: RunSummary, make_config: MakeConfig, storage: Path
) -> None:
    newest = Catalog(whole.run_dir).complete()[-1]
    assert newest.state.config["train"]["micro_batch_sequences"] == 12
    copy = restarted_from(whole, 10, storage, "auto-resumed")
    lines: list[str] = []
    train(make_config(**AUTO, run_name="auto-resumed"), lines.append)
    assert any(line.endswith("from the checkpoint of step 10") for line in lines)
    assert [line for line in lines if line.startswith("changed")] == [
        "changed since that checkpoint: run_name auto -> auto-resumed"
    ]
    assert weights(copy) == weights(whole.run_dir)


def fits_six(spec: WorkerSpec) -> None:
    """Train, but run out of memory with more than six sequences; runs in the worker."""
    micro = spec.plan.config.train.micro_batch_sequences
    if micro > 6:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    train_worker(spec)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.ray)])
def test_a_lack_of_memory_halves_the_micro_batch_and_the_checkpoint_remembers_it(
    num_workers: int, make_config: MakeConfig
) -> None:
    lines: list[str] = []
    short = {**AUTO, "num_workers": num_workers, "run_name": f"short-of-memory-{num_workers}"}
    summary = train(make_config(**short, max_failures=0), lines.append, fits_six)
    said = "out of memory with micro_batch_sequences 12; the next attempt takes 6"
    assert lines.count(said) == 1
    newest = Catalog(summary.run_dir).complete()[-1]
    assert newest.state.config["train"]["micro_batch_sequences"] == 6
    lines.clear()
    train(make_config(**{**short, "max_steps": 30}), lines.append, fits_six)
    assert any("micro_batch_sequences auto: 6 of 12" in line for line in lines)
    assert said not in lines


def test_one_sequence_that_is_too_much_is_one_line(make_config: MakeConfig) -> None:
    def fits_none(spec: WorkerSpec) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    values = {"micro_batch_sequences": 1, "num_workers": 0, "run_name": "no-memory"}
    with raises_line(TrainingFailed, "micro_batch_sequences=1", "lower num_layers"):
        train(make_config(**values), print, fits_none)
