"""Sharding (FSDP2): each rank keeps its part of every weight, gradient and moment, in fp32.

1. `shard` deals the parameters of a whole model, initialised or loaded, along their first dimension.
2. The linear maps of a block are gathered together for its forward and its backward pass, in the type
   that autocast would cast them to anyway; embeddings and LayerNorms are gathered in fp32. So
   the arithmetic is that of a model that is not sharded, and only sums over ranks come in another order.
3. Gradients are summed in fp32, and each rank updates its shards.
4. `whole` is a sharded tensor in one piece again, and `gathered_weights` a model to evaluate.

torch's sharding takes more than a second to import, so that is done where it is used.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from raytrain_gpt.core.model import GPT, Block


def shard(
    model: GPT,
    device: torch.device,
    matmul_dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Deal a model's parameters to the ranks, in place; all of them have the same whole model.

    Args:
        model: Whole, on any device.
        device: Where this rank computes.
        matmul_dtype: What autocast computes matmuls in; None: there is no autocast.
        group: The ranks; None: the default group.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if group is None:
        group = dist.group.WORLD
    assert group is not None, "torch.distributed is initialised"
    mesh = DeviceMesh.from_group(group, device.type)
    maps_policy = MixedPrecisionPolicy(
        param_dtype=matmul_dtype,
        reduce_dtype=None if matmul_dtype is None else torch.float32,
        cast_forward_inputs=False,
    )
    # Maps return views of what they compute; torch warns of adding to one in place, which no block does.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    for block in model.h:
        assert isinstance(block, Block)
        fully_shard([block.attn, block.mlp], mesh=mesh, mp_policy=maps_policy)
    fully_shard(model, mesh=mesh)


def gradients_synchronized(
    model: nn.Module, synchronized: bool
) -> contextlib.AbstractContextManager[object]:
    """A forward and backward pass whose gradients are averaged over the ranks, or with DDP only kept.

    Those of a sharded model are averaged after every pass: kept ones would be whole on every rank, in
    fp32, and memory is what a model is sharded for.

    Args:
        model: Wrapped in DDP, sharded, or neither.
        synchronized: Whether they are averaged, with those that were kept.
    """
    if synchronized or not isinstance(model, DistributedDataParallel):
        return contextlib.nullcontext()
    return model.no_sync()


def is_sharded(model: nn.Module) -> bool:
    """Whether `shard` has dealt the model's parameters."""
    return hasattr(model, "set_requires_gradient_sync")


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor in one piece, which all ranks ask for together; any other as it is."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    in_one_piece: Tensor = tensor.full_tensor()
    return in_one_piece


def shard_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor on the device of a parameter of its shape; of a sharded one, this rank's shard."""
    if not hasattr(parameter, "full_tensor"):
        return tensor.to(parameter.device)
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(parameter, DTensor)
    # Every rank has read the same tensor: None keeps torch from sending rank 0's.
    mesh, placements = parameter.device_mesh, parameter.placements
    shard_of_it = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
    # Without the copy it is a view, and keeps all of the tensor.
    return shard_of_it.clone()


def model_to_evaluate(model: GPT) -> GPT:
    """The model itself, or if it is sharded another one, without memory until `gathered_weights`.

    A forward pass of a sharded model is a collective. In an evaluation the ranks have different
    numbers of batches, and only one of them draws samples.
    """
    if not is_sharded(model):
        return model
    with torch.device("meta"):
        return GPT(model.shape, document_end=model.document_end).requires_grad_(False)


@contextlib.contextmanager
def gathered_weights(model: GPT, to: GPT) -> Iterator[None]:
    """Give the model to evaluate its weights, whole, for as long as the context lasts.

    All ranks enter together. It takes the memory of the whole model in fp32 on each of them.

    Args:
        model: That is trained.
        to: Its `model_to_evaluate`.
    """
    if to is model:
        yield
        return
    weights = {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}
    to.load_state_dict(weights, assign=True)
    try:
        yield
    finally:
        to.to("meta")
