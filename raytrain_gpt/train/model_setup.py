"""A model ready for training: loaded, compiled, on its device, replicated or sharded over the ranks."""

from __future__ import annotations

import inspect
import logging
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import ray.train.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from raytrain_gpt.checkpoint.catalog import IMPORT_FILE, Checkpoint, read_checkpoint
from raytrain_gpt.checkpoint.collectives import Collectives
from raytrain_gpt.config.kinds import BUILT_IN
from raytrain_gpt.config.plan import Plan
from raytrain_gpt.config.sections import TrainSection
from raytrain_gpt.core.accumulation import Accumulation, ExactAccumulator, FloatAccumulator
from raytrain_gpt.core.device import make_autocast, matmul_dtype, resolve_precision
from raytrain_gpt.core.loop import Autocast
from raytrain_gpt.core.model import GPT
from raytrain_gpt.core.optim import LossScale, Optimizer, loss_scale_for
from raytrain_gpt.core.parallel import gathered_weights, shard, unsharded_twin
from raytrain_gpt.core.registry import build_optimizer, configured_model, init_weights
from raytrain_gpt.core.state import load_model, load_optimizer
from raytrain_gpt.data.locations import location
from raytrain_gpt.data.mixture import Mixture
from raytrain_gpt.data.tokenizer import Tokenizer
from raytrain_gpt.data.tokenizer_file import read_tokenizer


@dataclass(frozen=True)
class Strategy:
    """How the ranks hold one model: by default, a complete one on each, in DDP.

    Attributes:
        matmul_dtype: Type of matrix products under autocast, or None without autocast.
        narrow_gradients: Whether DDP sends gradients in bf16.
        group: The ranks, or None for a single one.
    """

    device: torch.device
    matmul_dtype: torch.dtype | None
    narrow_gradients: bool = False
    group: dist.ProcessGroup | None = None

    @property
    def optimizer_group(self) -> dist.ProcessGroup | None:
        """Ranks that share the work of an update, or None if each does all of it."""
        return self.group

    def prepare(self, model: GPT) -> nn.Module:
        """Prepare a model, the same on all ranks, for the training loop; all ranks call it."""
        if self.group is None:
            return model.to(self.device)
        known = inspect.signature(DistributedDataParallel).parameters
        sync = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        options = {
            "gradient_as_bucket_view": True,
            sync: False,  # buffers are the same on all ranks, as training changes none
            "process_group": self.group,
        }
        replica: nn.Module = ray.train.torch.prepare_model(
            model, move_to_device=self.device, parallel_strategy_kwargs=options
        )
        if self.narrow_gradients and isinstance(replica, DistributedDataParallel):
            # torch refuses the hook itself with gloo, which can add bf16 too.
            group = replica.process_group
            replica.register_comm_hook(None, lambda _, bucket: bf16_compress_hook(group, bucket))
        return replica

    def accumulation(self, model: nn.Module, micro_batches_per_step: int) -> Accumulation:
        """Make the sum of a prepared model's gradients."""
        rank = 0 if self.group is None else self.group.rank()
        return FloatAccumulator(model, micro_batches_per_step, rank)

    def eval_model(self, model: GPT) -> GPT:
        """Return the model for evaluations, without collectives; call it before `prepare`."""
        return model

    def full_weights(self, model: GPT, eval_model: GPT) -> AbstractContextManager[None]:
        """Return a context in which `eval_model` has the weights of `model`; all ranks enter it together."""
        return nullcontext()


class Exact(Strategy):
    """The complete model on every rank, with exact sums."""

    optimizer_group = None  # splitting the work may change bits

    def prepare(self, model: GPT) -> nn.Module:
        if self.device.type == "cuda":
            torch.use_deterministic_algorithms(True)
            # All of our tensors are written before they are read.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        return model.to(self.device)

    def accumulation(self, model: nn.Module, micro_batches_per_step: int) -> Accumulation:
        trained = [p for p in model.parameters() if p.requires_grad]
        return ExactAccumulator(trained, micro_batches_per_step, self.group)


class Sharded(Strategy):
    """A shard of every parameter on every rank."""

    def prepare(self, model: GPT) -> nn.Module:
        shard(model, self.device, self.matmul_dtype, self.group)
        return model

    def eval_model(self, model: GPT) -> GPT:
        return unsharded_twin(model)

    def full_weights(self, model: GPT, eval_model: GPT) -> AbstractContextManager[None]:
        return gathered_weights(model, eval_model)


def make_strategy(
    train: TrainSection, device: torch.device, group: dist.ProcessGroup | None
) -> Strategy:
    """Make the strategy of `exact` and `parallel` for the ranks in a group; a single one is not sharded."""
    kind = Exact if train.exact else Sharded if train.parallel == "fsdp" and group else Strategy
    dtype = matmul_dtype(resolve_precision(train.precision, device))
    return kind(device, dtype, train.gradient_dtype == "bf16", group)


@dataclass(frozen=True)
class TrainingSetup:
    """A rank's model, optimizer and numerics.

    Attributes:
        raw_model: The GPT; if sharded, its parameters are this rank's shards.
        model: Model for the training loop: `raw_model`, in DDP if it is replicated.
        eval_model: Model for evaluations, without collectives.
        loss_scale: For fp16, or None without scaling.
        imported: The content of `import.json` for all checkpoints, or None.
    """

    strategy: Strategy
    tokenizer: Tokenizer
    raw_model: GPT
    model: nn.Module
    eval_model: GPT
    optimizer: Optimizer
    device: torch.device
    precision: str
    autocast: Autocast
    loss_scale: LossScale | None
    imported: str | None


def set_up_training(
    plan: Plan,
    data: Mixture,
    resumed: Checkpoint | None,
    device: torch.device,
    ranks: Collectives,
) -> TrainingSetup:
    """Set up a new run or one that resumes, on all ranks; a damaged checkpoint raises CheckpointError."""
    config, precision = plan.config, resolve_precision(plan.config.train.precision, device)
    group = dist.group.WORLD if ranks.world_size > 1 else None
    strategy = make_strategy(config.train, device, group)
    tokenizer = read_tokenizer(data.datasets[0].directory)
    model = configured_model(
        config,
        tokenizer.n_vocab,
        tokenizer.eot_token,
        plan.activation_checkpointing,
    )
    source = resumed
    if source is None and config.model.init_from:
        source = read_checkpoint(location(config, config.model.init_from))
    imported = None
    with nullcontext() if source is None else files_on_machine(source, ranks) as directory:
        # Weights load before sharding, moments after it: the optimizer is built on shards.
        if directory is None:
            init_weights(model, config.train.seed)
        else:
            load_model(directory, model, crop_context=resumed is None)
        if directory is not None and source is not None and IMPORT_FILE in source.file_names:
            imported = (directory / IMPORT_FILE).read_text("utf-8")
        eval_model = strategy.eval_model(model)
        if config.train.compile:
            if BUILT_IN.find("architecture", config.model.architecture):
                # It warns of in-place operators, which our blocks do not have.
                logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
            for each in {model, eval_model}:
                each.compile()
        prepared = strategy.prepare(model)
        optimizer = build_optimizer(
            model, config.optim, strategy.matmul_dtype, strategy.optimizer_group
        )
        if directory is not None and resumed is not None:
            load_optimizer(directory, model, optimizer, resumed.file_names)
    return TrainingSetup(
        strategy=strategy,
        tokenizer=tokenizer,
        raw_model=model,
        model=prepared,
        eval_model=eval_model,
        optimizer=optimizer,
        device=device,
        precision=precision,
        autocast=make_autocast(precision, device),
        loss_scale=loss_scale_for(precision, device, resumed.state.loss_scale if resumed else None),
        imported=imported,
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
