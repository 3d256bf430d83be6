"""Memory of training on a device, computed without the device.

Weights, gradients and moments follow from the number of parameters, the head's memory from the number of
tokens with logits at once. Activations are traced: the model runs on fake tensors, which have shapes but no
memory, and those alive afterwards are summed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from raytrain_gpt.config import kinds
from raytrain_gpt.config.kinds import Kind
from raytrain_gpt.config.schema import Config
from raytrain_gpt.config.sections import OptimSection
from raytrain_gpt.core.loss import chunk_tokens
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.optim import ForeignOptimizer
from raytrain_gpt.core.registry import build_optimizer, count_model, new_model, optimizer_class

_FP32_BYTES = 4
_BF16_BYTES = 2


def checkpoint_bytes(shape: GPTShape, optim: OptimSection) -> int:
    """Bytes of a checkpoint's tensors: weights and the optimizer's state."""
    return count_model(shape).num_parameters * _FP32_BYTES + optimizer_state_bytes(shape, optim)


def optimizer_state_bytes(shape: GPTShape, optim: OptimSection) -> int:
    """Bytes of an optimizer's state, without scalars.

    One of the user's takes a step on models of one and two blocks on fake tensors. If it reads numbers from
    them, which fails, it counts as two moments in fp32.

    Raises:
        CheckpointError: no checkpoint could hold the state.
    """
    counts = count_model(shape)
    if (built_in := optimizer_class(optim.optimizer)) is not None:
        return built_in.state_bytes(counts.num_parameters, counts.matrices)
    of = kinds.kind("optimizer", optim.optimizer), _architecture(shape)
    one, two = (_fake_state_bytes(replace(shape, num_layers=n), of, optim) for n in (1, 2))
    if one is None or two is None:
        return 2 * counts.num_parameters * _FP32_BYTES
    return one + (shape.num_layers - 1) * (two - one)


def _architecture(shape: GPTShape) -> Kind:
    return kinds.kind("architecture", shape.architecture)


@functools.cache
def _fake_state_bytes(shape: GPTShape, of: tuple[Kind, ...], optim: OptimSection) -> int | None:
    """Bytes after a step, or None if it fails; the kinds `of` tell different codes apart."""
    from raytrain_gpt.core.state import state_by_owner  # here: safetensors is not needed elsewhere

    with FakeTensorMode():
        model = new_model(shape)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        try:
            optimizer = build_optimizer(model, optim)
            assert isinstance(optimizer, ForeignOptimizer)
            optimizer.inner.step()
        except Exception:  # any error of the user's code on tensors without values
            return None
        states = state_by_owner(dict(model.named_parameters()), optimizer)
    return sum(one.nbytes for state in states.values() for one in state.values() if one.dim())


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on one device; weights, gradients and moments are fp32.

    Attributes:
        activations: Saved for the backward pass, without logits.
        logits: Logits that exist at once, their softmax, and the head's gradients.
        update: The optimizer's update beyond the memory that activations and logits free.
        evaluation: An evaluation's need beyond all this; 0 if lower.
    """

    weights: int
    gradients: int
    moments: int
    activations: int
    logits: int
    update: int = 0
    evaluation: int = 0

    @property
    def total(self) -> int:
        """Sum, without overhead of the allocator and CUDA."""
        step = self.weights + self.gradients + self.moments + self.activations + self.logits
        return step + max(self.update, self.evaluation)


@dataclass(frozen=True)
class MemoryModel:
    """Predicts the memory of one rank for any micro-batch, for the eager model on a GPU.

    Attributes:
        bf16: Whether the forward pass runs under 16-bit autocast.
        compiled: A compiled model has the logits of all tokens at once. Its savings in activations are
            ignored.
        num_shards: Ranks that share weights, gradients and moments; 1 without sharding.
        evaluates: Whether the ranks evaluate, which gathers an unsharded copy of the weights.
    """

    shape: GPTShape
    bf16: bool
    compiled: bool = False
    num_shards: int = 1
    evaluates: bool = False
    optim: OptimSection = field(default_factory=OptimSection)
    exact: bool = False

    @classmethod
    def of(cls, config: Config, world_size: int, shape: GPTShape, bf16: bool) -> MemoryModel:
        """Model the memory of a configuration, with a shape that may differ from its own."""
        evaluates = config.eval.eval_mode == "inline"
        train, num_shards = config.train, config.train.num_shards(world_size)
        return cls(shape, bf16, train.compile, num_shards, evaluates, config.optim, train.exact)

    def predict(self, micro_batch_sequences: int, activation_checkpointing: str) -> TrainingMemory:
        """Predict the memory of a micro-batch and mode (`none`, `selective` or `full`)."""
        counts, optimizer = count_model(self.shape), optimizer_class(self.optim.optimizer)
        weights = counts.num_parameters * _FP32_BYTES
        unsharded = TrainingMemory(
            weights=weights,
            gradients=weights * (3 if self.exact else 1),  # plus int64 sums, twice as long
            moments=optimizer_state_bytes(self.shape, self.optim),
            activations=self._activations(micro_batch_sequences, activation_checkpointing),
            logits=self._logits(micro_batch_sequences * self.shape.seq_len),
        )
        memory = unsharded if self.num_shards == 1 else self._sharded(unsharded)
        update = optimizer.update_bytes(counts.matrices, self.num_shards) if optimizer else 0
        return replace(memory, update=max(0, update - memory.activations - memory.logits))

    def _activations(self, sequences: int, mode: str) -> int:
        """All activations of one block, plus those that the mode saves in the others.

        Recomputing a block restores all of its activations; without recomputation all blocks are alike.
        Bytes are linear in layers and sequences, so one and two of each determine them.
        """

        of = _architecture(self.shape)

        def saved(num_layers: int, mode: str) -> int:
            shape = replace(self.shape, num_layers=num_layers)
            one, two = (_saved_bytes(shape, of, num, self.bf16, mode) for num in (1, 2))
            return one + (sequences - 1) * (two - one)

        return saved(1, "none") + (self.shape.num_layers - 1) * (saved(2, mode) - saved(1, mode))

    def _logits(self, tokens: int) -> int:
        vocab, channels = self.shape.padded_vocab_size, self.shape.embd_size
        narrow = _BF16_BYTES if self.bf16 else 0
        casts = (tokens + vocab) * channels * narrow  # hidden states and weight
        if self.compiled:
            return tokens * vocab * 2 * (narrow or _FP32_BYTES) + casts
        at_once = min(tokens, chunk_tokens(vocab, "cuda"))
        logits = at_once * vocab * (narrow + 2 * _FP32_BYTES)
        if tokens == at_once:
            return logits + casts
        gradients = (tokens + vocab) * channels * _FP32_BYTES
        return logits + gradients + 2 * vocab * channels * narrow

    def _sharded(self, unsharded: TrainingMemory) -> TrainingMemory:
        """Memory of one rank when training state is sharded.

        From the forward to the backward pass every rank holds the full embeddings and their gradient, one
        full block, and the next block while it is gathered.
        """
        counts = count_model(self.shape)
        embeddings = counts.embedding_parameters * _FP32_BYTES
        block = counts.block_matrix_parameters * (_BF16_BYTES if self.bf16 else _FP32_BYTES)
        step = replace(
            unsharded,
            weights=unsharded.weights // self.num_shards + embeddings + 2 * block,
            gradients=unsharded.gradients // self.num_shards + embeddings + 2 * block,
            moments=unsharded.moments // self.num_shards,
        )
        if not self.evaluates:
            return step
        shards = unsharded.weights // self.num_shards + step.moments
        evaluation = shards + unsharded.weights + unsharded.logits
        return replace(step, evaluation=max(0, evaluation - step.total))


@functools.cache
def _saved_bytes(shape: GPTShape, of: Kind, num_sequences: int, bf16: bool, mode: str) -> int:
    """Bytes allocated after a forward pass, besides the parameters."""
    allocations = _Allocations()
    with FakeTensorMode():
        model = new_model(shape, mode)
        model.train()
        with allocations, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            ids = torch.zeros(num_sequences, shape.seq_len, dtype=torch.int64)
            hidden = model.hidden(ids)
        num_bytes = allocations.alive_bytes(without=model.parameters())
        del hidden  # it kept the graph, and so the activations, alive
        return num_bytes


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records all created tensors without keeping them alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                weak: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._storages[storage._cdata] = (weak, storage.nbytes())
        return results

    def alive_bytes(self, without: Iterable[Tensor]) -> int:
        """Bytes still alive, except those of some tensors and their views."""
        excluded = {tensor.untyped_storage()._cdata for tensor in without}
        return sum(
            num_bytes
            for address, (storage, num_bytes) in self._storages.items()
            if address not in excluded and not storage.expired()
        )
