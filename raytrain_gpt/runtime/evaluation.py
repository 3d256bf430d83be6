"""What an evaluation computes: validation loss over all ranks, and samples.

The same code evaluates inside training, beside it and in the `eval` command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import tiktoken
import torch

from raytrain_gpt.config import Config
from raytrain_gpt.core.evaluate import EvalResult, eval_result, evaluation_sums
from raytrain_gpt.core.loop import Autocast, MicroBatch
from raytrain_gpt.core.model import GPT
from raytrain_gpt.core.sample import sample_tokens
from raytrain_gpt.data.tokenizer import token_bytes
from raytrain_gpt.runtime.feed import EvalFeed
from raytrain_gpt.runtime.ranks import Ranks


class Evaluation:
    """Evaluates one model as often as asked.

    Args:
        config: The run's.
        model: Not wrapped.
        tokenizer: Its tokenizer.
        feed: This rank's share of the validation sequences.
        ranks: This process among all that evaluate together.
        autocast: Makes the context that forward passes run in.
    """

    def __init__(
        self,
        config: Config,
        model: GPT,
        tokenizer: tiktoken.Encoding,
        feed: EvalFeed,
        ranks: Ranks,
        autocast: Autocast,
    ) -> None:
        self._config, self._model, self._tokenizer = config, model, tokenizer
        self._feed, self._ranks, self._autocast = feed, ranks, autocast
        self._device = model.wte.weight.device
        lengths = token_bytes(tokenizer, model.shape.padded_vocab_size)
        self._token_bytes = torch.from_numpy(lengths).to(self._device)

    def validate(self, progress: Callable[[], None] = lambda: None) -> EvalResult:
        """Validation loss over all ranks, which all call this.

        Args:
            progress: Called with every micro-batch.
        """

        def batches() -> Iterator[MicroBatch]:
            for micro_batch in self._feed.micro_batches():
                progress()
                yield micro_batch

        own = evaluation_sums(self._model, batches(), self._token_bytes, self._autocast)
        return eval_result(self._ranks.summed(own))

    def samples(self) -> str:
        """A line for each sample of the configured prompt."""
        e = self._config.eval
        eot = self._tokenizer.eot_token
        prompt = torch.tensor(self._tokenizer.encode_ordinary(e.sample_prompt) or [eot])
        with self._autocast():
            drawn = sample_tokens(
                self._model,
                prompt.to(self._device),
                num_samples=e.num_samples,
                max_new_tokens=e.max_new_tokens,
                top_k=e.top_k,
                temperature=e.temperature,
                seed=self._config.train.seed,
            )
        texts = [e.sample_prompt + self._tokenizer.decode(ids) for ids in drawn.tolist()]
        return "\n".join(f"{i}: {text!r}" for i, text in enumerate(texts))
