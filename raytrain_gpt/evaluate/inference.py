"""Evaluation of a checkpoint, or samples from it, in this process and without Ray."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from raytrain_gpt.checkpoint.catalog import CODE_FILE, Checkpoint
from raytrain_gpt.checkpoint.collectives import Collectives
from raytrain_gpt.checkpoint.open import open_checkpoint
from raytrain_gpt.config.call_options import SamplingOptions
from raytrain_gpt.config.kinds import BUILT_IN, Registry
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.device import has_bf16, inference_autocast, make_autocast, resolve_precision
from raytrain_gpt.core.generate import sample_tokens
from raytrain_gpt.data.locations import read_data, recorded_data
from raytrain_gpt.data.mixture import Mixture, check_val_split, check_vocabulary
from raytrain_gpt.errors import ConfigError, DataError
from raytrain_gpt.evaluate.evaluation import Evaluation, check_evaluations
from raytrain_gpt.format import Log, shell
from raytrain_gpt.storage.location import Location, LocationLike

if TYPE_CHECKING:
    from raytrain_gpt.ingest.feed import EvalFeed

IMPORT_SEQ_LEN = 2048
"""Tokens of a sequence of imported weights whose context is longer."""


def evaluate_checkpoint(
    path: LocationLike,
    log: Log,
    *,
    data: str | Path | None = None,
    eval_tokens: int | None = None,
    seq_len: int | None = None,
    hellaswag: str | None = None,
    evaluations: str | None = None,
    settings: Mapping[str, Any] | None = None,
    average: int = 1,
    registry: Registry = BUILT_IN,
) -> tuple[Location, dict[str, Any]]:
    """Return the path of a checkpoint, and its metrics with `step`.

    Args:
        path: A checkpoint or a run.
        data: Dataset, or several with weights as in `data_path`. By default the checkpoint's training data,
            which may be missing if something else is evaluated.
        eval_tokens: Maximum of validation tokens, as in training if None.
        seq_len: Tokens of a validation sequence; if None, as in training, or IMPORT_SEQ_LEN for an import.
        hellaswag: The file, or `download`.
        evaluations: Names of the user's evaluations, with commas; by default the training run's, without
            those whose code was not given.
        settings: Settings of `evaluations`; others have their defaults, not the training run's values.
        average, registry: As in `open_checkpoint`.

    Raises:
        CheckpointError: it is missing or damaged.
        ConfigError: eval_tokens or seq_len is out of range, or a user's evaluation is unknown or fails.
        DataError: the dataset is missing, too small to validate on, or has another tokenizer, or
            HellaSwag cannot be read.
    """
    checkpoint, config, model, tokenizer, device = open_checkpoint(
        path, None, log, average, registry
    )
    if config.train.precision == "bf16" and not has_bf16(device):
        log("evaluated in fp32: this device does not support bf16")
        config = config.updated({"precision": "fp32"})
    own = _known_evaluations(checkpoint, config, log) if evaluations is None else evaluations
    config = config.updated({"evaluations": own, "hellaswag_path": hellaswag, **(settings or {})})
    check_evaluations(config)
    context, is_import = model.shape.seq_len, not checkpoint.state.manifest_hash
    seq_len = seq_len or (min(context, IMPORT_SEQ_LEN) if is_import else context)
    if seq_len > context:
        raise ConfigError(
            f"seq_len={seq_len} is above the context of {checkpoint.path}; set it to at most {context}"
        )
    ours, theirs = config.eval.model_extra or {}, checkpoint.state.config.get("eval", {})
    left = [name for name in ours if name not in (settings or {})]
    if flags := [f"--{n}={theirs[n]}" for n in left if theirs.get(n, ours[n]) != ours[n]]:
        log(f"not with the run's settings; if you trust it, add --evaluations {shell(own, *flags)}")
    feed = None
    try:
        mixture = trained_data(checkpoint, config) if data is None else read_data(config, str(data))
        feed = _validation_feed(checkpoint, config, device, mixture, eval_tokens, seq_len)
    except DataError as error:
        if data is not None or not config.eval.chosen_names():
            raise
        log(f"no validation loss: {error}")
    autocast = make_autocast(resolve_precision(config.train.precision, device), device)
    alone = Collectives(0, 1)
    evaluation = Evaluation(config, model, tokenizer, feed, alone, autocast)
    return checkpoint.path, {"step": checkpoint.state.step, **evaluation.metrics(log=log)}


def _known_evaluations(checkpoint: Checkpoint, config: Config, log: Log) -> str:
    """Return the names of the user's evaluations in a run, with commas; logs those without code."""
    names = config.eval.evaluations
    known = [name for name in names if config.registry.find("evaluations", name)]
    if skipped := ", ".join(name for name in names if name not in known):
        code = shell(checkpoint.path / CODE_FILE)
        log(f"skipping {skipped}: no code was given; if you trust it, pass --code {code}")
    return ",".join(known)


def trained_data(checkpoint: Checkpoint, config: Config) -> Mixture:
    """Read a checkpoint's training data from its recorded path.

    Raises a DataError if it is missing, was replaced, or is in a store that only the user may choose.
    """
    if not checkpoint.state.manifest_hash:
        raise DataError(f"{checkpoint.path} was imported, so it has no training data; set --data")
    data = recorded_data(config, checkpoint.path)
    if data.hash != checkpoint.state.manifest_hash:
        raise DataError(
            f"{', '.join(str(part.directory) for part in data.datasets)} has hash {data.hash[:12]}, "
            f"but {checkpoint.path} was trained on {checkpoint.state.manifest_hash[:12]}; set --data to "
            "the data to validate on"
        )
    return data


def _validation_feed(
    checkpoint: Checkpoint,
    config: Config,
    device: torch.device,
    data: Mixture,
    eval_tokens: int | None,
    seq_len: int,
) -> EvalFeed:
    """Read the validation sequences of `data`, of `seq_len` tokens and up to `eval_tokens` in all.

    Raises a DataError if its tokenizer differs from the checkpoint's, or it is too small to validate on.
    """
    from raytrain_gpt.ingest.feed import EvalFeed  # here, because samples do not need Ray

    check_vocabulary(data, checkpoint.state.vocab_hash, str(checkpoint.path))
    if eval_tokens is not None:
        config = config.updated({"eval_tokens": eval_tokens})
    check_val_split(data, seq_len)
    tokens, ids = data.read("val", seq_len, data.val_ids(seq_len, config.eval.eval_tokens))
    micro = config.train.micro_batch_sequences
    micro = 1 if micro == "auto" else micro  # a run stores the resolved value
    return EvalFeed(tokens, ids, data, micro, device)


def sample_checkpoint(
    path: LocationLike,
    prompt: str,
    log: Log,
    *,
    num_samples: int,
    average: int = 1,
    registry: Registry = BUILT_IN,
    **options: Any,
) -> list[str]:
    """Return continuations of a prompt, which may be empty, with the prompt.

    Args:
        average, registry: As in `open_checkpoint`.
        options: Those of `SamplingOptions`, where max_new_tokens defaults to that of the run's evaluations.

    Raises:
        ConfigError: num_samples or an option is out of range.
        CheckpointError: the checkpoint is missing or damaged.
    """
    if num_samples < 1:
        raise ConfigError(f"num_samples={num_samples} is below 1; set num_samples to 1 or more")
    _, config, model, tokenizer, device = open_checkpoint(path, None, log, average, registry)
    how = SamplingOptions(**{"max_new_tokens": config.eval.max_new_tokens, **options})
    ids = tokenizer.encode_prompt(prompt)
    if len(ids) > model.shape.seq_len:
        log(f"the prompt has {len(ids)} tokens; the model sees the last {model.shape.seq_len}")
    with inference_autocast(device):
        drawn = sample_tokens(model, tokenizer.eot_token, ids, num_samples, how)
    return [prompt + tokenizer.decode(tokens) for tokens in drawn]
