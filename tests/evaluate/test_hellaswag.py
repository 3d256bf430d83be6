"""HellaSwag: file parsing, download, encoding into rows and batches, and scoring of endings."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import math
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.model import GPT, GPTShape
from raytrain_gpt.data.tokenizer import load_tokenizer
from raytrain_gpt.errors import ConfigError, DataError
from raytrain_gpt.evaluate import hellaswag
from raytrain_gpt.evaluate.evaluation import Evaluation, check_evaluations
from raytrain_gpt.evaluate.hellaswag import (
    HELLASWAG,
    Choices,
    Example,
    batches,
    downloaded,
    encode_example,
    ending_losses,
    padded_rows,
    read_examples,
)
from tests.conftest import raises_line
from tests.core.conftest import BOTH, MadeTokens, make_model
from tests.training import thread_ranks

ENDINGS = ["runs away.", "sits down on it.", "sings.", "barks at the man."]
LINE = {"ind": 4, "activity_label": "Dogs", "ctx": "A dog", "endings": ENDINGS, "label": 2}
BYTES = load_tokenizer("bytes")


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("\n".join(texts) + "\n", "utf-8")
    return path


def example(context: str, endings: tuple[str, ...], label: int) -> Example:
    return Example.model_validate({"ctx": context, "endings": endings, "label": label})


def made(num: int) -> list[Example]:
    """Return examples of various lengths."""
    return [
        example("a man " * (7 * i % 40 + 1), tuple(f"{e} " * (i % 3 + 1) for e in ENDINGS), i % 4)
        for i in range(num)
    ]


def test_an_example_is_read(tmp_path: Path) -> None:
    examples = read_examples(write(tmp_path / "a.jsonl", {**LINE, "label": "2"}, "", LINE))
    assert examples == [example("A dog", tuple(ENDINGS), 2)] * 2


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ('{"ctx": ', "Invalid JSON"),
        ("[1, 2]", "must be a mapping"),
        ({**LINE, "ctx": "  "}, "ctx: "),
        ({**LINE, "endings": ENDINGS[:3]}, "endings: "),
        ({**LINE, "endings": [*ENDINGS[:3], 7]}, "endings: 3: "),
        ({**LINE, "label": ""}, "label: "),
        ({**LINE, "label": 4}, "label: "),
    ],
)
def test_a_line_that_is_no_example_is_named(tmp_path: Path, line: Any, word: str) -> None:
    path = write(tmp_path / "a.jsonl", LINE, line)
    with raises_line(DataError, f"{path} line 2: ", word, "as it is published"):
        read_examples(path)


def test_a_file_without_examples_is_refused(tmp_path: Path) -> None:
    with raises_line(DataError, "no examples"):
        read_examples(write(tmp_path / "a.jsonl", ""))
    (tmp_path / "b.jsonl").write_bytes(b'{"ctx": "\xff\xff"}\n')
    with raises_line(DataError, "b.jsonl line 1", "unicode"):
        read_examples(tmp_path / "b.jsonl")
    for missing in (tmp_path / "none.jsonl", tmp_path):
        with raises_line(DataError, f"cannot read HellaSwag {missing}"):
            read_examples(missing)


def texts(choices: Choices) -> list[tuple[bytes, bytes]]:
    """Return each row's text, and its scored ending."""
    rows = zip(choices.rows, choices.num_scored, strict=True)
    return [(bytes(row.tolist()), bytes(row[-num:].tolist())) for row, num in rows]


def test_context_and_ending_are_tokenized_apart(gpt2: Any) -> None:
    choices = encode_example(example("A dog sing", ("s", "ing away", "x", "y"), 0), gpt2, 64)
    first = [*gpt2.encode_ordinary("A dog sing"), *gpt2.encode_ordinary(" s")]
    assert choices.rows[0].tolist() == first
    endings = [" s", " ing away", " x", " y"]
    assert choices.num_scored == [len(gpt2.encode_ordinary(ending)) for ending in endings]


def test_what_is_too_long_is_cut_from_the_left() -> None:
    endings = ("is", "is here", "is not here", "went away and is not here any more")
    long = example("the small dog", endings, 0)
    choices = encode_example(long, BYTES, 16)
    assert texts(choices) == [
        (b"the small dog is", b" is"),
        (b"small dog is here", b" is here"),
        (b"l dog is not here", b" is not here"),
        (b"not here any more", b"ot here any more"),
    ]
    assert choices.is_cut
    assert not encode_example(long, BYTES, 64).is_cut


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_the_batches_hold_every_example_once(device_type: str) -> None:
    examples = [encode_example(one, BYTES, 256) for one in made(200)]
    found = list(batches(examples, device_type))
    assert len(found) > 7
    assert {id(one) for batch, _ in found for one in batch} == set(map(id, examples))
    assert sum(len(batch) for batch, _ in found) == 200
    for batch, width in found:
        tokens, scored = padded_rows(batch, width)
        assert tokens.numel() <= hellaswag.BATCH_TOKENS
        wanted = [pair for one in batch for pair in texts(one)]
        for (text, ending), row, places in zip(wanted, tokens, scored, strict=True):
            assert bytes(row[: len(text)].tolist()) == text
            assert not row[len(text) :].any()
            assert bytes(row[1:][places].tolist()) == ending
    if device_type == "cuda":
        widths = {width - 1 for _, width in found}
        assert {width % 16 for width in widths - {max(widths)}} == {0}


CONTENT = f"{json.dumps(LINE)}\n".encode()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (CONTENT, []),
        (OSError("HTTP Error 404"), ["cannot download", "404", "its path instead of"]),
        (http.client.IncompleteRead(b""), ["cannot download", "read"]),
        (b"<html>sign in</html>", ["line 1", "Invalid JSON"]),
    ],
    ids=str,
)
def test_the_public_file_is_fetched_once_and_nothing_else_is_kept(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    content: bytes | Exception,
    words: list[str],
) -> None:
    def urlopen(url: str, timeout: float) -> io.BytesIO:
        asked.append(url)
        if isinstance(content, Exception):
            raise content
        return io.BytesIO(content)

    asked: list[str] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    if words:
        with raises_line(DataError, hellaswag.URL, *words):
            downloaded()
        assert not list(tmp_path.rglob("*.jsonl"))
        return
    path = downloaded()
    assert path.path == tmp_path / "cache" / "raytrain-gpt" / "hellaswag_val.jsonl"
    assert read_examples(path) == read_examples(downloaded())
    assert asked == [hellaswag.URL]


ROWS = 12


@pytest.fixture
def tokens(made_tokens: MadeTokens) -> Tensor:
    """Return 12 rows of 17 tokens."""
    return made_tokens(ROWS, 17)


@pytest.fixture
def scored() -> Tensor:
    """Return a mask of scored positions, bool (12, 16).

    Rows have 5 to 16 positions, then padding; the last 1 to 4 positions are the ending.
    """
    lengths, counts = torch.arange(5, 17)[:, None], (torch.arange(ROWS) % 4 + 1)[:, None]
    places = torch.arange(16)
    return (places < lengths) & (places >= lengths - counts)


def rewritten(model: GPT, tokens: Tensor, scored: Tensor) -> tuple[list[float], list[float]]:
    """Compute summed and mean losses in float64, row by row, over the 100 ids that are not padding."""
    summed, mean = [], []
    for row, counts in zip(tokens, scored, strict=True):
        with torch.no_grad():
            logits = model.eval().logits(row[None, :-1])[0, :, :100].double()
        nats = -torch.log_softmax(logits, -1)
        own = [float(nats[at, row[at + 1]]) for at in counts.nonzero().ravel().tolist()]
        summed.append(math.fsum(own))
        mean.append(math.fsum(own) / len(own))
    return summed, mean


@BOTH
def test_losses_are_those_of_a_float64_rewrite(model: GPT, tokens: Tensor, scored: Tensor) -> None:
    found = ending_losses(model.eval(), tokens, scored)
    for got, wanted in zip(found, rewritten(model, tokens, scored), strict=True):
        assert got.dtype == torch.float64
        assert got.tolist() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(("correct", "examples"), [(3, 10), (0, 5), (5, 5), (1, 1)])
def test_the_standard_error_is_that_of_the_sample(correct: int, examples: int) -> None:
    answers = [1] * correct + [0] * (examples - correct)
    wanted = statistics.stdev(answers) / math.sqrt(examples) if examples > 1 else 0.0
    means = {"acc": correct / examples, "acc_norm": 1.0, "examples": float(examples), "cut": 2.0}
    row = HELLASWAG.row(means)
    assert row == {**means, "acc_stderr": pytest.approx(wanted), "acc_norm_stderr": 0}
    assert [type(row[name]) for name in ("examples", "cut")] == [int, int]


@pytest.mark.parametrize("world_size", [2, 40])
def test_any_number_of_ranks_scores_as_one_does(world_size: int, tmp_path: Path) -> None:
    lines = [{"ctx": e.ctx, "endings": e.endings, "label": e.label} for e in made(200)]
    path = write(tmp_path / "a.jsonl", *lines)
    config = Config().updated({"hellaswag_path": str(path)})
    model = make_model(GPTShape(1, 2, 16, 96, 257))

    def scores(ranks: Any) -> dict[str, Any]:
        return Evaluation(config, model, BYTES, None, ranks, contextlib.nullcontext).metrics()

    (alone,) = map(scores, thread_ranks(1))
    with ThreadPoolExecutor(world_size) as threads:
        assert [*threads.map(scores, thread_ranks(world_size))] == [alone] * world_size
    assert [*alone] == [
        f"hellaswag/{name}"
        for name in ("acc", "acc_norm", "acc_stderr", "acc_norm_stderr", "examples", "cut")
    ]
    assert alone["hellaswag/examples"] == 200
    assert 0 < alone["hellaswag/cut"] < 200
    assert 0.1 < alone["hellaswag/acc_norm"] < 0.4
    path.unlink()
    with raises_line(DataError, f"cannot read HellaSwag {path}"):
        check_evaluations(config)
    with raises_line(ConfigError, "set hellaswag_path instead"):
        config.updated({"evaluations": "hellaswag"})
