"""Evaluation over all ranks: validation loss, HellaSwag, the user's evaluations, and samples.

The same code runs in training workers and in `eval`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import tiktoken
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from raytrain_gpt.checkpoint.collectives import Collectives
from raytrain_gpt.config import kinds
from raytrain_gpt.config.call_options import SamplingOptions
from raytrain_gpt.config.kinds import Kind
from raytrain_gpt.config.open_section import Name
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.device import seed_everything
from raytrain_gpt.core.generate import sample_tokens
from raytrain_gpt.core.loop import Autocast, MicroBatch
from raytrain_gpt.core.loss import IGNORE_INDEX
from raytrain_gpt.core.model import GPT
from raytrain_gpt.data.tokenizer import bytes_per_id, decode_tokens, prompt_tokens
from raytrain_gpt.errors import ConfigError, UserError, reason
from raytrain_gpt.evaluate.hellaswag import NUM_ENDINGS, Choices, choice_metrics, ending_losses
from raytrain_gpt.format import Log, count
from raytrain_gpt.tracking.run_files import Row, finite

if TYPE_CHECKING:
    from raytrain_gpt.ingest.feed import EvalFeed

SHOW_EVERY_S = 10.0
_SUMS = TypeAdapter(dict[Name, tuple[float, float]])


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
        choices: HellaSwag, or None to skip it.
    """

    def __init__(
        self,
        config: Config,
        model: GPT,
        tokenizer: tiktoken.Encoding,
        feed: EvalFeed | None,
        collectives: Collectives,
        autocast: Autocast,
        choices: Choices | None,
    ) -> None:
        self._config, self._model, self._tokenizer = config, model, tokenizer
        self._feed, self._collectives, self._autocast = feed, collectives, autocast
        self._choices = choices
        self._own = [kinds.kind("evaluations", name) for name in config.eval.evaluations]
        self._token_bytes = torch.from_numpy(bytes_per_id(tokenizer, model.shape.padded_vocab_size))

    def metrics(self, progress: Callable[[], None] = lambda: None, log: Log | None = None) -> Row:
        """Return the keys of an evaluation's row, over all ranks, with None for numbers that are not finite.

        `progress` is called before every micro-batch; `log` receives HellaSwag's progress every SHOW_EVERY_S.

        Raises:
            ConfigError: on all ranks, as an evaluation of the user's failed on one of them.
        """
        metrics: dict[str, float | int] = {}
        if self._feed is not None:
            metrics |= self._validated(self._feed, progress)
        if self._choices is not None:
            score = self._scored(self._choices, progress, log)
            metrics |= {f"hellaswag/{name}": value for name, value in score.items()}
            metrics["hellaswag/cut"] = self._choices.num_cut
        for kind in self._own:
            progress()
            metrics |= self._measured(kind)
            progress()
        return {name: finite(value) for name, value in metrics.items()}

    def _measured(self, kind: Kind) -> dict[str, float]:
        """Run an evaluation of the user's; NaN where the counts of all ranks are 0."""
        own, error = self.sums(kind)
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
        means = (totals / counts).tolist()
        return {f"{kind.name}/{key}": mean for key, mean in zip(keys, means, strict=True)}

    def sums(self, kind: Kind) -> tuple[dict[str, tuple[float, float]], str | None]:
        """Return this rank's sums and counts, or none and an error."""
        self._model.eval()
        seed_everything(self._config.train.seed, 0)  # equal on all ranks and in every evaluation
        settings, ranks = self._config.eval.settings(kind.settings), self._collectives
        try:
            with torch.no_grad(), self._autocast():
                sums = kind.call(
                    self._model, self._tokenizer, ranks.rank, ranks.world_size, settings
                )
            return _SUMS.validate_python(sums), None
        except ValidationError as error:
            return {}, f"must return a dict of key -> (sum, count): {reason(error)}"
        except UserError as error:
            told = str(error).removeprefix(f"evaluations {kind.name}, ")
            return {}, told.encode(errors="replace").decode()

    def _validated(self, feed: EvalFeed, progress: Callable[[], None]) -> dict[str, float | int]:
        lengths = self._token_bytes.to(self._model.device)
        own = [
            evaluation_sums(self._model, watched(part, progress), lengths, self._autocast)
            for part in feed.micro_batches()
        ]
        sums = self._collectives.all_reduce_sum(torch.stack(own))  # (datasets, 4)
        weights = torch.tensor([float(weight) for weight in feed.data.weights]).double()
        metrics = loss_metrics(mixed_sums(sums, weights))
        if feed.data.is_mixed:
            for name, part in zip(feed.data.names, sums, strict=True):
                alone = loss_metrics(part)
                metrics[f"val/loss/{name}"] = alone["val/loss"]
                metrics[f"val/tokens/{name}"] = alone["val/tokens"]
        return metrics

    def _scored(
        self, choices: Choices, progress: Callable[[], None], log: Log | None
    ) -> dict[str, float | int]:
        own = torch.zeros(3, dtype=torch.int64)
        shown_at = time.monotonic()
        for _, labels, *chosen in self.answers(choices, progress):
            right = [(endings == labels).sum() for endings in chosen]
            own += torch.stack([torch.tensor(len(labels)), *right])
            if log is not None and time.monotonic() - shown_at >= SHOW_EVERY_S:
                log(f"hellaswag: {own[0]} of {count(len(choices.labels), 'example')}")
                shown_at = time.monotonic()
        return choice_metrics(*self._collectives.all_reduce_sum(own).tolist())

    def answers(
        self, choices: Choices, progress: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Evaluate this rank's examples, batch by batch.

        Yields:
            Four int64 (n,): indices of the examples in the file, correct endings, and the endings with the
            smallest summed loss and with the smallest loss per token.
        """
        device = self._model.device
        rank, world_size = self._collectives.rank, self._collectives.world_size
        for batch in choices.batches(rank, world_size, device.type):
            progress()
            tokens, scored = batch.tokens.to(device), batch.scored.to(device)
            losses = ending_losses(self._model, tokens, scored, self._autocast)
            by_sum, by_mean = (loss.view(-1, NUM_ENDINGS).argmin(1) for loss in losses)
            yield batch.examples, batch.labels, by_sum, by_mean

    def samples(self) -> str:
        e = self._config.eval
        prompt = prompt_tokens(self._tokenizer, e.sample_prompt)
        sampling = e.model_dump(include={"max_new_tokens", "temperature", "top_k"})
        options = SamplingOptions(**sampling, seed=self._config.train.seed)
        with self._autocast():
            drawn = sample_tokens(self._model, None, prompt, e.num_samples, options)
        texts = [e.sample_prompt + decode_tokens(self._tokenizer, tokens) for tokens in drawn]
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


def mixed_sums(sums: Tensor, weights: Tensor) -> Tensor:
    """Weight the sums of several datasets by each one's share of the mixture; float64 (4,).

    `sums` are float64 (datasets, 4) from `evaluation_sums`; `weights`, float64 (datasets,), sum to 1.
    """
    tokens = sums[:, 1]
    factors = weights * tokens.sum() / tokens
    return (sums * factors[:, None]).sum(0)
