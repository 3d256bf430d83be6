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
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from raytrain_gpt.config import kinds
from raytrain_gpt.config.kinds import Kind
from raytrain_gpt.config.schema import Config
from raytrain_gpt.config.sections import OptimSection
from raytrain_gpt.core.loss import chunk_tokens
from raytrain_gpt.core.model import GPT, GPTShape
from raytrain_gpt.core.registry import count_model, new_model, optimizer_class

_FP32_BYTES = 4
_BF16_BYTES = 2
_TRACED_SEQUENCES = 61
"""Sequences of a traced batch: prime, so that only sizes of activations are multiples of it."""
_MAX_TRACES = 10_000


def checkpoint_bytes(shape: GPTShape, optim: OptimSection) -> int:
    """Bytes of a checkpoint's tensors: weights and the optimizer's state."""
    return count_model(shape).num_parameters * _FP32_BYTES + optimizer_state_bytes(shape, optim)


def optimizer_state_bytes(shape: GPTShape, optim: OptimSection) -> int:
    """Bytes of an optimizer's state, without scalars; one of the user's counts as two moments in fp32."""
    counts = count_model(shape)
    if (built_in := optimizer_class(optim.optimizer)) is not None:
        return built_in.state_bytes(counts.num_parameters, counts.matrices)
    return 2 * counts.num_parameters * _FP32_BYTES


def _architecture(shape: GPTShape) -> Kind:
    return kinds.kind("architecture", shape.architecture)


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
    """Predicts the memory of one rank for any micro-batch on a GPU.

    Attributes:
        bf16: Whether the forward pass runs under 16-bit autocast.
        compiled: A compiled model has the logits of all tokens at once, in 16 bits, and recomputes some
            activations. If it cannot be traced, its activations count as those of the eager model.
        num_shards: Ranks that share weights, gradients and moments; 1 without sharding.
        narrow_residual: Whether the sums between blocks are in 16 bits.
    """

    shape: GPTShape
    bf16: bool
    compiled: bool = False
    num_shards: int = 1
    optim: OptimSection = field(default_factory=OptimSection)
    exact: bool = False
    narrow_residual: bool = False

    @classmethod
    def of(cls, config: Config, world_size: int, shape: GPTShape, bf16: bool) -> MemoryModel:
        """Model the memory of a configuration, with a shape that may differ from its own."""
        train, num_shards = config.train, config.train.num_shards(world_size)
        return cls(
            shape,
            bf16,
            train.compile,
            num_shards,
            config.optim,
            train.exact,
            narrow_residual=train.residual_dtype == "bf16" and train.precision != "fp16",
        )

    def predict(self, micro_batch_sequences: int, activation_checkpointing: str) -> TrainingMemory:
        """Predict the memory of a micro-batch and mode (`none`, `selective` or `full`)."""
        counts, optimizer = count_model(self.shape), optimizer_class(self.optim.optimizer)
        weights = counts.num_parameters * _FP32_BYTES
        batch = micro_batch_sequences, activation_checkpointing
        unsharded = TrainingMemory(
            weights=weights,
            gradients=weights * (3 if self.exact else 1),  # plus int64 sums, twice as long
            moments=optimizer_state_bytes(self.shape, self.optim),
            activations=self._compiled_activations(*batch)
            if self.compiled
            else self._activations(*batch),
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

        def saved(num_layers: int, mode: str) -> int:
            one, two = (_saved_bytes(self._pass(num_layers, mode), num) for num in (1, 2))
            return one + (sequences - 1) * (two - one)

        return saved(1, "none") + (self.shape.num_layers - 1) * (saved(2, mode) - saved(1, mode))

    def _compiled_activations(self, sequences: int, mode: str) -> int:
        """What a compiled model keeps for its backward pass besides the logits; all blocks but one are alike.

        The gradient of the logits takes their place.
        """
        one, two = (_kept_compiled_bytes(self._pass(num_layers, mode)) for num_layers in (1, 2))
        if one is None or two is None:
            return self._activations(sequences, mode)
        first, both = (kept.fixed + sequences * kept.per_sequence for kept in (one, two))
        logits = self._logits(sequences * self.shape.seq_len)
        return first + (self.shape.num_layers - 1) * (both - first) - logits

    def _pass(self, num_layers: int, mode: str) -> _ForwardPass:
        shape = replace(self.shape, num_layers=num_layers)
        return _ForwardPass(shape, _architecture(shape), mode, self.bf16, self.narrow_residual)

    def _logits(self, tokens: int) -> int:
        vocab, channels = self.shape.padded_vocab_size, self.shape.embd_size
        narrow = _BF16_BYTES if self.bf16 else 0
        casts = (tokens + vocab) * channels * narrow  # hidden states and weight
        if self.compiled:
            return tokens * vocab * (narrow or _FP32_BYTES) + casts
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
        # An evaluation gathers an unsharded copy of the weights.
        shards = unsharded.weights // self.num_shards + step.moments
        evaluation = shards + unsharded.weights + unsharded.logits
        return replace(step, evaluation=max(0, evaluation - step.total))


@dataclass(frozen=True)
class _ForwardPass:
    """All inputs of a traced forward pass; kinds with one name and different code are not equal."""

    shape: GPTShape
    architecture: Kind
    mode: str
    bf16: bool
    narrow_residual: bool

    def model(self) -> GPT:
        model = new_model(self.shape, self.mode)
        model.narrow_residual = self.narrow_residual
        model.train()
        return model

    def autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.bf16)


@functools.cache
def _saved_bytes(of: _ForwardPass, num_sequences: int) -> int:
    """Bytes allocated after a forward pass, besides the parameters."""
    allocations = _Allocations()
    with FakeTensorMode():
        model = of.model()
        with allocations, of.autocast():
            ids = torch.zeros(num_sequences, of.shape.seq_len, dtype=torch.int64)
            hidden = model.hidden(ids)
        num_bytes = allocations.alive_bytes(without=model.parameters())
        del hidden  # it kept the graph, and so the activations, alive
        return num_bytes


@dataclass(frozen=True)
class _KeptBytes:
    """Bytes kept for the backward pass, logits included; `fixed` are copies of weights in 16 bits."""

    fixed: int
    per_sequence: int


@functools.cache
def _kept_compiled_bytes(of: _ForwardPass) -> _KeptBytes | None:
    """Count what a compiled model keeps for its backward pass, or None if it cannot be traced.

    It is traced on fake tensors, without generating code. Inductor's partitioner chooses the tensors to keep;
    all others are recomputed.
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

    def backward(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table(),
    )
    # It warns of in-place operators, which our blocks do not have.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        config.patch(recompile_limit=_MAX_TRACES, accumulated_recompile_limit=_MAX_TRACES),
        of.autocast(),
    ):
        model = of.model()
        ids = torch.zeros(_TRACED_SEQUENCES, of.shape.seq_len, dtype=torch.int64)

        def loss(ids: Tensor) -> Any:
            return model(ids, ids)

        try:
            torch.compile(loss, backend=backend, fullgraph=True, dynamic=False)(ids)
        except Exception:  # any error of the user's code, or of the compiler
            return None
    scaling = sum(num_bytes for num_bytes in kept if num_bytes % _TRACED_SEQUENCES == 0)
    return _KeptBytes(fixed=sum(kept) - scaling, per_sequence=scaling // _TRACED_SEQUENCES)


def _output_bytes(graph: fx.GraphModule) -> list[int]:
    """Bytes of the tensors that a forward graph returns besides its inputs."""
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
