"""Training state in files of named full tensors: safetensors only, so reading runs no code.

The files do not depend on sharding; every rank reads its shards from them.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from raytrain_gpt.core.device import synchronize
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.muon import MOMENTUM_BUFFER
from raytrain_gpt.core.parallel import full_tensor, shard_like
from raytrain_gpt.errors import CheckpointError

MODEL_FILE = "model.safetensors"
_POSITIONS = "wpe.weight"
_ADAMW_KEYS = ("step", "exp_avg", "exp_avg_sq")


class HostSnapshot:
    """One of `num_parts` shares of the training state, copied to reused host memory.

    Share 0 has the complete model file; the moments are distributed to balance sizes. A copy costs one pass
    through memory and can be written while training continues.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.AdamW, part: int = 0, num_parts: int = 1
    ) -> None:
        self._optimizer = optimizer
        self._parameters = dict(model.named_parameters())
        self._files: dict[str, dict[str, Tensor]] = {}
        if part == 0:
            self._files[MODEL_FILE] = {k: _host_like(p) for k, p in self._parameters.items()}
        parts = _parts(model, optimizer, num_parts)
        if part in parts.values():
            self._files[f"optim-{part:05d}.safetensors"] = {
                f"{name}/{key}": torch.zeros(()) if key == "step" else _host_like(parameter)
                for name, parameter in self._parameters.items()
                for key in optimizer_keys(optimizer, parameter)
                if parts[name] == part
            }
        self._copies = {k: copy for file in self._files.values() for k, copy in file.items()}

    def refresh(self) -> None:
        """Copy the state; waits for the device.

        Ranks of a sharded model call it together. Tensors are gathered and copied one at a time, so at most
        one full tensor exists besides the shards.
        """
        devices = set()
        for name, source in self._sources():
            tensor = full_tensor(source)
            if name in self._copies:
                self._copies[name].copy_(tensor, non_blocking=True)
                devices.add(tensor.device)
        for device in devices:
            synchronize(device)

    def _sources(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all state tensors, in the same order on all ranks."""
        for name, parameter in self._parameters.items():
            yield name, parameter.detach()
            for key in optimizer_keys(self._optimizer, parameter):
                yield f"{name}/{key}", self._optimizer.state[parameter][key]

    def files(self) -> list[str]:
        """File names of this share."""
        return list(self._files)

    def write(self, file: str, path: Path) -> None:
        """Write one file as of the last copy."""
        # More metadata keys would make the bytes differ between processes.
        save_file(self._files[file], path, metadata={"format": "pt"})


def optimizer_keys(optimizer: torch.optim.AdamW, parameter: nn.Parameter) -> tuple[str, ...]:
    """Names of the optimizer's tensors for a parameter."""
    by_muon = MOMENTUM_BUFFER in optimizer.state[parameter]
    return (MOMENTUM_BUFFER,) if by_muon else _ADAMW_KEYS


def _parts(model: nn.Module, optimizer: torch.optim.AdamW, num_parts: int) -> dict[str, int]:
    """Parameter name -> index of the share with its moments."""
    loads = [0] * num_parts
    loads[0] = sum(parameter.numel() for parameter in model.parameters())
    parts = {}
    for name, parameter in model.named_parameters():
        parts[name] = loads.index(min(loads))
        moments = len(set(optimizer_keys(optimizer, parameter)) - {"step"})
        loads[parts[name]] += moments * parameter.numel()
    return parts


def _host_like(tensor: Tensor) -> Tensor:
    pinned = tensor.device.type == "cuda"
    return torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)


def load_model(directory: Path, model: nn.Module, crop_context: bool = False) -> None:
    """Read the weights of a checkpoint's files into a model of the same shape.

    Args:
        model: Not sharded.
        crop_context: Allow a shorter context, which takes the first positions.

    Raises:
        CheckpointError: the file is missing or damaged, or the shapes differ.
    """
    tensors = dict(_tensors(directory / MODEL_FILE))
    ours = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if crop_context and _POSITIONS in tensors:
        tensors[_POSITIONS] = tensors[_POSITIONS][: ours[_POSITIONS][0]]
    theirs = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise CheckpointError(
                f"{directory} has {name} {theirs.get(name, 'missing')}, but the model has "
                f"{ours.get(name, 'none')}; use the configuration it was trained with"
            )
    model.load_state_dict(tensors)


def check_model_size(directory: Path, shape: GPTShape) -> None:
    """Compare a checkpoint's size with its configuration, before a model takes memory.

    Raises:
        CheckpointError: the file is missing or damaged, or has a different number of parameters.
    """
    with _opened(directory / MODEL_FILE) as file:
        stored = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    if stored != shape.num_parameters:
        raise CheckpointError(
            f"{directory / MODEL_FILE} has {stored} parameters, but its configuration gives "
            f"{shape.num_parameters} (num_layers={shape.num_layers}, embd_size={shape.embd_size}, "
            f"seq_len={shape.seq_len}, vocab_size={shape.vocab_size}); use a different checkpoint"
        )


def load_optimizer(
    directory: Path,
    model: nn.Module,
    optimizer: torch.optim.AdamW,
    listed: Container[str] | None = None,
) -> None:
    """Read the optimizer's state from a checkpoint's files; sharded models read shards.

    Args:
        listed: File names in the checkpoint, or None for all existing ones.

    Raises:
        CheckpointError: the files are missing or damaged, lack tensors of the model, or have other shapes.
    """
    parameters = dict(model.named_parameters())
    states: dict[str, dict[str, Tensor]] = {name: {} for name in parameters}
    paths = sorted(directory.glob("optim-*.safetensors"))
    for path in [path for path in paths if listed is None or path.name in listed]:
        for full_name, tensor in _tensors(path):
            name, _, key = full_name.rpartition("/")
            parameter = parameters.get(name)
            if parameter is None or key not in optimizer_keys(optimizer, parameter):
                continue
            wanted = () if key == "step" else tuple(parameter.shape)
            if tuple(tensor.shape) != wanted:
                raise CheckpointError(
                    f"{directory} has optimizer state {full_name} {tuple(tensor.shape)}, but the model has "
                    f"{wanted}; use the configuration it was trained with"
                )
            states[name][key] = (
                shard_like(tensor, parameter) if wanted else tensor.to(parameter.device)
            )
    for name, parameter in parameters.items():
        for key in optimizer_keys(optimizer, parameter):
            if key not in states[name]:
                raise CheckpointError(f"{directory} has no optimizer state '{name}/{key}'")
        optimizer.state[parameter] = states[name]


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors one by one, so that a rank with shards never holds the full state."""
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118 - the file is no mapping
            yield name, file.get_tensor(name)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None
