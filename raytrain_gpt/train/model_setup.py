"""A model ready for training: loaded, compiled, on its device, replicated or sharded over the ranks."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import ray.train
import ray.train.torch
import tiktoken
import torch
import torch.distributed as dist
from torch import nn

from raytrain_gpt.checkpoint.catalog import Checkpoint, read_checkpoint
from raytrain_gpt.checkpoint.collectives import Collectives
from raytrain_gpt.config.resolved import ResolvedConfig
from raytrain_gpt.config.sections import TrainSection
from raytrain_gpt.core.architectures import configured_model
from raytrain_gpt.core.device import make_autocast, matmul_dtype, resolve_precision
from raytrain_gpt.core.exact import ExactSum
from raytrain_gpt.core.loop import Autocast
from raytrain_gpt.core.loss_scale import LossScale, loss_scale_for
from raytrain_gpt.core.model import GPT
from raytrain_gpt.core.optim import build_optimizer
from raytrain_gpt.core.parallel import make_eval_model, shard
from raytrain_gpt.core.state import load_model, load_optimizer
from raytrain_gpt.data.locations import location
from raytrain_gpt.data.mixture import Mixture
from raytrain_gpt.data.tokenizer import read_tokenizer


@dataclass(frozen=True)
class TrainingSetup:
    """A rank's model, optimizer and numerics.

    Attributes:
        raw_model: The GPT; with `fsdp` its parameters are this rank's shards.
        model: Model for the training loop: `raw_model`, in DDP if it is replicated.
        eval_model: Model for evaluations, without collectives.
        loss_scale: For fp16, or None without scaling.
    """

    tokenizer: tiktoken.Encoding
    raw_model: GPT
    model: nn.Module
    eval_model: GPT
    optimizer: torch.optim.AdamW
    device: torch.device
    precision: str
    autocast: Autocast
    loss_scale: LossScale | None


def set_up_training(
    config: ResolvedConfig,
    data: Mixture,
    resumed: Checkpoint | None,
    device: torch.device,
    ranks: Collectives,
    group: dist.ProcessGroup | None = None,
) -> TrainingSetup:
    """Set up a new run or one that resumes; all ranks call it. For `group` see `prepare_model`.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    precision = resolve_precision(config.train.precision, device)
    tokenizer = read_tokenizer(data.first.directory)
    model = configured_model(
        config,
        tokenizer.max_token_value + 1,
        tokenizer.eot_token,
        config.train.activation_checkpointing,
    )
    source = resumed
    if source is None and config.model.init_from:
        source = read_checkpoint(location(config, config.model.init_from))
    with nullcontext() if source is None else files_on_machine(source, ranks) as directory:
        # Weights load before sharding, moments after it: the optimizer is built on shards.
        if directory is None:
            model.init_weights(config.train.seed)
        else:
            load_model(directory, model, crop_context=resumed is None)
        prepared = prepare_model(model, config.train, precision, device, group)
        # With exact sums each rank updates every matrix, as splitting the work may change bits.
        sharing = None if config.train.exact else group or gradient_group()
        optimizer = build_optimizer(model, config.optim, matmul_dtype(precision), sharing)
        if directory is not None and resumed is not None:
            load_optimizer(directory, model, optimizer, resumed.file_names)
    eval_model = make_eval_model(model)
    if config.train.compile and eval_model is not model:
        eval_model.compile()
    saved_scale = resumed.state.loss_scale if resumed else None
    return TrainingSetup(
        tokenizer=tokenizer,
        raw_model=model,
        model=prepared,
        eval_model=eval_model,
        optimizer=optimizer,
        device=device,
        precision=precision,
        autocast=make_autocast(precision, device),
        loss_scale=loss_scale_for(precision, device, saved_scale),
    )


@contextmanager
def files_on_machine(checkpoint: Checkpoint, ranks: Collectives) -> Iterator[Path]:
    """Yield a checkpoint's `files` on all ranks; each machine downloads from an object store once."""
    if checkpoint.path.is_local:
        with checkpoint.files() as directory:
            yield directory
        return
    temporary = Path(tempfile.gettempdir()).stat()
    machine = (uuid.getnode(), temporary.st_dev, temporary.st_ino)
    fetching = ranks.all_gather_json(machine, tuple[int, int, int]).index(machine)
    with checkpoint.files() if fetching == ranks.rank else nullcontext() as directory:
        fetched = ranks.all_gather_json(directory, Path | None)[fetching]
        assert fetched is not None, "the rank that fetches has a directory"
        yield fetched
        ranks.all_gather_json(None, None)  # barrier: until all ranks have read


def gradient_group() -> dist.ProcessGroup | None:
    """Group of the ranks with equal gradients, or None for a single rank."""
    return dist.group.WORLD if ray.train.get_context().get_world_size() > 1 else None


def exact_sum(
    model: GPT,
    train: TrainSection,
    micro_batches_per_step: int,
    group: dist.ProcessGroup | None = None,
) -> ExactSum | None:
    """Exact sums of the ranks' gradients, or None if off. For `group` see `prepare_model`."""
    if not train.exact:
        return None
    return ExactSum([*model.parameters()], micro_batches_per_step, group or gradient_group())


def prepare_model(
    model: GPT,
    train: TrainSection,
    precision: str,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> nn.Module:
    """Wrap the model for its strategy: DDP, FSDP (in place), or unchanged for exact sums.

    All ranks call it.

    Args:
        model: Unsharded, initialized or loaded, equal on all ranks.
        train: `compile` and `parallel`; a single rank is not sharded.
        group: Process group that reduces gradients, or None for the default.
    """
    if train.compile:
        model.compile()
    if train.exact:
        if device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        return model.to(device)
    if train.parallel == "ddp" or ray.train.get_context().get_world_size() == 1:
        replica: nn.Module = ray.train.torch.prepare_model(
            model,
            move_to_device=device,
            parallel_strategy_kwargs={"gradient_as_bucket_view": True, "process_group": group},
        )
        return replica
    shard(model, device, matmul_dtype(precision), group)
    return model
