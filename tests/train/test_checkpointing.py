"""A rank's model and checkpoints: set up, saved and restored, without Ray processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raytrain_gpt.checkpoint.catalog import Catalog, Checkpoint
from raytrain_gpt.checkpoint.collectives import Collectives
from raytrain_gpt.config.plan import Plan
from raytrain_gpt.core.state import MODEL_FILE
from raytrain_gpt.data.locations import read_data
from raytrain_gpt.data.order import Position
from raytrain_gpt.data.tokenizer_file import read_tokenizer
from raytrain_gpt.errors import ClusterError
from raytrain_gpt.events import Link, Outbox, Rows
from raytrain_gpt.storage.lease import LEASE_FILE, hold_lease
from raytrain_gpt.storage.location import Location
from raytrain_gpt.train import checkpointing
from raytrain_gpt.train.checkpointing import Checkpointing
from raytrain_gpt.train.model_setup import TrainingSetup, files_on_machine, set_up_training
from tests.checkpoint.test_catalog import write
from tests.made_runs import MakeConfig
from tests.training import thread_ranks

CPU = torch.device("cpu")


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record the reports to Ray Train."""
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(
        checkpointing.ray.train, "report", lambda metrics, **_: told.append(metrics)
    )
    return told


@pytest.fixture(scope="module")
def plan(make_config: MakeConfig) -> Plan:
    config = make_config(num_workers=1, keep_checkpoints=1, use_gpu=False)
    return Plan.of(config, 1, config.batch_sequences, "none")


def set_up(plan: Plan, resumed: Checkpoint | None = None) -> TrainingSetup:
    return set_up_training(plan, read_data(plan.config), resumed, CPU, Collectives(0, 1))


def update(setup: TrainingSetup) -> None:
    tokens = torch.arange(33)[None]
    setup.model(tokens[:, :-1], tokens[:, 1:]).backward()
    setup.optimizer.step()
    setup.optimizer.zero_grad()


def trained(plan: Plan) -> TrainingSetup:
    """Return a setup after one update; before it, the optimizer has no moments to save."""
    setup = set_up(plan)
    update(setup)
    return setup


def made(
    plan: Plan, setup: TrainingSetup, run_dir: Location, token: str
) -> tuple[Checkpointing, Any, Outbox]:
    spec: Any = SimpleNamespace(
        plan=plan,
        resumed=None,
        run_dir=run_dir,
        data=read_data(plan.config),
        attempt=1,
        lease_token=token,
        link=Link(),
    )
    log: Any = SimpleNamespace(
        position=Position(7, "ab", ((2, 4),)),
        in_bad_stretch=False,
        exclude_time=lambda seconds: None,
    )
    outbox = Outbox(0)
    return Checkpointing(spec, setup, log, Collectives(0, 1), outbox), log, outbox


def test_a_checkpoint_has_all_that_the_next_attempt_needs(
    plan: Plan, reports: list[dict[str, Any]], tmp_path: Path
) -> None:
    run_dir = Location.of(tmp_path / "run")
    setup = trained(plan)
    with hold_lease(run_dir / LEASE_FILE, "run") as lease:
        checkpoints, _, outbox = made(plan, setup, run_dir, lease.token)
        checkpoints.collect()  # nothing is in flight
        rows = [{"step": 4, "train/loss": 3.0}, {"step": 5, "train/loss": 2.0, "perf/mfu": None}]
        checkpoints.add_rows([*rows, {"step": 5, "event": "epoch", "time": 1.0}])
        checkpoints.begin(5, val_loss=2.5)
        weights = [p.detach().clone() for p in setup.raw_model.parameters()]
        update(setup)  # while the checkpoint is being written
        checkpoints.collect()
    (checkpoint,) = Catalog(run_dir).complete()
    checkpoint.verify()
    state = checkpoint.state
    assert (state.step, state.next_batch, state.order_hash, state.skipped_batches) == (
        5,
        7,
        "ab",
        ((2, 4),),
    )
    assert (state.val_loss, state.tokens_seen) == (2.5, 5 * plan.config.train.global_batch_tokens)
    assert checkpoint.rows()[:2] == rows
    assert read_tokenizer(checkpoint.path).n_vocab == setup.tokenizer.n_vocab
    assert reports == [{"step": 5, "val_loss": 2.5, "train/loss": 2.0}]
    ((row,),) = [event.rows for event in outbox.take() if isinstance(event, Rows)]
    assert (row["step"], row["event"]) == (5, "checkpoint")
    assert row.keys() > {"perf/checkpoint_blocked_s", "perf/checkpoint_write_s"}

    again = set_up(plan, checkpoint)
    for found, expected in zip(again.raw_model.parameters(), weights, strict=True):
        assert torch.equal(found, expected)
    update(again)  # the optimizer's moments are also restored
    for found, other in zip(
        again.raw_model.parameters(), setup.raw_model.parameters(), strict=True
    ):
        assert torch.equal(found, other)


def test_new_runs_have_the_weights_of_their_seed_or_of_init_from(
    plan: Plan, reports: list[dict[str, Any]], tmp_path: Path
) -> None:
    first, second = set_up(plan), set_up(plan)
    for a, b in zip(first.raw_model.parameters(), second.raw_model.parameters(), strict=True):
        assert torch.equal(a, b)
    update(first)
    run_dir = Location.of(tmp_path / "run")
    with hold_lease(run_dir / LEASE_FILE, "run") as lease:
        checkpoints, _, _ = made(plan, first, run_dir, lease.token)
        checkpoints.begin(5, val_loss=None)
        checkpoints.collect()
    assert reports == [{"step": 5, "val_loss": -1.0}], "Ray does not accept a missing loss"
    source = str(Catalog(run_dir).complete()[0].path)
    begun = set_up(replace(plan, config=plan.config.replaced({"init_from": source})))
    for a, b in zip(begun.raw_model.parameters(), first.raw_model.parameters(), strict=True):
        assert torch.equal(a, b)
    states = begun.optimizer.state.values()
    assert not any(tensor.any() for state in states for tensor in state.values())


def test_in_a_bad_stretch_the_checkpoint_before_it_stays(
    plan: Plan, reports: list[dict[str, Any]], tmp_path: Path
) -> None:
    run_dir = Location.of(tmp_path / "run")
    kept = []
    with hold_lease(run_dir / LEASE_FILE, "run") as lease:
        checkpoints, log, _ = made(plan, trained(plan), run_dir, lease.token)
        for step, in_bad_stretch in ((5, False), (10, False), (15, True), (20, False)):
            log.in_bad_stretch = in_bad_stretch
            checkpoints.begin(step, val_loss=None)
            checkpoints.collect()
            kept.append([c.state.step for c in Catalog(run_dir).complete()])
    assert kept == [[5], [10], [10, 15], [20]]


def test_whoever_lost_the_run_s_name_writes_no_more(
    plan: Plan, reports: list[dict[str, Any]], tmp_path: Path
) -> None:
    run_dir = Location.of(tmp_path / "run")
    with hold_lease(run_dir / LEASE_FILE, "run"):
        checkpoints, _, _ = made(plan, trained(plan), run_dir, "another token")
        checkpoints.begin(5, val_loss=None)
        with pytest.raises(ClusterError, match="taken over by another process"):
            checkpoints.collect()
    assert Catalog(run_dir).complete() == []
    assert reports == []


def test_the_ranks_of_a_machine_fetch_a_checkpoint_once(
    bucket: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks read the download before it is removed; on a disk, each reads the original."""
    fetched = []
    download = Location.download

    def counted(self: Location, target: Path) -> None:
        fetched.append(target.name)
        download(self, target)

    monkeypatch.setattr(Location, "download", counted)

    def read(checkpoint: Checkpoint, ranks: Any) -> tuple[Path, bytes]:
        with files_on_machine(checkpoint, ranks) as directory:
            return directory, (directory / MODEL_FILE).read_bytes()

    for storage in (bucket / "shared", Location.of(tmp_path)):
        write(Catalog(storage), 20)
        (checkpoint,) = Catalog(storage).complete()
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(partial(read, checkpoint), thread_ranks(3)))
        assert len(set(found)) == 1
        assert found[0][0].exists() == checkpoint.path.is_local
    assert fetched.count(MODEL_FILE) == 1
