"""A checkpoint's model and tokenizer, opened for evaluation, sampling or export."""

from __future__ import annotations

import torch

from raytrain_gpt.checkpoint.catalog import Catalog, Checkpoint, resolve_checkpoint
from raytrain_gpt.checkpoint.code_check import check_executable
from raytrain_gpt.config.kinds import BUILT_IN, Registry
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.device import best_device
from raytrain_gpt.core.model import GPT, GPTShape
from raytrain_gpt.core.registry import configured_model
from raytrain_gpt.core.state import check_model_size, load_model
from raytrain_gpt.data.locations import recorded
from raytrain_gpt.data.tokenizer import TOKENIZER_FILE, Tokenizer
from raytrain_gpt.data.tokenizer_file import read_tokenizer
from raytrain_gpt.errors import CheckpointError, ConfigError, reason
from raytrain_gpt.format import Log, count
from raytrain_gpt.redact import say
from raytrain_gpt.storage.location import COMMAND_RETRY_S, Location, LocationLike


def open_checkpoint(
    path: LocationLike,
    device: str | None = None,
    log: Log = say,
    average: int = 1,
    registry: Registry = BUILT_IN,
) -> tuple[Checkpoint, Config, GPT, Tokenizer, torch.device]:
    """Load a verified checkpoint, with its configuration, model, tokenizer and device.

    Args:
        path: A checkpoint or a run; an unreachable object store is retried for a few seconds only.
        device: Best available one if None.
        log: As in `resolve_checkpoint`.
        average: Average the weights over this many checkpoints, up to this one, of a run up to the newest.
        registry: Has the given code, which is executed only if it is the checkpoint's.

    Raises:
        CheckpointError: it is missing or damaged, or needs code that was not given.
        ConfigError: there are fewer checkpoints to average.
    """
    place = Location.of(path, retry_for_s=COMMAND_RETRY_S)
    newest = Catalog(place).pick("newest", log) if average > 1 else None
    checkpoint = newest or resolve_checkpoint(place, log)
    check_executable(checkpoint, registry.code, log)
    config = recorded(checkpoint.state.config, str(checkpoint.path), registry)
    placed = best_device() if device is None else torch.device(device)
    tokenizer, num_ids = read_tokenizer(checkpoint.path), checkpoint.state.vocab_size
    if TOKENIZER_FILE not in checkpoint.file_names or tokenizer.n_vocab != num_ids:
        raise CheckpointError(
            f"{checkpoint.path / TOKENIZER_FILE} is not the checkpoint's tokenizer, which has {num_ids} ids"
        )
    with checkpoint.files() as directory:
        check_model_size(directory, GPTShape.of(config, num_ids))
        model = configured_model(config, num_ids, tokenizer.eot_token)
        load_model(directory, model)
    if average > 1:
        _average(model, checkpoint, average, log)
    return checkpoint, config, model.to(placed), tokenizer, placed


@torch.no_grad()
def _average(model: GPT, newest: Checkpoint, num: int, log: Log) -> None:
    """Change the weights of a checkpoint to the mean over `num` checkpoints, summed in float64."""
    run_dir, steps = newest.path.parent.parent, [newest.state.step]
    sums = [p.double() for p in model.parameters()]
    before = steps[0]
    while len(steps) < num and (earlier := Catalog(run_dir).pick("before", log, before)):
        before = earlier.state.step
        try:
            with earlier.files() as directory:
                load_model(directory, model)
        except (CheckpointError, OSError) as error:  # of another shape, or pruned meanwhile
            log(f"skipped: {earlier.path}: {reason(error)}")
            continue
        torch._foreach_add_(sums, [p.double() for p in model.parameters()])
        steps.insert(0, before)
    if len(steps) < num:
        raise ConfigError(
            f"average={num}, but {run_dir} has {count(len(steps), 'good checkpoint')} up to step "
            f"{steps[-1]}; lower it, or train with a higher keep_checkpoints"
        )
    log(f"averaged: steps {', '.join(map(str, steps))}")
    for parameter, total in zip(model.parameters(), sums, strict=True):
        parameter.copy_(total / num)
