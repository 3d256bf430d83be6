"""Training data of each step: computed from the run's files, compared with the rank's actual input."""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from raytrain_gpt import batch_at
from raytrain_gpt.config.call_options import PrepareOptions
from raytrain_gpt.data.order import Ids
from raytrain_gpt.data.tokenizer_file import read_tokenizer
from raytrain_gpt.errors import DataError
from raytrain_gpt.ingest.prepare import prepare
from raytrain_gpt.ingest.ray_dataset import RankChunk
from raytrain_gpt.runs.provenance import RunProvenance
from raytrain_gpt.runs.summary import RunSummary
from raytrain_gpt.train import rank as rank_module
from raytrain_gpt.train.launch import train
from raytrain_gpt.train.step_log import StepLog
from tests.conftest import RunCli, raises_line
from tests.data.families import write_family
from tests.data.shard_tools import prepare_here
from tests.faults.gates import Faults, gated
from tests.made_runs import MakeConfig

pytestmark = pytest.mark.slow

Given = dict[int, list[int]]
"""Ids of each step's sequences, in batch order."""

PLANTED = "the planted sentence"
SMALL_DATA = {"max_steps": 60, "seq_len": 32, "global_batch_tokens": 12 * 32, "embd_size": 16}


@contextlib.contextmanager
def recording() -> Iterator[Given]:
    """Record the sequence ids that a run's only rank receives; a repeated step replaces the first."""
    found: Given = {}
    read: deque[Ids] = deque()
    chunks, flush = rank_module.rank_chunks, StepLog.flush

    def recorded_chunks(*args: Any) -> Iterator[RankChunk]:
        read.clear()
        for number, chunk in enumerate(chunks(*args)):
            if number:  # the first chunk is for validation
                read.extend(chunk.ids)
            yield chunk

    def recorded_flush(log: StepLog, late: bool = False) -> Any:
        for result, _ in log._pending:
            found[result.step] = read.popleft().tolist()
        return flush(log, late)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_module, "rank_chunks", recorded_chunks)
        patch.setattr(StepLog, "flush", recorded_flush)
        yield found


@pytest.fixture(scope="session")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare a dataset of 400 short documents; every 40th has a sentence that the others lack."""
    root = tmp_path_factory.mktemp("stories")
    lines = [
        json.dumps({"text": f"story {n}: {'once ' * (n % 7)}{PLANTED * (n % 40 == 0)} end"})
        for n in range(400)
    ]
    Path(root, "stories.jsonl").write_text("\n".join(lines))
    prepare_here([str(root / "stories.jsonl")], root / "data", "bytes", val_fraction=0.1)
    return root / "data"


@pytest.fixture(scope="session")
def plain(make_config: MakeConfig, stories: Path) -> tuple[RunSummary, Given]:
    """Train a run on the stories; return it and what its rank received."""
    with recording() as given:
        config = make_config(run_name="told", data_path=str(stories), **SMALL_DATA)
        return train(config, print), given


def told(run: RunSummary) -> Given:
    """Return the same mapping, computed from the run's files."""
    data = RunProvenance(run.run_dir)
    return {step: [one.id for one in data.step(step)] for step in range(1, data.last_step + 1)}


def test_of_a_plain_run_with_text_shard_and_row(
    plain: tuple[RunSummary, Given], stories: Path
) -> None:
    run, given = plain
    assert told(run) == given
    assert len(given) == 60
    assert len({i for ids in given.values() for i in ids}) < 60 * 12, "several epochs"
    tokenizer = read_tokenizer(stories)
    for one in RunProvenance(run.run_dir).step(7):
        tokens = pq.read_table(stories / one.shard)["tokens"].to_numpy()
        assert one.text == tokenizer.decode(tokens[one.row : one.row + 33].tolist())
    assert batch_at("told", 7, str(run.run_dir.parent)) == batch_at(str(run.run_dir), 7)


def test_of_a_mixture(make_config: MakeConfig, stories: Path, dataset: Path) -> None:
    mixed = f"{stories}=0.3,{dataset}=0.7"
    with recording() as given:
        run = train(make_config(run_name="told-mixed", data_path=mixed, **SMALL_DATA), print)
    assert told(run) == given
    named = [one.dataset for one in RunProvenance(run.run_dir).step(5)]
    assert set(named) == {stories.name, dataset.name}


def test_after_a_rollback(make_config: MakeConfig) -> None:
    spiked = tuple(range(24, 34))
    config = make_config(
        run_name="told-rollback", spike_window_steps=16, spike_patience=len(spiked), skip_before=2
    )
    with recording() as given:
        run = train(config, print, gated(Faults(spiked_batches=spiked)))
    assert told(run) == given
    data = RunProvenance(run.run_dir)
    assert [data.batch_of(step) for step in (22, 23, 50)] == [21, 34, 61]
    skipped = data.batch(24)
    assert not {one.id for one in skipped} & {i for ids in given.values() for i in ids}


def test_a_text_is_found_at_every_step_that_had_it_and_in_no_other(
    plain: tuple[RunSummary, Given], run_cli: RunCli
) -> None:
    run, _ = plain
    data = RunProvenance(run.run_dir)
    had = {
        step: {one.id for one in data.step(step) if PLANTED in one.text} for step in range(1, 61)
    }
    out = run_cli.succeeds("data", "find", PLANTED, run.run_dir, "--json")
    answer = json.loads(out.splitlines()[-1])
    found = {one["step"]: {s["id"] for s in one["sequences"]} for one in answer["steps"]}
    assert found == {step: ids for step, ids in had.items() if ids}
    assert len(found) > 3
    assert answer["cut"] > 0, "some occurrences are split across two sequences"
    assert data.find("nobody wrote this") == {"steps": [], "cut": 0}


def test_a_text_is_found_as_its_tokenizer_reads_it(make_config: MakeConfig, tmp_path: Path) -> None:
    write_family("qwen3", tmp_path / "theirs")
    (tmp_path / "a.txt").write_text("a cafe\u0301 line\n" * 500)
    source, data_path = [str(tmp_path / "a.txt")], tmp_path / "data"
    prepare(
        source, data_path, str(tmp_path / "theirs"), PrepareOptions(val_fraction=0.1), log=print
    )
    run = train(make_config(data_path=str(data_path), max_steps=2), print)
    data = RunProvenance(run.run_dir)
    assert data.find("cafe\u0301 line")["steps"] == data.find("caf\xe9 line")["steps"] != []
    assert data.find("\udc80") == {"steps": [], "cut": 0}


def test_the_command_shows_and_tells(
    plain: tuple[RunSummary, Given], run_cli: RunCli, storage: Path
) -> None:
    argv = ("data", "at", plain[0].run_dir.name, "--storage_path", storage)
    out = run_cli.succeeds(*argv, "--step", 3, "--worker", 0, "--json")
    lines = [line for line in out.splitlines() if line.startswith("sequence ")]
    answer = json.loads(out.splitlines()[-1])
    assert (answer["step"], len(answer["sequences"]), len(lines)) == (3, 12, 12)
    for line, one in zip(lines, answer["sequences"], strict=True):
        assert f"sequence {one['id']} | data {one['shard']} row {one['row']} |" in line
        assert repr(one["text"])[:20] in line
    cases = {
        ("--step", 61): "has trained steps 1 to 60; set --step to one of them",
        ("--step", 3, "--worker", 1): "--worker 1: step 3 had 1 worker; set it to 0 to 0",
        ("--batch", 3, "--worker", 0): "takes --step N or --batch N; --worker needs --step",
        (): "data at takes --step N or --batch N",
    }
    for more, words in cases.items():
        assert words in run_cli.refuses(*argv, *more)


def test_other_data_than_the_runs_is_refused(
    plain: tuple[RunSummary, Given], dataset: Path
) -> None:
    """Otherwise the wrong sequences would be reported for the steps."""
    run_dir = plain[0].run_dir
    with raises_line(DataError, "was trained on different data", "restore the old dataset"):
        RunProvenance(run_dir, str(dataset))
