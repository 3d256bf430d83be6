"""HellaSwag in a run and in `eval`, with the answers of `transformers` on the export."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch

from raytrain_gpt.columns import Row
from raytrain_gpt.export.huggingface import export_checkpoint
from raytrain_gpt.runs.summary import RunSummary
from raytrain_gpt.train.launch import train
from tests.conftest import RunCli
from tests.data.shard_tools import prepare_here
from tests.made_runs import MakeConfig, evaluations

pytestmark = pytest.mark.slow

SEQ_LEN = 256
NUM_EXAMPLES = 250
Answers = dict[int, tuple[int, int]]
"""Index of an example -> endings with the smallest summed loss and the smallest loss per token."""


def made_lines() -> Iterator[str]:
    endings = ["goes away.", "sings a song.", "sits down.", "says nothing at all and is gone."]
    for i in range(NUM_EXAMPLES):
        context = " ".join(f"man {i * k % 17}" for k in range(1, 4 + i % 50))
        row = {"ctx": f"{context} he", "endings": endings, "label": str(i % 4)}
        yield json.dumps(row)


@pytest.fixture(scope="module")
def examples(test_data: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of real examples if they are available, or of synthetic ones."""
    lines: Iterable[str] = made_lines()
    if test_data is not None:
        lines = (test_data / "hellaswag_val_1000.jsonl").read_text("utf-8").splitlines()
    path = tmp_path_factory.mktemp("hellaswag") / "examples.jsonl"
    path.write_text("".join(f"{line}\n" for line in islice(lines, NUM_EXAMPLES)), "utf-8")
    return path


@pytest.fixture(scope="module")
def run(make_config: MakeConfig, examples: Path) -> RunSummary:
    """Train on text that is learned in a few steps, with one evaluation."""
    text, data = examples.with_name("text.txt"), examples.with_name("data")
    text.write_text("big cow\n" * 20_000)
    prepare_here([str(text)], data, "bytes", val_fraction=0.05)
    config = make_config(
        run_name="evaluated",
        data_path=str(data),
        max_steps=20,
        peak_lr=1e-2,
        embd_size=64,
        seq_len=SEQ_LEN,
        global_batch_tokens=12 * SEQ_LEN,
        eval_every_steps=20,
        hellaswag_path=str(examples),
    )
    return train(config, print)


def last_evaluation(run: RunSummary) -> Row:
    return evaluations(run.run_dir)[-1]


def answers_of_transformers(export: Path, examples: Path) -> Answers:
    from transformers import AutoModelForCausalLM, AutoTokenizer  # lazy import: it takes seconds

    model = AutoModelForCausalLM.from_pretrained(export)
    tokenizer = AutoTokenizer.from_pretrained(export)
    answers = {}
    for place, line in enumerate(examples.read_text("utf-8").splitlines()):
        example = json.loads(line)
        before = tokenizer(example["ctx"]).input_ids
        endings = [tokenizer(f" {ending}").input_ids for ending in example["endings"]]
        rows = [torch.tensor((before + ending)[-SEQ_LEN - 1 :]) for ending in endings]
        with torch.no_grad():
            logits = model(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)[:, :-1]).logits
        losses = []
        for row, ending, ending_logits in zip(rows, endings, logits.double(), strict=True):
            scored = ending_logits[: len(row) - 1][-len(ending) :]
            losses.append(
                torch.nn.functional.cross_entropy(scored, row[-len(scored) :], reduction="none")
            )
        by_sum, by_mean = [loss.sum() for loss in losses], [loss.mean() for loss in losses]
        answers[place] = (by_sum.index(min(by_sum)), by_mean.index(min(by_mean)))
    return answers


def scores(answers: Answers, examples: Path) -> tuple[float, float]:
    """Return acc and acc_norm of some answers, from the file's labels."""
    labels = [int(json.loads(line)["label"]) for line in examples.read_text("utf-8").splitlines()]
    right = [[answer[how] == labels[place] for place, answer in answers.items()] for how in (0, 1)]
    return sum(right[0]) / len(answers), sum(right[1]) / len(answers)


def test_run_scores_as_transformers_does(run: RunSummary, examples: Path, tmp_path: Path) -> None:
    export = export_checkpoint(run.checkpoint.path, tmp_path / "hf", "fp32", print)
    wanted = answers_of_transformers(export, examples)
    row = last_evaluation(run)
    assert (row["hellaswag/acc"], row["hellaswag/acc_norm"]) == scores(wanted, examples)
    assert row["hellaswag/examples"] == len(wanted)
    assert row["hellaswag/cut"] > 0


def test_eval_answers_as_the_run_did(run: RunSummary, examples: Path, run_cli: RunCli) -> None:
    out = run_cli.succeeds("eval", run.run_dir, "--hellaswag", examples, "--json")
    *_, line, _, last = out.splitlines()  # on a slow machine, progress lines come first
    metrics = json.loads(last)
    norm = f"{metrics['hellaswag/acc_norm']:.4f} ± {metrics['hellaswag/acc_norm_stderr']:.4f}"
    assert f"step 20 | hellaswag acc_norm {norm} | acc {metrics['hellaswag/acc']:.4f} ± " in line
    assert f"{metrics['hellaswag/examples']} examples, {metrics['hellaswag/cut']} cut" in line
    in_training = last_evaluation(run)
    assert metrics["val/loss"] == pytest.approx(in_training["val/loss"], abs=1e-5)
    for name in ("acc", "acc_norm", "acc_stderr", "acc_norm_stderr", "examples", "cut"):
        assert metrics[f"hellaswag/{name}"] == in_training[f"hellaswag/{name}"]
