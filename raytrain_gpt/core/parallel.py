"""Sharding (FSDP2): each rank holds a shard of every weight, gradient and moment, in fp32.

1. `shard` splits the parameters of an initialized or loaded model along their first dimension.
2. A block's linear layers are gathered together for its forward and backward pass, in the type that autocast
   would cast them to; embeddings and norms are gathered in fp32. The arithmetic is that of an unsharded
   model, except for the summation order over ranks. Gathering happens around the call of a block, so that
   a complete block is compiled or recomputed.
3. Gradients are summed in fp32, and each rank updates its shards.
4. `full_tensor` gathers a sharded tensor, `gathered_weights` a model for evaluation.

torch's sharding takes more than a second to import, so it is imported on use.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from raytrain_gpt.core.model import GPT


def shard(
    model: GPT,
    device: torch.device,
    matmul_dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Split a model's parameters among the ranks of a group, by default all, in place.

    Args:
        model: Unsharded, the same on all ranks, on any device.
        matmul_dtype: Type of matrix products under autocast, or None without autocast.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    ranks = group or dist.group.WORLD
    assert ranks is not None, "torch.distributed must be initialized"
    mesh = DeviceMesh.from_group(ranks, device.type)
    linear_policy = MixedPrecisionPolicy(
        param_dtype=matmul_dtype,
        reduce_dtype=None if matmul_dtype is None else torch.float32,
        cast_forward_inputs=False,
    )
    layers = [layer for layer in model.h.modules() if isinstance(layer, nn.Linear)]
    linear = {p for layer in layers for p in layer.parameters()}
    # The outer model first: otherwise it would not get the blocks' norms.
    fully_shard(model, mesh=mesh, ignored_params=linear)
    for block in model.h:
        others = set(block.parameters()) - linear
        fully_shard(block, mesh=mesh, mp_policy=linear_policy, ignored_params=others)


def keeps_gradients(model: nn.Module) -> bool:
    """Whether gradients stay in memory between steps, because DDP's are views of its buckets.

    If dropped, they would get separate memory in the next step's first passes, in addition to the buckets.
    """
    return isinstance(model, DistributedDataParallel)


def _is_sharded(tensor: Tensor) -> bool:
    # The import takes half a second; without it no tensor is sharded.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor, a collective of all ranks; return any other unchanged."""
    gathered: Tensor = tensor.full_tensor() if _is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return gathered


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a sharded tensor, or the tensor itself."""
    shard: Tensor = tensor.to_local() if _is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return shard


def shard_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Move a tensor to a parameter's device, or to this rank's shard of it if the parameter is sharded."""
    if not _is_sharded(parameter):
        return tensor.to(parameter.device)
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(parameter, DTensor)
    # Every rank has read the same tensor; None skips the broadcast from rank 0.
    mesh, placements = parameter.device_mesh, parameter.placements
    distributed = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
    return distributed.clone()  # a view would keep the full tensor alive


def unsharded_twin(model: GPT) -> GPT:
    """Copy a sharded model for evaluations, on the meta device until `gathered_weights` fills it.

    A forward pass of a sharded model is a collective, but in an evaluation the ranks have different
    numbers of batches, and only one of them draws samples.
    """
    with torch.device("meta"):
        twin = type(model)(model.shape, document_end=model.document_end)
    twin.narrow_residual = model.narrow_residual
    return twin


@contextlib.contextmanager
def gathered_weights(model: GPT, twin: GPT) -> Iterator[None]:
    """Give the twin of a sharded model the full weights inside the context.

    All ranks enter together. Each needs fp32 memory for the unsharded model.
    """
    full: dict[nn.Parameter | None, nn.Parameter]
    full = {p: nn.Parameter(full_tensor(p.detach())) for p in model.parameters()}
    for ours, theirs in zip(twin.modules(), model.modules(), strict=True):
        # Not by name: parameters may be shared, and buffers may be missing from the state.
        ours._parameters.update({k: full.get(p) for k, p in theirs._parameters.items()})
        ours._buffers.update(theirs._buffers)
    try:
        yield
    finally:
        twin.to("meta")
