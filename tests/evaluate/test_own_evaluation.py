"""Evaluations by name: in runs, for checkpoints, over ranks, and as the objective of a sweep."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from raytrain_gpt.checkpoint.catalog import CODE_FILE, Catalog
from raytrain_gpt.checkpoint.open import open_checkpoint
from raytrain_gpt.columns import ROW_PREFIXES
from raytrain_gpt.config.code import Code
from raytrain_gpt.config.kinds import Registry
from raytrain_gpt.core.registry import configured_model
from raytrain_gpt.data.tokenizer import load_tokenizer
from raytrain_gpt.data.tokenizer_file import open_tokenizer
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.evaluate import evaluation
from raytrain_gpt.evaluate.evaluation import Evaluation
from raytrain_gpt.export.model_card import _scores
from raytrain_gpt.storage.location import Location
from raytrain_gpt.sweep.history import History, best_trial, ranking
from raytrain_gpt.sweep.sweep_page import sweep_charts
from raytrain_gpt.sweep.trial_plan import base_config
from raytrain_gpt.train.launch import train
from tests.checkpoints import write_checkpoint
from tests.conftest import RunCli, raises_line
from tests.data.families import write_family
from tests.made_runs import MakeConfig, evaluations, flags, own_config, weights
from tests.sweep.conftest import sweep_of
from tests.training import thread_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
ACCURACY = EXAMPLES / "accuracy.py"
START = """
import math, random
import numpy as np
import torch
from raytrain_gpt.extend import Settings, evaluation

@evaluation("mine")
def mine(model, tokenizer, rank, world_size, settings):
"""
DRAWS = """
    ids = torch.randint(256, (2, 8))
    drawn = random.random(), np.random.random(), torch.rand(())
    losses = model(ids, ids, reduction="none")
    modes = (torch.is_grad_enabled(), model.training, any(p.requires_grad for p in [losses]))
    return {"draw": (sum(drawn), 1), "loss": (losses.sum(), losses.numel()), "on": (sum(modes), 1)}
"""
Start = Callable[..., Any]


@pytest.fixture
def start(make_config: MakeConfig, tmp_path: Path) -> Start:
    """Return a function that runs with an evaluation of this body."""

    def begin(body: str | None, name: str = "run", may_differ: bool = False, **fields: Any) -> Any:
        code = None if body is None else Code("my.py", START + body, may_differ)
        fields = {"evaluations": ["mine"] * bool(code), "run_name": name, **fields}
        fields = {"code": code, "max_steps": 8, "eval_every_steps": 4, **fields}
        return train(make_config(storage_path=str(tmp_path), **fields), print)

    return begin


def measured(text: str, world_size: int, *watch: Callable[..., None]) -> list[Any]:
    """Evaluate a small model on ranks that are threads; returns each rank's metrics or error."""
    config = own_config(text, evaluations=["mine"])
    torch.manual_seed(0)
    tokenizer = load_tokenizer("bytes")
    model = configured_model(config, 257, tokenizer.eot_token)

    def metrics(ranks: Any) -> Any:
        try:
            how = (tokenizer, None, ranks, contextlib.nullcontext)
            return Evaluation(config, model, *how).metrics(*watch)
        except ConfigError as error:
            return str(error)

    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(metrics, thread_ranks(world_size)))


@pytest.mark.slow
def test_the_example_measures_accuracy_in_a_run_its_report_and_its_checkpoints(
    make_config: MakeConfig, tmp_path: Path, run_cli: RunCli
) -> None:
    file = tmp_path / "held out.txt"
    file.write_text("To be, or not to be: that is the question.\n" * 5)
    fields = {"run_name": "run", "storage_path": str(tmp_path), "max_steps": 8}
    chosen = flags(make_config(**fields, eval_every_steps=4))
    own = ["--evaluations=accuracy", f"--accuracy_file={file}"]
    chosen = [flag for flag in chosen if not flag.startswith("--evaluations")]
    told = run_cli.succeeds("train", "--code", ACCURACY, *chosen, *own)
    run = Location.of(tmp_path / "run")
    rows = evaluations(run)
    assert [row["step"] for row in rows] == [4, 8]
    assert all(0 <= row["accuracy/top1"] <= row["accuracy/top5"] <= 1 for row in rows)
    line = f"accuracy/top1 {rows[-1]['accuracy/top1']:.4f}"
    assert line in told
    assert line in (run.path / "log.txt").read_text()
    assert "accuracy/top1" in (run.path / "report.html").read_text()
    assert dict(_scores(Catalog(run).complete()[-1]))["`accuracy/top1`"] == line.split()[1]

    out = run_cli.succeeds("eval", run.path)
    assert f"skipping accuracy: no code was given; if you trust it, pass --code {run}" in out
    assert "accuracy/top1" not in out
    out = run_cli.succeeds("eval", run.path, "--code", run.path / CODE_FILE)
    as_in_run = shlex.split(out.partition("if you trust it, add ")[2].partition("\n")[0])
    out = run_cli.succeeds("eval", run.path, "--code", ACCURACY, "--json", *as_in_run)
    assert json.loads(out.splitlines()[-1])["accuracy/top5"] == rows[-1]["accuracy/top5"]

    registry = Registry(Code.read(ACCURACY))
    _, config, model, tokenizer, _ = open_checkpoint(run.path, registry=registry)
    ids = torch.tensor(tokenizer.encode_ordinary(file.read_text()))
    right, size = 0, config.data.seq_len
    for i in range(len(ids) - 1):  # the context of a token starts with its window
        logits = model.logits(ids[None, i // size * size : i + 1])[0, -1, : tokenizer.n_vocab]
        right += int(logits.argmax() == ids[i + 1])
    assert rows[-1]["accuracy/top1"] == pytest.approx(right / (len(ids) - 1))


class NextByte:
    """A model that expects each byte to be the one after the last."""

    shape, device = SimpleNamespace(seq_len=6), torch.device("cpu")

    def logits(self, ids: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(ids + 1, 320)


def test_the_example_lambada_asks_for_all_tokens_of_the_last_word(tmp_path: Path) -> None:
    registry = Registry(Code.read(EXAMPLES / "lambada.py"))
    lambada, tokenizer = registry.kind("evaluations", "lambada"), load_tokenizer("bytes")
    file = tmp_path / "passages.txt"
    right, cut = 'a long start\x1f !"#', "a !\"#$%&'(a)*+,-./"
    file.write_text("\n".join([right, "a\x1f !b", "a !", "", "word", cut, f"{right} "]))
    settings = lambada.settings(lambada_file=str(file))  # type: ignore[call-arg]
    shares = [lambada.call(NextByte(), tokenizer, rank, 2, settings)["acc"] for rank in (0, 1)]
    assert shares == [(2, 3), (1, 2)]
    assert lambada.call(NextByte(), tokenizer, 0, 1, settings) == {"acc": (3, 5)}


def test_the_example_lambada_reads_a_passage_as_documents_are_read(tmp_path: Path) -> None:
    library = write_family("llama2", tmp_path)
    lambada = Registry(Code.read(EXAMPLES / "lambada.py")).kind("evaluations", "lambada")
    (tmp_path / "passages.txt").write_text("a man sat.")
    settings = lambada.settings(lambada_file=str(tmp_path / "passages.txt"))  # type: ignore[call-arg]
    model = Mock(shape=SimpleNamespace(seq_len=99), device="cpu")
    model.logits.side_effect = lambda ids: torch.nn.functional.one_hot(ids, 2000)
    lambada.call(model, open_tokenizer(str(tmp_path)), 0, 1, settings)
    assert model.logits.call_args.args[0].tolist() == [library.encode("a man sat.").ids[:-1]]


def test_a_new_evaluation_of_an_old_checkpoint_has_its_settings_as_flags(
    tmp_path: Path, run_cli: RunCli
) -> None:
    checkpoint, file = write_checkpoint(tmp_path / "run", 10, 3.0), tmp_path / "text.txt"
    file.write_text("To be, or not to be: that is the question.\n" * 9)
    named = ("eval", checkpoint, "--evaluations=accuracy")
    assert "evaluations='accuracy'" in run_cli.refuses(*named)
    command = (*named, "--code", ACCURACY)
    out = run_cli.succeeds(*command, "--accuracy_file", file, "--accuracy_tokens=200", "--json")
    assert "no validation loss: " in out
    scores = json.loads(out.splitlines()[-1])
    assert scores.keys() == {"checkpoint", "step", "accuracy/top1", "accuracy/top5"}
    missing = run_cli.refuses(*command, "--accuracy_file", tmp_path / "no.txt")
    assert "accuracy.py, line 2" in missing
    assert "FileNotFoundError" in missing
    assert "accuracy_tokens='0'" in run_cli.refuses(*command, "--accuracy_tokens=0")
    usage = run_cli.succeeds(*command, "--help")
    assert "usage: raytrain-gpt eval CHECKPOINT [options] [--FIELD VALUE ...]" in usage
    assert "--accuracy_file" in usage


@pytest.mark.slow
def test_random_draws_and_modes_of_an_evaluation_change_nothing(start: Start) -> None:
    run = start(DRAWS, dropout=0.1)
    assert weights(run.run_dir) == weights(start(None, "other", dropout=0.1).run_dir)
    first, second = evaluations(run.run_dir)
    assert first["mine/draw"] == second["mine/draw"]  # equal draws for all evaluations
    assert second["mine/on"] == 0  # no gradients, and evaluation mode
    assert second["mine/loss"] > 0


@pytest.mark.slow
def test_an_evaluation_that_fails_ends_the_run_with_one_line_and_loses_no_step(
    start: Start, tmp_path: Path
) -> None:
    body = "    if random.seed(1):\n        pass\n    raise ZeroDivisionError('a\\n' 'b')\n"
    words = ["evaluation mine, rank 0", "my.py, line 11: ZeroDivisionError: a b"]
    with raises_line(ConfigError, *words):
        start(body, checkpoint_every_steps=20)
    assert Catalog(Location.of(tmp_path / "run")).complete()[-1].state.step == 4
    fixed = start("    return {'a': (1, 2)}\n", may_differ=True, checkpoint_every_steps=20)
    assert [row["mine/a"] for row in evaluations(fixed.run_dir)] == [0.5]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pair", "expected"),
    [
        ("(1.0, 0)", None),
        ("(1e200, 2)", None),
        ("(torch.tensor(3.0), np.int64(2))", 1.5),
    ],
)
def test_rows_stay_valid(pair: str, expected: float | None) -> None:
    assert measured(f"{START}    return {{'a': {pair}}}", 1) == [{"mine/a": expected}]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("how", ["return", "yield"])
def test_sums_are_those_of_one_rank_on_any_number(world_size: int, how: str) -> None:
    body = "    share = range(rank, 100, world_size)\n"
    body += f"    {how} {{'b': (sum(share) / 3, len(share)), 'a': (rank + 1, world_size)}}\n"
    body += "    yield {'b': (1, 0)}\n" * (how == "yield")
    every = measured(START + body, world_size)
    mean = (world_size + 1) / 2 / world_size
    b = 16.5 + (how == "yield") * world_size / 100
    assert every == [pytest.approx({"mine/a": mean, "mine/b": b})] * world_size
    assert all(list(metrics) == ["mine/a", "mine/b"] for metrics in every)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return {'ab'[rank]: (1, 1)}", "rank 1: returned the keys ['b'], but ['a'] on rank 0"),
        ("return {'a': (1, 1 / (1 - rank))}", "rank 1: my.py, line 9: ZeroDivisionError"),
        ("yield {'a': (rank / rank, 1)}", "rank 0: my.py, line 9: ZeroDivisionError"),
        ("raise SystemExit('\\udcff')", "rank 0: my.py, line 9: SystemExit: ?"),
        ("return 0.5", "rank 0: must return a dict of key -> (sum, count): must be a mapping"),
        ("return {'a': 0.5}", "key -> (sum, count): a: must be a list"),
        ("return {'a/b': (1, 1)}", "must start with a letter"),
    ],
)
def test_all_ranks_fail_together(body: str, words: str) -> None:
    first, second = measured(f"{START}    {body}", 2)
    assert first == second
    assert words in first


def test_a_long_evaluation_that_yields_shows_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "SHOW_EVERY_S", 0.0)
    lines: list[str] = []
    beats: list[None] = []
    body = "    yield {'a': (1, 2)}\n" * 2
    measured(START + body, 1, lambda: beats.append(None), lines.append)
    assert (len(beats), lines) == (2, ["mine so far: a 0.5"] * 2)


@pytest.mark.parametrize("name", ["val", "hellaswag"])
def test_names_of_other_rows_are_refused(name: str) -> None:
    assert name in ROW_PREFIXES
    code = Code("my.py", START.replace('"mine"', f'"{name}"') + "    pass")
    with raises_line(ConfigError, "choose another name", "my.py, line 7"):
        Registry(code).user_kinds()


def test_settings_of_the_evaluation_that_is_the_objective_cannot_vary() -> None:
    space, code = {"accuracy_tokens": {"grid": [1024, 4096]}}, Code.read(ACCURACY)
    assert [*sweep_of(space, code).space] == ["accuracy_tokens"]
    with raises_line(ConfigError, "accuracy_tokens cannot vary between trials; move it"):
        sweep_of(space, code, objective="accuracy/top1", objective_mode="max")


def test_a_sweep_ranks_the_highest_first_if_it_is_told_so(tmp_path: Path) -> None:
    code = Code("my.py", START + "    pass")
    space = {"peak_lr": {"grid": [1e-3, 2e-3]}, "seed": {"grid": [1, 2]}}
    own = {"objective": "mine/a", "objective_mode": "max"}
    with raises_line(ConfigError, "mine/a is not measured; add mine to evaluations"):
        base_config(sweep_of(space, code, **own))
    sweep = sweep_of(space, code, overrides={"evaluations": ["mine"]}, **own)
    history = History(Location.of(tmp_path), sweep.objective_mode == "max")
    numbers = {
        "tokens_seen": sweep.budget_tokens,
        "tokens_per_s": 1.0,
        "elapsed_s": 1.0,
        "run_dir": "r",
    }
    for number, score in enumerate((0.2, 0.9, 0.3, 0.1)):
        name, values = (
            f"{number:03}",
            {"peak_lr": (1e-3, 2e-3)[number // 2], "seed": 1 + number % 2},
        )
        history.add("started", name, values=values)
        history.add("report", name, objective=score, values=values, **numbers)
        history.add("ended", name, state="finished")
    best, ranked = best_trial(history.trials()), ranking(history.trials())
    assert best is not None
    assert best.name == ranked[0].name == "001"
    curves, by_rate, _ = sweep_charts(ranked, sweep.model_dump())
    assert curves.curves[0].label == "001"
    assert [[*curve.values] for curve in by_rate.curves] == [[0.2, 0.9, 0.1, 0.3]]
