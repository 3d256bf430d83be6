"""HellaSwag: contexts with four endings each, one of them correct.

1. `read_examples` reads the published file; `downloaded` fetches it once.
2. `encode_choices` makes a row of tokens of every context with each of its endings.
3. `Choices.batches` distributes batches over the ranks; they are the same for any number of ranks.
4. `ending_losses` scores the endings under a model.
5. `HellaSwag` is the evaluation: its sums on each rank, and the row's values from the sums over all ranks.

Source: Zellers et al., "HellaSwag: Can a machine really finish your sentence?" (2019).
"""

from __future__ import annotations

import http.client
import math
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated
from weakref import WeakKeyDictionary

import numpy as np
import tiktoken
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import BaseModel, Field, StringConstraints
from torch import Tensor

from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.attention import without_cudnn_sdpa
from raytrain_gpt.core.model import GPT
from raytrain_gpt.data.locations import location
from raytrain_gpt.data.tokenizer import encode
from raytrain_gpt.errors import DataError, failure_as, reason
from raytrain_gpt.storage.location import Location, LocationLike, cache_directory

NUM_ENDINGS = 4
DOWNLOAD = "download"
"""Value instead of a path that selects the public file."""
URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
BATCH_TOKENS = 8192
"""Tokens per batch, padding included; a batch has at least one example."""
_WIDTH_MULTIPLES = {"cuda": 16}
"""Device type -> multiple that row widths are padded to (default 1): few shapes for 9% more tokens."""

_WAY_OUT = "use HellaSwag's validation file as it is published (hellaswag_val.jsonl)"


_Text = Annotated[str, StringConstraints(pattern=r"\S")]


class Example(BaseModel):
    """A line of the file: a context, its endings, and the index of the correct one."""

    ctx: _Text
    endings: tuple[_Text, _Text, _Text, _Text]
    label: Annotated[int, Field(ge=0, lt=NUM_ENDINGS)]


@dataclass(frozen=True)
class _ChoiceBatch:
    """Rows of some examples, four consecutive ones each, padded with zeros.

    Attributes:
        examples: int64 (n,), indices in the file.
        labels: int64 (n,)
        tokens: int64 (4n, T + 1)
        scored: bool (4n, T), whether the next token belongs to the ending.
    """

    examples: Tensor
    labels: Tensor
    tokens: Tensor
    scored: Tensor


@dataclass(frozen=True)
class Choices:
    """All examples as tokens.

    Attributes:
        tokens: uint32 (tokens,), all rows concatenated.
        starts: int64 (4 · examples + 1,), offset of each row, and the end.
        num_scored: int64 (4 · examples,), tokens at the end of each row that are scored.
        labels: int64 (examples,)
        num_cut: Examples with an ending that did not fit the model's context.
    """

    tokens: NDArray[np.uint32]
    starts: NDArray[np.int64]
    num_scored: NDArray[np.int64]
    labels: NDArray[np.int64]
    num_cut: int

    def batches(self, rank: int, world_size: int, device_type: str) -> Iterator[_ChoiceBatch]:
        """Yield the batches of a rank: every `world_size`-th of those for the device type."""
        widths = np.diff(self.starts).reshape(-1, NUM_ENDINGS).max(1)
        multiple = _WIDTH_MULTIPLES.get(device_type, 1)
        # At most the widest row, which fits the model's context.
        widths = np.minimum(-(-(widths - 1) // multiple) * multiple + 1, widths.max())
        for number, examples in enumerate(_batched(widths)):
            if number % world_size == rank:
                yield self._batch(examples, int(widths[examples].max()))

    def _batch(self, examples: NDArray[np.int64], width: int) -> _ChoiceBatch:
        rows = (NUM_ENDINGS * examples[:, None] + np.arange(NUM_ENDINGS)).ravel()
        tokens = np.zeros((len(rows), width), np.int64)
        scored = np.zeros((len(rows), width - 1), np.bool_)
        for at, row in enumerate(rows):
            own = self.tokens[self.starts[row] : self.starts[row + 1]]
            tokens[at, : len(own)] = own
            scored[at, len(own) - 1 - self.num_scored[row] : len(own) - 1] = True
        parts = (examples, self.labels[examples], tokens, scored)
        return _ChoiceBatch(*map(torch.from_numpy, parts))


def _batched(widths: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Group examples of similar width, for little padding."""
    batch: list[int] = []
    for example in np.argsort(widths, kind="stable").tolist():
        # They are sorted, so this one would be the widest of the batch.
        if batch and NUM_ENDINGS * (len(batch) + 1) * widths[example] > BATCH_TOKENS:
            yield np.array(batch, np.int64)
            batch = []
        batch.append(example)
    yield np.array(batch, np.int64)


def read_examples(place: LocationLike) -> list[Example]:
    """Read the examples of a .jsonl file; raises a DataError for any that is not as published."""
    path = Location.of(place)
    with failure_as(DataError, f"cannot read HellaSwag {path}"):
        content = path.read_bytes()
    return _parsed(content, str(path))


def _parsed(content: bytes, name: str) -> list[Example]:
    examples = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            examples.append(Example.model_validate_json(line))
        except ValueError as error:
            raise DataError(f"{name} line {number}: {reason(error)}; {_WAY_OUT}") from None
    if not examples:
        raise DataError(f"{name} has no examples; {_WAY_OUT}")
    return examples


def downloaded() -> Location:
    """Return the public validation file, downloaded once to the user's cache, or raise a DataError."""
    cache = cache_directory()
    place = Location.of(cache / URL.rpartition("/")[2])
    if place.exists():
        return place
    try:
        with urllib.request.urlopen(URL, timeout=60.0) as response:
            content: bytes = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise DataError(
            f"cannot download HellaSwag from {URL} ({error}); fetch it on a machine with network "
            "and give its path instead of download"
        ) from None
    _parsed(content, URL)
    advice = "; set XDG_CACHE_HOME to a writable directory, or give a file instead of download"
    with failure_as(DataError, f"cannot store HellaSwag in {cache}", advice):
        place.write_bytes(content)
    return place


def encode_choices(examples: list[Example], tokenizer: tiktoken.Encoding, seq_len: int) -> Choices:
    """Encode rows of tokens: a context, then a space and an ending, tokenized separately.

    A row has at most `seq_len` + 1 tokens, for `seq_len` inputs with a target each. Longer ones are cut from
    the left: first the context, then the ending itself.
    """
    rows, num_scored, num_cut = [], [], 0
    for example in examples:
        context = encode(tokenizer, example.ctx)
        endings = [encode(tokenizer, f" {ending}") for ending in example.endings]
        rows += [[*context, *ending][-(seq_len + 1) :] for ending in endings]
        num_scored += [min(len(ending), seq_len) for ending in endings]
        num_cut += len(context) + max(map(len, endings)) > seq_len + 1
    return Choices(
        tokens=np.concatenate(rows).astype(np.uint32),
        starts=np.cumsum([0, *map(len, rows)], dtype=np.int64),
        num_scored=np.array(num_scored, np.int64),
        labels=np.array([example.label for example in examples], np.int64),
        num_cut=num_cut,
    )


@torch.no_grad()
def ending_losses(model: GPT, tokens: Tensor, scored: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of every row's ending, summed and per token: two float64 (R,) on the CPU, in nats.

    The softmax excludes padded ids of the vocabulary, as every exported model does. The model runs eagerly,
    since batches have too many shapes to compile, and logits are computed only for the endings.

    Args:
        model: In evaluation mode, under autocast.
        tokens: int64 (R, T + 1).
        scored: bool (R, T), whether the next token belongs to the ending.
    """
    with without_cudnn_sdpa(tokens.device):
        hidden = model.hidden(tokens[:, :-1])[scored]  # (S, D)
        logits = F.linear(hidden, model.head_weight)[:, : model.shape.vocab_size].float()  # (S, V)
    nats = F.cross_entropy(logits, tokens[:, 1:][scored], reduction="none")  # (S,)
    scored = scored.cpu()
    at_places = torch.zeros(scored.shape, dtype=torch.float64)  # (R, T)
    at_places[scored] = nats.cpu().double()
    summed = at_places.sum(1)
    return summed, summed / scored.sum(1)


def choose_endings(
    model: GPT, choices: Choices, rank: int, world_size: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Choose the endings of a rank's examples, batch by batch.

    Yields:
        Four int64 (n,): indices of the examples in the file, correct endings, and the endings with the
        smallest summed loss and with the smallest loss per token.
    """
    for batch in choices.batches(rank, world_size, model.device.type):
        losses = ending_losses(model, batch.tokens.to(model.device), batch.scored.to(model.device))
        by_sum, by_mean = (loss.view(-1, NUM_ENDINGS).argmin(1) for loss in losses)
        yield batch.examples, batch.labels, by_sum, by_mean


class HellaSwag:
    """The evaluation `hellaswag`, chosen by `hellaswag_path`."""

    def __init__(self) -> None:
        self._choices: WeakKeyDictionary[GPT, Choices] = WeakKeyDictionary()

    def check(self, config: Config) -> None:
        """Raise a DataError if the file cannot be read."""
        _examples(config)

    def __call__(
        self, model: GPT, tokenizer: tiktoken.Encoding, rank: int, world_size: int, config: Config
    ) -> Iterator[dict[str, tuple[int, int]]]:
        """Yield the sums of each batch; the file is read once for a model."""
        if model not in self._choices:
            examples = _examples(config)
            self._choices[model] = encode_choices(examples, tokenizer, model.shape.seq_len)
        choices, first = self._choices[model], int(rank == 0)
        cut = (first * choices.num_cut, first)
        yield {"acc": (0, 0), "acc_norm": (0, 0), "examples": (0, first), "cut": cut}
        for _, labels, by_sum, by_mean in choose_endings(model, choices, rank, world_size):
            num, right, right_norm = len(labels), by_sum == labels, by_mean == labels
            yield {
                "acc": (int(right.sum()), num),
                "acc_norm": (int(right_norm.sum()), num),
                "examples": (num, 0),
            }

    @staticmethod
    def row(means: dict[str, float]) -> dict[str, float | int]:
        """Add the accuracies' standard errors, sqrt(p(1 − p) / (n − 1))."""
        examples, accuracies = round(means["examples"]), (means["acc"], means["acc_norm"])
        stderrs = [math.sqrt(p * (1 - p) / max(1, examples - 1)) for p in accuracies]
        return {
            "acc": means["acc"],
            "acc_norm": means["acc_norm"],
            "acc_stderr": stderrs[0],
            "acc_norm_stderr": stderrs[1],
            "examples": examples,
            "cut": round(means["cut"]),
        }


HELLASWAG = HellaSwag()


def _examples(config: Config) -> list[Example]:
    path = config.eval.hellaswag_path
    assert path is not None, "it chooses the evaluation"
    return read_examples(downloaded() if path == DOWNLOAD else location(config, path))
