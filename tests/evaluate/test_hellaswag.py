"""HellaSwag: file parsing, download, encoding into rows and batches, and scoring of endings."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from raytrain_gpt.core.attention import without_cudnn_sdpa
from raytrain_gpt.core.model import GPT, GPTShape
from raytrain_gpt.data.tokenizer import load_tokenizer
from raytrain_gpt.errors import DataError
from raytrain_gpt.evaluate import hellaswag
from raytrain_gpt.evaluate.hellaswag import (
    Choices,
    Example,
    choice_metrics,
    downloaded,
    encode_choices,
    ending_losses,
    read_examples,
)
from tests.conftest import raises_line
from tests.core.conftest import BOTH, MadeTokens, NewModel, make_model

ENDINGS = ["runs away.", "sits down on it.", "sings.", "barks at the man."]
LINE = {"ind": 4, "activity_label": "Dogs", "ctx": "A dog", "endings": ENDINGS, "label": 2}
BYTES = load_tokenizer("bytes")


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("\n".join(texts) + "\n", "utf-8")
    return path


def without(*fields: str, **more: Any) -> dict[str, Any]:
    return {**{name: value for name, value in LINE.items() if name not in fields}, **more}


def made(num: int) -> list[Example]:
    """Return examples of various lengths."""
    return [
        Example("a man " * (7 * i % 40 + 1), tuple(f"{e} " * (i % 3 + 1) for e in ENDINGS), i % 4)
        for i in range(num)
    ]


def test_an_example_is_read(tmp_path: Path) -> None:
    examples = read_examples(write(tmp_path / "a.jsonl", without(label="2"), "", LINE))
    assert examples == [Example("A dog", tuple(ENDINGS), 2)] * 2


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ('{"ctx": ', "Invalid JSON"),
        ("[1, 2]", "must be a mapping"),
        (without("ctx"), "ctx: "),
        (without("ctx", ctx="  "), "ctx: "),
        (without("endings"), "endings: "),
        (without(endings=ENDINGS[:3]), "endings: "),
        (without(endings=[*ENDINGS[:3], " "]), "endings: 3: "),
        (without(endings=[*ENDINGS[:3], 7]), "endings: 3: "),
        (without("label"), "label: "),
        (without(label=""), "label: "),
        (without(label=4), "label: "),
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


def test_examples_are_the_same_after_their_way_between_ranks() -> None:
    choices, values = encode_choices(made(9), BYTES, 64), TypeAdapter(Choices)
    received = values.validate_json(values.dump_json(choices))
    assert received.num_cut == choices.num_cut
    for name in ("tokens", "starts", "num_scored", "labels"):
        sent, got = getattr(choices, name), getattr(received, name)
        assert (got.dtype, got.tolist()) == (sent.dtype, sent.tolist())


def row(choices: Choices, number: int) -> tuple[bytes, bytes]:
    """Return a row's text, and its scored ending."""
    tokens = choices.tokens[choices.starts[number] : choices.starts[number + 1]]
    return bytes(tokens.tolist()), bytes(tokens[-choices.num_scored[number] :].tolist())


def test_context_and_ending_are_tokenized_apart(gpt2: Any) -> None:
    choices = encode_choices([Example("A dog sing", ("s", "ing away", "x", "y"), 0)], gpt2, 64)
    assert choices.tokens[: choices.starts[1]].tolist() == [
        *gpt2.encode_ordinary("A dog sing"),
        *gpt2.encode_ordinary(" s"),
    ]
    assert choices.num_scored.tolist() == [len(gpt2.encode_ordinary(f" {e}")) for e in
                                           ("s", "ing away", "x", "y")]  # fmt: skip


def test_what_is_too_long_is_cut_from_the_left() -> None:
    endings = ("is", "is here", "is not here", "went away and is not here any more")
    examples = [Example("the small dog", endings, 0), Example("dog", ("a", "b", "c", "d"), 1)]
    choices = encode_choices(examples, BYTES, 16)
    assert [row(choices, i) for i in range(4)] == [
        (b"the small dog is", b" is"),
        (b"small dog is here", b" is here"),
        (b"l dog is not here", b" is not here"),
        (b"not here any more", b"ot here any more"),
    ]
    assert choices.num_cut == 1
    assert encode_choices(examples, BYTES, 64).num_cut == 0


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_batches_are_the_same_for_any_number_of_ranks(world_size: int, device_type: str) -> None:
    choices = encode_choices(made(200), BYTES, 256)
    alone = list(choices.batches(0, 1, device_type))
    shares = [list(choices.batches(rank, world_size, device_type)) for rank in range(world_size)]
    dealt = [shares[i % world_size][i // world_size] for i in range(len(alone))]
    assert sum(map(len, shares)) == len(alone) > 7
    for one, other in zip(alone, dealt, strict=True):
        for name in ("examples", "labels", "tokens", "scored"):
            assert np.array_equal(getattr(one, name), getattr(other, name))
    assert sorted(np.concatenate([b.examples for b in dealt]).tolist()) == list(range(200))


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_batch_holds_what_was_encoded(device_type: str) -> None:
    examples = made(200)
    choices = encode_choices(examples, BYTES, 256)
    for batch in choices.batches(0, 1, device_type):
        assert batch.tokens.numel() <= hellaswag.BATCH_TOKENS
        assert batch.labels.tolist() == [examples[i].label for i in batch.examples]
        places = [4 * example + ending for example in batch.examples for ending in range(4)]
        for place, tokens, scored in zip(places, batch.tokens, batch.scored, strict=True):
            text, ending = row(choices, place)
            assert bytes(tokens[: len(text)].tolist()) == text
            assert not tokens[len(text) :].any()
            assert bytes(tokens[1:][scored].tolist()) == ending


def test_an_example_that_is_larger_than_a_batch_is_one_alone() -> None:
    choices = encode_choices([Example("x" * 5000, tuple(ENDINGS), 0)] * 2, BYTES, 4096)
    assert [batch.tokens.shape for batch in choices.batches(0, 1, "cpu")] == [(4, 4097)] * 2


@pytest.mark.slow
def test_as_on_a_gpu_few_shapes_occur_and_the_scores_stay_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def as_on_a_gpu(_: torch.device) -> contextlib.AbstractContextManager[object]:
        return without_cudnn_sdpa(torch.device("cuda"))

    def spy(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        shapes.add((q.shape, k.shape))
        return of_torch(q, k, v, **options)

    def scores(device_type: str) -> Tensor:
        """Return the summed and mean losses of each example's endings, float64 (examples, 8)."""
        shapes.clear()
        found = torch.zeros(400, 8, dtype=torch.float64)
        for batch in choices.batches(0, 1, device_type):
            rows = losses(model, batch.tokens, batch.scored)
            found[batch.examples] = torch.cat([part.view(-1, 4) for part in rows], 1)
        return found

    shapes: set[tuple[torch.Size, torch.Size]] = set()
    of_torch = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    monkeypatch.setattr(hellaswag, "without_cudnn_sdpa", as_on_a_gpu)
    model = make_model(GPTShape(1, 2, 16, 275, 257))
    choices = encode_choices(made(400), BYTES, 275)
    wanted, num_shapes = scores("cpu"), len(shapes)
    found = scores("cuda")
    assert len(shapes) < 20 < 25 < num_shapes
    assert max(queries[2] for queries, _ in shapes) == 275
    assert torch.allclose(found, wanted, rtol=1e-6, atol=0)
    assert wanted.all()


CONTENT = f"{json.dumps(LINE)}\n".encode()
Answer = Callable[[bytes | Exception], list[str]]


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Answer:
    """Return a function that sets the answer to downloads and returns the URLs that are asked for.

    The cache is empty.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked: list[str] = []

    def set_to(content: bytes | Exception) -> list[str]:
        def urlopen(url: str, timeout: float) -> io.BytesIO:
            asked.append(url)
            if isinstance(content, Exception):
                raise content
            return io.BytesIO(content)

        monkeypatch.setattr("urllib.request.urlopen", urlopen)
        return asked

    return set_to


def test_the_public_file_is_fetched_once(answer: Answer, tmp_path: Path) -> None:
    asked = answer(CONTENT)
    path = downloaded()
    assert path.path == tmp_path / "cache" / "raytrain-gpt" / "hellaswag_val.jsonl"
    assert read_examples(path) == read_examples(downloaded())
    assert asked == [hellaswag.URL]
    assert [file.name for file in path.path.parent.iterdir()] == ["hellaswag_val.jsonl"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (OSError("HTTP Error 404"), ["cannot download", "404", "its path instead of"]),
        (http.client.IncompleteRead(b""), ["cannot download", "read"]),
        (b"<html>sign in</html>", ["line 1", "Invalid JSON"]),
    ],
    ids=str,
)
def test_what_is_not_the_file_is_not_kept(
    answer: Answer, tmp_path: Path, content: bytes | Exception, words: list[str]
) -> None:
    answer(content)
    with raises_line(DataError, hellaswag.URL, *words):
        downloaded()
    assert not list(tmp_path.rglob("*.jsonl"))


def test_a_cache_that_cannot_be_written_is_named(answer: Answer, tmp_path: Path) -> None:
    answer(CONTENT)
    (tmp_path / "cache").write_text("a file")
    with raises_line(DataError, str(tmp_path / "cache"), "XDG_CACHE_HOME"):
        downloaded()


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


def losses(model: GPT, tokens: Tensor, scored: Tensor) -> tuple[Tensor, Tensor]:
    return ending_losses(model, tokens, scored, contextlib.nullcontext)


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
    found = losses(model, tokens, scored)
    for got, wanted in zip(found, rewritten(model, tokens, scored), strict=True):
        assert got.dtype == torch.float64
        assert got.tolist() == pytest.approx(wanted, rel=1e-6)


def test_a_compiled_model_compiles_nothing_for_new_shapes(
    new_model: NewModel, tokens: Tensor, scored: Tensor
) -> None:
    compiled = new_model()
    compiled.compile(backend="eager")
    compiled(tokens[:, :-1], tokens[:, 1:])
    with torch._dynamo.config.patch(error_on_recompile=True):
        for width in (16, 12, 8):
            some = tokens[: width - 4, : width + 1], scored[: width - 4, :width]
            assert torch.equal(losses(compiled, *some)[0], losses(new_model(), *some)[0])


def test_dropout_is_off_and_no_gradient_is_kept(
    new_model: NewModel, tokens: Tensor, scored: Tensor
) -> None:
    dropping = new_model(dropout=0.5).train()
    summed, _ = losses(dropping, tokens, scored)
    assert torch.equal(summed, losses(new_model(), tokens, scored)[0])
    assert not summed.requires_grad


@pytest.mark.parametrize(("correct", "examples"), [(3, 10), (0, 5), (5, 5), (1, 1)])
def test_the_standard_error_is_that_of_the_sample(correct: int, examples: int) -> None:
    answers = [1] * correct + [0] * (examples - correct)
    wanted = statistics.stdev(answers) / math.sqrt(examples) if examples > 1 else 0.0
    metrics = choice_metrics(examples, correct, examples - correct)
    assert metrics["acc"] == correct / examples
    assert metrics["acc_norm"] == pytest.approx(1 - correct / examples)
    assert metrics["acc_stderr"] == pytest.approx(wanted)
    assert metrics["acc_norm_stderr"] == pytest.approx(wanted)
    assert metrics["examples"] == examples
