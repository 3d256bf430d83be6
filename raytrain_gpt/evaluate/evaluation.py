"""Evaluation over all ranks: validation loss, evaluations by name, and samples.

The same code runs in training workers and in `eval`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from raytrain_gpt.checkpoint.collectives import Collectives
from raytrain_gpt.columns import Row, finite
from raytrain_gpt.config.call_options import SamplingOptions
from raytrain_gpt.config.kinds import Kind
from raytrain_gpt.config.open_section import Name
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.device import seed_everything
from raytrain_gpt.core.generate import sample_tokens
from raytrain_gpt.core.loop import Autocast, MicroBatch
from raytrain_gpt.core.loss import IGNORE_INDEX
from raytrain_gpt.core.model import GPT
from raytrain_gpt.data.tokenizer import Tokenizer
from raytrain_gpt.errors import ConfigError, UserError, reason
from raytrain_gpt.format import Log

if TYPE_CHECKING:
    from raytrain_gpt.ingest.feed import EvalFeed

SHOW_EVERY_S = 10.0
_SUMS = TypeAdapter(dict[Name, tuple[float, float]])


def check_evaluations(config: Config) -> None:
    """Raise a UserError if a file of a built-in evaluation cannot be read."""
    for kind in config.eval.chosen or ():
        if kind.is_built_in:
            kind.resolve().check(config)


def watched(
    micro_batches: Iterator[MicroBatch], progress: Callable[[], None]
) -> Iterator[MicroBatch]:
    for micro_batch in micro_batches:
        progress()
        yield micro_batch


class Evaluation:
    """Repeatable evaluation of one model.

    Args:
        model: Unwrapped; its weights may be filled in later.
        feed: This rank's validation sequences, or None to skip the validation loss.
    """

    def __init__(
        self,
        config: Config,
        model: GPT,
        tokenizer: Tokenizer,
        feed: EvalFeed | None,
        collectives: Collectives,
        autocast: Autocast,
    ) -> None:
        self._config, self._model, self._tokenizer = config, model, tokenizer
        self._feed, self._collectives, self._autocast = feed, collectives, autocast
        self._kinds = [config.registry.kind(*one) for one in config.eval.chosen_names()]
        self._token_bytes = torch.from_numpy(tokenizer.bytes_per_id(model.shape.padded_vocab_size))

    def metrics(
        self, progress: Callable[[], None] = lambda: None, log: Log = lambda _: None
    ) -> Row:
        """Return the keys of an evaluation's row, over all ranks, with None for numbers that are not finite.

        `progress` is called before every micro-batch and between the sums that an evaluation yields; `log`
        receives their means so far every SHOW_EVERY_S.

        Raises:
            ConfigError: on all ranks, if an evaluation failed on one of them.
        """
        metrics: dict[str, float | int] = {}
        if self._feed is not None:
            metrics |= self._validated(self._feed, progress)
        for kind in self._kinds:
            metrics |= self._measured(kind, progress, log)
        return {name: finite(value) for name, value in metrics.items()}

    def _measured(
        self, kind: Kind, progress: Callable[[], None], log: Log
    ) -> dict[str, float | int]:
        """Run an evaluation; NaN where the counts of all ranks are 0."""
        own, error = self.sums(kind, progress, log)
        keys = sorted(own)
        # All ranks exchange their errors: a rank that raised its own would block the others.
        answers = self._collectives.all_gather_json((error, keys), tuple[str | None, list[str]])
        for rank, (failed, others) in enumerate(answers):
            if failed is None and others != answers[0][1]:
                failed = f"returned the keys {others}, but {answers[0][1]} on rank 0"
            if failed is not None:
                raise ConfigError(f"evaluation {kind.name}, rank {rank}: {failed}")
        pairs = torch.tensor([own[key] for key in keys], dtype=torch.float64).view(-1, 2)
        totals, counts = self._collectives.all_reduce_sum(pairs).T
        means = dict(zip(keys, (totals / counts).tolist(), strict=True))
        row = getattr(kind.resolve(), "row", dict)(means) if kind.is_built_in else means
        return {f"{kind.name}/{key}": value for key, value in row.items()}

    def sums(
        self, kind: Kind, progress: Callable[[], None] = lambda: None, log: Log = lambda _: None
    ) -> tuple[dict[str, tuple[float, float]], str | None]:
        """Return this rank's sums and counts, or none and an error."""
        self._model.eval()
        seed_everything(self._config.train.seed, 0)  # the same on all ranks and in every evaluation
        sums: dict[str, tuple[float, float]] = {}
        shown_at = time.monotonic()
        try:
            with torch.no_grad(), self._autocast():
                for part in self._parts(kind):
                    progress()
                    for key, (total, num) in _SUMS.validate_python(part).items():
                        before = sums.get(key, (0.0, 0.0))
                        sums[key] = (before[0] + total, before[1] + num)
                    if time.monotonic() - shown_at >= SHOW_EVERY_S:
                        means = [f"{key} {s / n:.6g}" for key, (s, n) in sums.items() if n]
                        log(f"{kind.name} so far: {', '.join(means)}")
                        shown_at = time.monotonic()
            return sums, None
        except ValidationError as error:
            return {}, f"must return a dict of key -> (sum, count): {reason(error)}"
        except UserError as error:
            told = str(error).removeprefix(f"evaluations {kind.name}, ")
            return {}, told.encode(errors="replace").decode()

    def _parts(self, kind: Kind) -> Iterator[object]:
        """Yield what an evaluation returns, or what it yields."""
        config, ranks = self._config, self._collectives
        settings = config if kind.is_built_in else config.eval.settings(kind.settings)
        with kind.errors_as_line():
            function = kind.resolve()
            found = function(self._model, self._tokenizer, ranks.rank, ranks.world_size, settings)
            yield from found if isinstance(found, Iterator) else [found]

    def _validated(self, feed: EvalFeed, progress: Callable[[], None]) -> dict[str, float | int]:
        lengths = self._token_bytes.to(self._model.device)
        own = [
            evaluation_sums(self._model, watched(part, progress), lengths, self._autocast)
            for part in feed.micro_batches()
        ]
        sums = self._collectives.all_reduce_sum(torch.stack(own))  # (datasets, 4)
        shares = [one.manifest.text_share("val") for one in feed.data.datasets]
        sums[:, 3] *= torch.tensor(shares).double()  # text as it was before its normalization
        weights = torch.tensor([float(weight) for weight in feed.data.weights]).double()
        factors = weights * sums[:, 1].sum() / sums[:, 1]  # each has its share of the mixture
        metrics = loss_metrics((sums * factors[:, None]).sum(0))
        if feed.data.is_mixed:
            for name, part in zip(feed.data.names, sums, strict=True):
                alone = loss_metrics(part)
                metrics[f"val/loss/{name}"] = alone["val/loss"]
                metrics[f"val/tokens/{name}"] = alone["val/tokens"]
        return metrics

    def samples(self) -> str:
        e = self._config.eval
        prompt = self._tokenizer.encode_prompt(e.sample_prompt)
        sampling = e.model_dump(include={"max_new_tokens", "temperature", "top_k"})
        options = SamplingOptions(**sampling, seed=self._config.train.seed)
        with self._autocast():
            drawn = sample_tokens(self._model, None, prompt, e.num_samples, options)
        texts = [e.sample_prompt + self._tokenizer.decode(tokens) for tokens in drawn]
        return "\n".join(f"{i}: {text!r}" for i, text in enumerate(texts))


@torch.no_grad()
def evaluation_sums(
    model: GPT, micro_batches: Iterable[MicroBatch], token_bytes: Tensor, autocast: Autocast
) -> Tensor:
    """Return this rank's sums: float64 (4,) on the CPU.

    They are the loss of all targets in nats, their number, the loss of the targets with text (so without
    `eot`), and the bytes of that text.

    Args:
        model: Unwrapped: no collective runs, so ranks may have different numbers of batches.
        micro_batches: Targets of −100 are ignored.
        token_bytes: int64 (padded_vocab_size,), bytes of text of each id.
    """
    model.eval()
    sums = [torch.zeros(4, device=model.device)]
    for inputs, targets in micro_batches:
        with autocast():
            nats = model(inputs, targets, reduction="none").float()  # (B, T), 0 where ignored
        lengths = torch.where(targets == IGNORE_INDEX, 0, token_bytes[targets.clamp(min=0)])
        counted = (targets != IGNORE_INDEX).sum()
        parts = [nats.sum(), counted, (nats * (lengths > 0)).sum(), lengths.sum()]
        sums.append(torch.stack([part.float() for part in parts]))
    # Float64 adds multiples of 2^-20 without rounding up to 2^33 nats, in any order and on any rank.
    return (torch.stack(sums).cpu().double() * 2**20).round().sum(0) / 2**20


def loss_metrics(sums: Tensor) -> dict[str, float | int]:
    """Return the metrics of `evaluation_sums` over all ranks.

    Perplexity is infinite on overflow; bits per byte are comparable across tokenizers.
    """
    nats, tokens, text_nats, text_bytes = sums.tolist()
    loss = nats / round(tokens)
    return {
        "val/loss": loss,
        "val/perplexity": math.exp(loss) if loss < 700 else math.inf,
        "val/bits_per_byte": text_nats / math.log(2) / max(1, round(text_bytes)),
        "val/tokens": round(tokens),
    }
