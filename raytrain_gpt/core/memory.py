"""Memory of training on a device, computed without the device.

Weights, gradients and moments follow from the number of parameters, the head's memory from the number of
tokens with logits at once. Activations are traced: the model runs on fake tensors, which have shapes but no
memory, and those alive afterwards are summed.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from raytrain_gpt.config.schema import Config
from raytrain_gpt.config.sections import OptimSection
from raytrain_gpt.core.loss import chunk_tokens
from raytrain_gpt.core.model import GPT, GPTShape
from raytrain_gpt.core.registry import count_model, new_model, optimizer_class

_FP32_BYTES = 4
_BF16_BYTES = 2
USABLE_FRACTION = 0.92
"""Usable fraction of a device's memory; on GPUs, CUDA and fragmentation take the rest."""
_TRACED_SEQUENCES = 61
"""Sequences of a traced batch: prime, so that only sizes of activations are multiples of it."""
_MAX_TRACES = 10_000


def checkpoint_bytes(shape: GPTShape, optim: OptimSection) -> int:
    """Return the bytes of a checkpoint's tensors: weights and the optimizer's state."""
    return count_model(shape).num_parameters * _FP32_BYTES + optimizer_state_bytes(shape, optim)


def optimizer_state_bytes(shape: GPTShape, optim: OptimSection) -> int:
    """Return bytes of an optimizer's state, without scalars; a user's counts as two moments in fp32."""
    counts = count_model(shape)
    if (built_in := optimizer_class(optim)) is not None:
        return built_in.state_bytes(counts.num_parameters, counts.matrices)
    return 2 * counts.num_parameters * _FP32_BYTES


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on one device; weights, gradients and moments are fp32.

    Attributes:
        activations: Saved for the backward pass, without logits.
        logits: Logits that exist at once, their softmax, and the head's gradients.
        update: The optimizer's update beyond the memory that activations and logits free.
        evaluation: What an evaluation needs beyond all this; 0 if it needs less.
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
    """Prediction of one rank's memory for any micro-batch on a GPU.

    A compiled model has the logits of all tokens at once, in 16 bits, and recomputes some activations. If it
    cannot be traced, its activations are counted as an eager model's.

    Attributes:
        bf16: Whether the forward pass runs under 16-bit autocast.
    """

    config: Config
    shape: GPTShape
    bf16: bool
    world_size: int = 1

    @property
    def num_shards(self) -> int:
        """Ranks that share weights, gradients and moments; 1 without sharding."""
        return self.world_size if self.config.train.parallel == "fsdp" else 1

    def predict(self, micro_batch_sequences: int, activation_checkpointing: str) -> TrainingMemory:
        """Predict the memory of a micro-batch and mode (`none`, `selective` or `full`)."""
        counts, optim = count_model(self.shape), self.config.optim
        optimizer = optimizer_class(optim)
        weights = counts.num_parameters * _FP32_BYTES
        sums = 2 * weights if self.config.train.exact else 0  # int64
        unsharded = TrainingMemory(
            weights=weights,
            gradients=weights + sums,
            moments=optimizer_state_bytes(self.shape, optim),
            activations=self._activations(micro_batch_sequences, activation_checkpointing),
            logits=self._logits(micro_batch_sequences * self.shape.seq_len),
        )
        memory = unsharded if self.num_shards == 1 else self._sharded(unsharded)
        update = optimizer.update_bytes(counts.matrices, self.num_shards) if optimizer else 0
        return replace(memory, update=max(0, update - memory.activations - memory.logits))

    def _activations(self, sequences: int, mode: str) -> int:
        """Return activations of one block, plus those that the mode keeps in the others, all alike.

        In an eager model, recomputing a block restores all of its activations.
        """
        train = self.config.train
        narrow_residual = train.residual_dtype == "bf16" and train.precision != "fp16"

        def kept(num_layers: int, mode: str, compiled: bool) -> int:
            shape = replace(self.shape, num_layers=num_layers)
            fixed, per_sequence = _kept_bytes(shape, mode, self.bf16, narrow_residual, compiled)
            return fixed + sequences * per_sequence

        others = self.shape.num_layers - 1
        if train.compile and (one := kept(1, mode, True)):
            # Logits are among them; their gradient takes their place.
            logits = self._logits(sequences * self.shape.seq_len)
            return one + others * (kept(2, mode, True) - one) - logits
        return kept(1, "none", False) + others * (kept(2, mode, False) - kept(1, mode, False))

    def _logits(self, tokens: int) -> int:
        vocab, channels = self.shape.padded_vocab_size, self.shape.embd_size
        narrow = _BF16_BYTES if self.bf16 else 0
        casts = (tokens + vocab) * channels * narrow  # hidden states and weight
        if self.config.train.compile:
            return tokens * vocab * (narrow or _FP32_BYTES) + casts
        at_once = min(tokens, chunk_tokens(vocab, "cuda"))
        logits = at_once * vocab * (narrow + 2 * _FP32_BYTES)
        if tokens == at_once:
            return logits + casts
        gradients = (tokens + vocab) * channels * _FP32_BYTES
        return logits + gradients + 2 * vocab * channels * narrow

    def _sharded(self, unsharded: TrainingMemory) -> TrainingMemory:
        """Return the memory of one rank when training state is sharded.

        From the forward to the backward pass every rank holds the full embeddings and their gradient, one
        full block, and the next block while it is gathered.
        """
        counts = count_model(self.shape)
        embeddings = counts.embedding_parameters * _FP32_BYTES
        block = counts.block_elements * (_BF16_BYTES if self.bf16 else _FP32_BYTES)
        step = replace(
            unsharded,
            weights=unsharded.weights // self.num_shards + embeddings + 2 * block,
            gradients=unsharded.gradients // self.num_shards + embeddings + 2 * block,
            moments=unsharded.moments // self.num_shards,
        )
        # An evaluation gathers an unsharded copy of the weights.
        shards = unsharded.weights // self.num_shards + step.moments
        evaluation = shards + unsharded.weights + unsharded.logits
        return replace(step, evaluation=max(0, evaluation - step.total))


@functools.cache
def _kept_bytes(
    shape: GPTShape, mode: str, bf16: bool, narrow_residual: bool, compiled: bool
) -> tuple[int, int]:
    """Count what a forward pass keeps for its backward pass; includes logits only if compiled.

    Returns:
        Bytes for any batch, which are copies of weights in 16 bits, and bytes for each sequence; zeros if a
        compiled model cannot be traced.
    """
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=bf16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = new_model(shape, mode)
        model.narrow_residual = narrow_residual
        model.train()
        ids = torch.zeros(_TRACED_SEQUENCES, shape.seq_len, dtype=torch.int64)
        kept = (_kept_by_compiler if compiled else _kept_by_autograd)(model, ids, autocast)
    scaling = sum(num_bytes for num_bytes in kept if num_bytes % _TRACED_SEQUENCES == 0)
    return sum(kept) - scaling, scaling // _TRACED_SEQUENCES


def _kept_by_autograd(model: GPT, ids: Tensor, autocast: torch.autocast) -> list[int]:
    """Return the sizes of tensors alive after a forward pass, except the parameters."""
    allocations = _Allocations()
    with allocations, autocast:
        hidden = model.hidden(ids)
    sizes = allocations.alive_bytes(without=model.parameters())
    del hidden  # which kept the graph, and so the activations, alive
    return sizes


def _kept_by_compiler(model: GPT, ids: Tensor, autocast: torch.autocast) -> list[int]:
    """Return the sizes of tensors that a compiled forward pass keeps; none if it cannot be traced.

    No code is generated. Inductor's partitioner chooses the tensors to keep; all others are recomputed.
    """
    from torch._dynamo import config
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    kept: list[int] = []

    def forward(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        kept.extend(_output_bytes(graph))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table(),
    )
    # It warns of in-place operators, which our blocks do not have.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)

    def loss(ids: Tensor) -> Any:
        return model(ids, ids)

    with (
        config.patch(recompile_limit=_MAX_TRACES, accumulated_recompile_limit=_MAX_TRACES),
        autocast,
    ):
        try:
            torch.compile(loss, backend=backend, fullgraph=True, dynamic=False)(ids)
        except Exception:  # any error of the user's code, or of the compiler
            return []
    return kept


def _output_bytes(graph: fx.GraphModule) -> list[int]:
    """Return the bytes of tensors that a forward graph returns, except its inputs."""
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    made = [node for node in dict.fromkeys(output.args[0]) if isinstance(node, fx.Node)]
    tensors = [node.meta["val"] for node in made if node.op != "placeholder"]
    return [
        math.prod(tensor.shape) * tensor.itemsize
        for tensor in tensors
        if isinstance(tensor, Tensor)
        and all(isinstance(size, int) for size in tensor.shape)  # others are states of generators
    ]


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record of all created tensors, which does not keep them alive."""

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

    def alive_bytes(self, without: Iterable[Tensor]) -> list[int]:
        """Return the sizes of tensors still alive, except `without` and their views."""
        excluded = {tensor.untyped_storage()._cdata for tensor in without}
        return [
            num_bytes
            for address, (storage, num_bytes) in self._storages.items()
            if address not in excluded and not storage.expired()
        ]
