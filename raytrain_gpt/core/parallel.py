"""Sharding (FSDP2): each rank keeps its part of every weight, gradient and moment, in fp32.

1. `shard` splits the parameters of a model, initialised or loaded, along their first dimension.
2. The linear layers of a block are gathered together for its forward and its backward pass, in the type
   that autocast would cast them to anyway; embeddings and norms are gathered in fp32. So the arithmetic is
   that of an unsharded model, and only sums over ranks are taken in another order. They are gathered
   before a block is called and given up behind it, so that what is compiled or recomputed is a whole block.
3. Gradients are summed in fp32, and each rank updates its shards.
4. `full_tensor` puts a sharded tensor together again, `gathered_weights` a model to evaluate.

torch's sharding takes more than a second to import, so it is imported where it is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from raytrain_gpt.core.architectures import new_model
from raytrain_gpt.core.model import GPT


def shard(
    model: GPT,
    device: torch.device,
    matmul_dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Split a model's parameters among the ranks, in place.

    Args:
        model: The whole model, the same on all ranks, on any device.
        matmul_dtype: Type of matrix products under autocast; None: there is no autocast.
        group: The ranks; None: the default group.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if group is None:
        group = dist.group.WORLD
    assert group is not None, "torch.distributed is initialised"
    mesh = DeviceMesh.from_group(group, device.type)
    linear_policy = MixedPrecisionPolicy(
        param_dtype=matmul_dtype,
        reduce_dtype=None if matmul_dtype is None else torch.float32,
        cast_forward_inputs=False,
    )
    linear = {p for block in model.h for part in (block.attn, block.mlp) for p in part.parameters()}  # type: ignore[union-attr]
    # The whole model first: after its blocks it would not get their norms.
    fully_shard(model, mesh=mesh, ignored_params=linear)
    for block in model.h:
        others = set(block.parameters()) - linear
        fully_shard(block, mesh=mesh, mp_policy=linear_policy, ignored_params=others)


def gradient_sync(
    model: nn.Module, synchronized: bool
) -> contextlib.AbstractContextManager[object]:
    """A context for a forward and backward pass; without `synchronized` DDP only accumulates its gradients.

    A sharded model averages gradients over the ranks after every pass: accumulated ones would be whole on
    every rank, in fp32, and saving memory is what a model is sharded for.
    """
    if synchronized or not isinstance(model, DistributedDataParallel):
        return contextlib.nullcontext()
    return model.no_sync()


def keeps_gradients(model: nn.Module) -> bool:
    """Whether gradients stay in memory between steps: with DDP they are parts of the buckets it sends.

    Dropped, they would get memory of their own in the next step's first passes, and have the buckets besides.
    """
    return isinstance(model, DistributedDataParallel)


def full_tensor(tensor: Tensor) -> Tensor:
    """A sharded tensor in one piece, a collective of all ranks; any other tensor as it is."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    gathered: Tensor = tensor.full_tensor()
    return gathered


def shard_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A tensor on the device of a parameter of its shape; if that is sharded, this rank's shard of it."""
    if not hasattr(parameter, "full_tensor"):
        return tensor.to(parameter.device)
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(parameter, DTensor)
    # Every rank has read the same tensor: with None torch does not broadcast rank 0's.
    mesh, placements = parameter.device_mesh, parameter.placements
    own = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
    return own.clone()  # a view would keep all of the tensor alive


def make_eval_model(model: GPT) -> GPT:
    """The model itself; if it is sharded, another one without memory until `gathered_weights`.

    A forward pass of a sharded model is a collective, but in an evaluation the ranks have different
    numbers of batches, and only one of them draws samples.
    """
    if not hasattr(model, "set_requires_gradient_sync"):  # `shard` adds it
        return model
    with torch.device("meta"):
        return new_model(model.shape, document_end=model.document_end)


@contextlib.contextmanager
def gathered_weights(model: GPT, to: GPT) -> Iterator[None]:
    """Give the model to evaluate its full weights while the context lasts.

    All ranks enter together. Each needs memory for the whole model in fp32. `to` is the
    `make_eval_model` of the one that is trained.
    """
    if to is model:
        yield
        return
    weights = {name: full_tensor(p.detach()) for name, p in model.named_parameters()}
    to.load_state_dict(weights, assign=True)
    try:
        yield
    finally:
        to.to("meta")
