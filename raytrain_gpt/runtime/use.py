"""Use a checkpoint in this process, without Ray: evaluate it, draw samples from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiktoken
import torch

from raytrain_gpt.config import Config, parse_config
from raytrain_gpt.core.device import autocast_of, best_device, resolve_precision
from raytrain_gpt.core.model import GPT, GPTShape
from raytrain_gpt.core.sample import sample_tokens
from raytrain_gpt.core.state import load_model
from raytrain_gpt.data.reader import read_sequences
from raytrain_gpt.data.shards import read_manifest
from raytrain_gpt.data.storage import Location
from raytrain_gpt.data.tokenizer import read_tokenizer
from raytrain_gpt.errors import ConfigError, DataError
from raytrain_gpt.runtime.checkpoints import Checkpoint, resolve_checkpoint
from raytrain_gpt.runtime.evaluation import Evaluation
from raytrain_gpt.runtime.feed import EvalFeed
from raytrain_gpt.runtime.ingest import IngestSpec
from raytrain_gpt.runtime.locations import data_location
from raytrain_gpt.runtime.preflight import check_vocabulary
from raytrain_gpt.runtime.ranks import Ranks


def open_checkpoint(
    path: str | Path,
) -> tuple[Checkpoint, Config, GPT, tiktoken.Encoding, torch.device]:
    """A verified checkpoint, its configuration, its model on the best device, its tokenizer.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    checkpoint = resolve_checkpoint(Location.of(path))
    config = parse_config(checkpoint.state.config, str(checkpoint.path))
    tokenizer = read_tokenizer(checkpoint.path)
    device = best_device()
    model = GPT(GPTShape.of(config, checkpoint.state.vocab_size))
    with checkpoint.files() as directory:
        load_model(directory, model)
    return checkpoint, config, model.to(device), tokenizer, device


def evaluate_checkpoint(
    path: str | Path, data: str | Path | None, eval_tokens: int | None
) -> tuple[Location, dict[str, Any]]:
    """Validation metrics of a checkpoint.

    Args:
        path: A checkpoint or a run.
        data: Dataset; None: the one it was trained on.
        eval_tokens: Upper limit of tokens; None: as in training.

    Returns:
        The checkpoint's path and its metrics, with `step`.

    Raises:
        CheckpointError: there is none, or it is damaged.
        ConfigError: eval_tokens is below 1.
        DataError: no dataset, one of another tokenizer, or too little to validate on.
    """
    if eval_tokens is not None and eval_tokens < 1:
        raise ConfigError(f"eval_tokens={eval_tokens} is below 1; set --eval_tokens to 1 or more")
    checkpoint, config, model, tokenizer, device = open_checkpoint(path)
    directory = data_location(config) if data is None else Location.of(data)
    manifest = read_manifest(directory)
    check_vocabulary(manifest, checkpoint.state.vocab_hash, str(checkpoint.path))
    spec = IngestSpec(
        directory=directory,
        manifest=manifest,
        seq_len=config.data.seq_len,
        batch_sequences=config.batch_sequences,
        seed=config.train.seed,
        world_size=1,
        eval_tokens=eval_tokens or config.eval.eval_tokens,
    )
    ids = spec.eval_ids()[0]
    if not len(ids):
        raise DataError(f"the val split of {directory} has no sequence of {spec.seq_len} tokens")
    tokens, delivered = read_sequences(directory, manifest, "val", spec.seq_len, ids)
    feed = EvalFeed(tokens, delivered, config.train.micro_batch_sequences, device)
    autocast = autocast_of(resolve_precision(config.train.precision, device), device)
    evaluation = Evaluation(config, model, tokenizer, feed, Ranks(rank=0, world_size=1), autocast)
    return checkpoint.path, {"step": checkpoint.state.step, **evaluation.validate().metrics()}


def sample_checkpoint(
    path: str | Path,
    prompt: str,
    log: Callable[[str], None],
    *,
    num_samples: int,
    max_new_tokens: int,
    top_k: int,
    temperature: float,
    seed: int,
) -> list[str]:
    """Continuations of a prompt, the prompt included.

    Raises:
        ConfigError: an option is out of range.
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    for name, value, least in (
        ("num_samples", num_samples, 1),
        ("max_new_tokens", max_new_tokens, 1),
        ("top_k", top_k, 1),
        ("temperature", temperature, 0),
    ):
        if value < least:
            raise ConfigError(f"{name}={value:g} is below {least}; set --{name} to {least} or more")
    _, _, model, tokenizer, device = open_checkpoint(path)
    ids = tokenizer.encode_ordinary(prompt) or [tokenizer.eot_token]
    if len(ids) > model.shape.seq_len:
        log(f"the prompt has {len(ids)} tokens; the model sees the last {model.shape.seq_len}")
    drawn = sample_tokens(
        model,
        torch.tensor(ids, device=device),
        num_samples=num_samples,
        max_new_tokens=max_new_tokens,
        top_k=top_k,
        temperature=temperature,
        seed=seed,
    )
    return [prompt + tokenizer.decode(row) for row in drawn.tolist()]
