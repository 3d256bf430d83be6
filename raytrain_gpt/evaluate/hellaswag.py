"""HellaSwag: contexts with four endings each, one of them correct.

1. `read_examples` reads the published file; `downloaded` fetches it once.
2. `encode_example` makes a row of tokens for every context with each of its endings.
3. `batches` groups examples of similar width; they are the same for any number of ranks.
4. `choose_endings` scores the endings under a model.
5. `HellaSwag` is the evaluation: its sums on each rank, and the row's values from the sums over all ranks.

Source: Zellers et al., "HellaSwag: Can a machine really finish your sentence?" (2019).
"""

from __future__ import annotations

import http.client
import math
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import BaseModel, Field, StringConstraints
from torch import Tensor

from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.attention import without_cudnn_sdpa
from raytrain_gpt.core.model import GPT
from raytrain_gpt.data.locations import location
from raytrain_gpt.data.tokenizer import Tokenizer
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


@dataclass(frozen=True, eq=False)
class Choices:
    """An example as tokens.

    Attributes:
        rows: The context with each ending, uint32 (tokens,).
        num_scored: Tokens at the end of each row that are scored.
        label: Index of the correct ending.
        is_cut: Whether an ending did not fit the model's context.
    """

    rows: list[NDArray[np.uint32]]
    num_scored: list[int]
    label: int
    is_cut: bool


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
    place = Location.of(cache_directory() / URL.rpartition("/")[2])
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
    with failure_as(DataError, f"cannot write {place}", "; give a file instead of download"):
        place.write_bytes(content)
    return place


def encode_example(example: Example, tokenizer: Tokenizer, seq_len: int) -> Choices:
    """Encode rows of tokens: a context, then a space and an ending, tokenized separately by tiktoken.

    A row has at most `seq_len` + 1 tokens, for `seq_len` inputs with a target each. Longer ones are cut from
    the left: first the context, then the ending itself.
    """
    context = np.concatenate((tokenizer.before, tokenizer.encode(example.ctx)))
    endings = [tokenizer.encode_after(example.ctx, f" {ending}") for ending in example.endings]
    return Choices(
        rows=[np.concatenate([context, ending])[-(seq_len + 1) :] for ending in endings],
        num_scored=[min(len(ending), seq_len) for ending in endings],
        label=example.label,
        is_cut=len(context) + max(map(len, endings)) > seq_len + 1,
    )


def batches(examples: list[Choices], device_type: str) -> Iterator[tuple[list[Choices], int]]:
    """Yield examples of similar width, for little padding, and the width of their rows in tokens."""
    widths = np.array([max(map(len, example.rows)) for example in examples])
    multiple = _WIDTH_MULTIPLES.get(device_type, 1)
    # At most the widest row, which fits the model's context.
    widths = np.minimum(-(-(widths - 1) // multiple) * multiple + 1, widths.max())
    batch: list[Choices] = []
    width = 0
    for at in np.argsort(widths, kind="stable").tolist():
        # They are sorted, so this one would be the widest of the batch.
        if batch and NUM_ENDINGS * (len(batch) + 1) * widths[at] > BATCH_TOKENS:
            yield batch, width
            batch = []
        batch.append(examples[at])
        width = int(widths[at])
    yield batch, width


def padded_rows(batch: list[Choices], width: int) -> tuple[Tensor, Tensor]:
    """Return the rows of a batch, as `ending_losses` takes them."""
    tokens = np.zeros((NUM_ENDINGS * len(batch), width), np.int64)
    scored = np.zeros((len(tokens), width - 1), np.bool_)
    rows = [one for example in batch for one in zip(example.rows, example.num_scored, strict=True)]
    for at, (row, num) in enumerate(rows):
        tokens[at, : len(row)] = row
        scored[at, len(row) - 1 - num : len(row) - 1] = True
    return torch.from_numpy(tokens), torch.from_numpy(scored)


@torch.no_grad()
def ending_losses(model: GPT, tokens: Tensor, scored: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of every row's ending, summed and per token: two float64 (R,) on the CPU, in nats.

    The softmax excludes padded ids of the vocabulary, as every exported model does. The model runs eagerly,
    since batches have too many shapes to compile, and logits are computed only for the endings.

    Args:
        model: In evaluation mode, under autocast.
        tokens: int64 (R, T + 1), padded with zeros.
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


def choose_endings(model: GPT, batch: list[Choices], width: int) -> tuple[Tensor, Tensor]:
    """Return the endings with the smallest summed loss, and with the smallest loss per token: int64 (n,)."""
    tokens, scored = (part.to(model.device) for part in padded_rows(batch, width))
    by_sum, by_mean = ending_losses(model, tokens, scored)
    return by_sum.view(-1, NUM_ENDINGS).argmin(1), by_mean.view(-1, NUM_ENDINGS).argmin(1)


class HellaSwag:
    """The evaluation `hellaswag`, chosen by `hellaswag_path`."""

    def check(self, config: Config) -> None:
        """Raise a DataError if the file cannot be read."""
        read_examples(_place(config))

    def __call__(
        self, model: GPT, tokenizer: Tokenizer, rank: int, world_size: int, config: Config
    ) -> Iterator[dict[str, tuple[int, int]]]:
        examples = _encoded(_place(config), tokenizer, model.shape.seq_len)
        first = int(rank == 0)
        cut = (first * sum(example.is_cut for example in examples), first)
        yield {"acc": (0, 0), "acc_norm": (0, 0), "examples": (0, first), "cut": cut}
        for number, (batch, width) in enumerate(batches(examples, model.device.type)):
            if number % world_size == rank:
                labels, num = torch.tensor([example.label for example in batch]), len(batch)
                chosen = choose_endings(model, batch, width)
                acc, acc_norm = (int((endings == labels).sum()) for endings in chosen)
                yield {"acc": (acc, num), "acc_norm": (acc_norm, num), "examples": (num, 0)}

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


@lru_cache(maxsize=1)
def _encoded(place: Location, tokenizer: Tokenizer, seq_len: int) -> list[Choices]:
    """Read the file once for all evaluations of a run."""
    return [encode_example(example, tokenizer, seq_len) for example in read_examples(place)]


def _place(config: Config) -> Location:
    path = config.eval.hellaswag_path
    assert path is not None, "it chooses the evaluation"
    return downloaded() if path == DOWNLOAD else location(config, path)
