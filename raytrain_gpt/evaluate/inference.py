"""A checkpoint in this process, without Ray: evaluated, or asked for samples."""

from __future__ import annotations

import codecs
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tiktoken
import torch

from raytrain_gpt.checkpoint.catalog import Checkpoint, resolve_checkpoint
from raytrain_gpt.checkpoint.collectives import Collectives
from raytrain_gpt.config.call_options import SamplingOptions
from raytrain_gpt.config.schema import Config, parse_config
from raytrain_gpt.core.architectures import configured_model
from raytrain_gpt.core.device import (
    best_device,
    has_bf16,
    inference_autocast,
    make_autocast,
    resolve_precision,
)
from raytrain_gpt.core.generate import sample_tokens
from raytrain_gpt.core.model import GPT, GPTShape
from raytrain_gpt.core.state import check_model_size, load_model
from raytrain_gpt.data.locations import data_of, recorded, recorded_data
from raytrain_gpt.data.mixture import Mixture, check_val_split, check_vocabulary
from raytrain_gpt.data.tokenizer import (
    TOKENIZER_FILE,
    decode_tokens,
    read_tokenizer,
    token_to_bytes,
)
from raytrain_gpt.errors import CheckpointError, ConfigError, DataError
from raytrain_gpt.evaluate.evaluation import Evaluation
from raytrain_gpt.evaluate.hellaswag import Choices, read_choices
from raytrain_gpt.format import Log
from raytrain_gpt.storage.location import COMMAND_RETRY_S, Location, LocationLike

if TYPE_CHECKING:
    from raytrain_gpt.ingest.feed import EvalFeed


_MANY_PARAMETERS = 2**24
"""From here on a token is so much work that threads share it gladly."""
RULE = "-" * 40
"""Between samples that are shown."""


def open_checkpoint(
    path: LocationLike, device: torch.device | None = None, on_skip: Log | None = None
) -> tuple[Checkpoint, Config, GPT, tiktoken.Encoding, torch.device]:
    """A verified checkpoint, its configuration, its model on a device, its tokenizer, the device.

    Args:
        path: A checkpoint or a run; an object store that does not answer is given up after a few seconds.
        device: None: the best one.
        on_skip: As in `resolve_checkpoint`.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    checkpoint = resolve_checkpoint(Location.of(path, retry_for_s=COMMAND_RETRY_S), on_skip)
    config = recorded(parse_config(checkpoint.state.config, str(checkpoint.path)))
    device = best_device() if device is None else device
    model, tokenizer = load_checkpoint(checkpoint, config, device)
    return checkpoint, config, model, tokenizer, device


def load_checkpoint(
    checkpoint: Checkpoint, config: Config, device: torch.device
) -> tuple[GPT, tiktoken.Encoding]:
    """The model of a checkpoint on a device, and its tokenizer.

    Raises:
        CheckpointError: it is damaged, or of another model than the configuration's.
    """
    tokenizer, num_ids = read_tokenizer(checkpoint.path), checkpoint.state.vocab_size
    if TOKENIZER_FILE not in checkpoint.file_names or tokenizer.max_token_value + 1 != num_ids:
        raise CheckpointError(
            f"{checkpoint.path / TOKENIZER_FILE} is not the checkpoint's own, of {num_ids} ids"
        )
    with checkpoint.files() as directory:
        check_model_size(directory, GPTShape.of(config, num_ids))
        model = configured_model(config, num_ids, tokenizer.eot_token)
        load_model(directory, model)
    return model.to(device), tokenizer


def evaluate_checkpoint(
    path: str | Path,
    log: Log,
    *,
    data: str | Path | None = None,
    eval_tokens: int | None = None,
    hellaswag: str | None = None,
) -> tuple[Location, dict[str, Any]]:
    """The path of a checkpoint and its metrics, with `step`.

    Args:
        path: A checkpoint or a run.
        data: Dataset, or several with weights as in `data_path`; None: what the checkpoint was trained
            on, which may be absent if HellaSwag is scored.
        eval_tokens: Upper limit of validation tokens; None: as in training.
        hellaswag: The file, or `download`; None: it is not scored.

    Raises:
        CheckpointError: there is none, or it is damaged.
        ConfigError: eval_tokens is below 1.
        DataError: no dataset, one of another tokenizer, or too little to validate on; or no HellaSwag.
    """
    checkpoint, config, model, tokenizer, device = open_checkpoint(path, on_skip=log)
    if config.train.precision == "bf16" and not has_bf16(device):
        log("evaluated in fp32: this device does not support bf16")
        config = config.updated({"precision": "fp32"})
    choices = None if hellaswag is None else read_choices(config, hellaswag, tokenizer)
    feed = None
    try:
        mixture = _trained_data(checkpoint, config) if data is None else data_of(config, str(data))
        feed = validation_feed(checkpoint, config, device, mixture, eval_tokens)
    except DataError as error:
        if choices is None or data is not None:
            raise
        log(f"only HellaSwag is evaluated: {error}")
    evaluation = lone_evaluation(config, model, tokenizer, feed, choices)
    return checkpoint.path, {"step": checkpoint.state.step, **evaluation.metrics(log=log)}


def lone_evaluation(
    config: Config,
    model: GPT,
    tokenizer: tiktoken.Encoding,
    feed: EvalFeed | None,
    choices: Choices | None,
) -> Evaluation:
    """An `Evaluation` by this process alone, on the model's device."""
    device = model.device
    autocast = make_autocast(resolve_precision(config.train.precision, device), device)
    alone = Collectives(rank=0, world_size=1)
    return Evaluation(config, model, tokenizer, feed, alone, autocast, choices)


def _trained_data(checkpoint: Checkpoint, config: Config) -> Mixture:
    """Read the data that a checkpoint was trained on, from where it says.

    Raises:
        DataError: there is none, it was replaced, or it is in a store that only the user may choose.
    """
    if not checkpoint.state.manifest_hash:
        raise DataError(
            f"{checkpoint.path} was imported, so it has no dataset of its own; give one by --data"
        )
    data = recorded_data(config, checkpoint.path)
    check_trained_on(checkpoint, data)
    return data


def check_trained_on(checkpoint: Checkpoint, data: Mixture) -> None:
    """Raise a DataError unless `data` is what the checkpoint was trained on."""
    if data.hash != checkpoint.state.manifest_hash:
        raise DataError(
            f"{', '.join(str(part.directory) for part in data.datasets)} has hash {data.hash[:12]}, "
            f"{checkpoint.path} was trained on {checkpoint.state.manifest_hash[:12]}; give the data to "
            "validate on by --data"
        )


def validation_feed(
    checkpoint: Checkpoint,
    config: Config,
    device: torch.device,
    data: Mixture,
    eval_tokens: int | None = None,
) -> EvalFeed:
    """The validation sequences of `data`, up to `eval_tokens`.

    Raises:
        DataError: it has another tokenizer than the checkpoint, or too little to validate on.
    """
    # Here: they import Ray, which samples do not need.
    from raytrain_gpt.ingest.feed import EvalFeed
    from raytrain_gpt.ingest.ray_dataset import IngestSpec

    check_vocabulary(data, checkpoint.state.vocab_hash, str(checkpoint.path))
    if eval_tokens is not None:
        config = config.updated({"eval_tokens": eval_tokens})
    spec = IngestSpec(config, data, 1)
    check_val_split(data, spec.seq_len)
    tokens, delivered = data.read("val", spec.seq_len, spec.eval_ids()[0])
    micro = parse_config(checkpoint.state.config, str(checkpoint.path)).train.micro_batch_sequences
    micro = 1 if micro == "auto" else micro  # a run writes what auto became
    return EvalFeed(tokens, delivered, data, micro, device)


def sample_checkpoint(
    path: str | Path,
    prompt: str,
    log: Log,
    *,
    num_samples: int,
    show: Log | None = None,
    **options: Any,
) -> list[str]:
    """Continuations of a prompt (which may be empty), the prompt included.

    Args:
        path: A checkpoint or a run.
        show: Gets the first continuation line by line while it is generated, then the others.
        options: Those of `sampling_options`.

    Raises:
        ConfigError: num_samples or an option is out of range.
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    if num_samples < 1:
        raise ConfigError(f"num_samples={num_samples} is below 1; set num_samples to 1 or more")
    _, config, model, tokenizer, device = open_checkpoint(path, on_skip=log)
    how = sampling_options(config, options)
    ids = prompt_tokens(tokenizer, prompt)
    if len(ids) > model.shape.seq_len:
        log(f"the prompt has {len(ids)} tokens; the model sees the last {model.shape.seq_len}")
    first = _Lines(tokenizer, prompt, show)
    prompts = [ids] * num_samples
    with inference_autocast(device), _few_threads(model):
        drawn = sample_tokens(model, tokenizer.eot_token, prompts, how, on_token=first.add)
    texts = [prompt + decode_tokens(tokenizer, one.tokens) for one in drawn]
    first.close()
    if show is not None:
        for text in texts[1:]:
            show(f"{text}\n{RULE}")
    return texts


@contextlib.contextmanager
def _few_threads(model: GPT) -> Iterator[None]:
    """One thread for a small model on a CPU: more gain nothing, and wait for each other beside other load."""
    threads = torch.get_num_threads()
    if model.shape.num_parameters < _MANY_PARAMETERS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def sampling_options(config: Config, given: dict[str, Any]) -> SamplingOptions:
    """The given options; without `max_new_tokens` that of the run's evaluations, which suits its tokenizer.

    Raises:
        ConfigError: an option is out of range.
    """
    return SamplingOptions(**{"max_new_tokens": config.eval.max_new_tokens, **given})


class _Lines:
    """Shows prompt 0 and its tokens line by line: whole ones, in which secrets are seen."""

    def __init__(self, tokenizer: tiktoken.Encoding, prompt: str, show: Log | None) -> None:
        self._tokenizer, self._show, self._text = tokenizer, show, prompt
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, index: int, token: int) -> None:
        if self._show is None or index:
            return
        self._text += self._decoder.decode(token_to_bytes(self._tokenizer, token))
        *lines, self._text = self._text.split("\n")
        for line in lines:
            self._show(line)

    def close(self) -> None:
        if self._show is not None:
            self._show(f"{self._text}{self._decoder.decode(b'', final=True)}\n{RULE}")


def prompt_tokens(tokenizer: tiktoken.Encoding, prompt: str) -> list[int]:
    """Token ids of a prompt; an empty one becomes `eot`, after which a document begins."""
    return tokenizer.encode_ordinary(prompt) or [tokenizer.eot_token]
