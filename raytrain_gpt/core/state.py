"""Training state in files of named full tensors: safetensors only, so reading never runs code.

The files do not depend on sharding; every rank reads its shards from them. An optimizer's state keeps its
types: `NAME/KEY` is a tensor, `NAME/KEY:cpu` one on the host for a parameter on a GPU, `NAME/KEY:int`
(`:float`, `:bool`) a number, `NAME/KEY:none` is None, and `NAME/KEY:list` is the length of a list of
`NAME/KEY/0` and so on. NAME is a parameter or `param_groups.0`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from raytrain_gpt.core.device import synchronize
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.optim import Optimizer, numbers_of_groups
from raytrain_gpt.core.parallel import full_tensor, local_tensor, shard_like
from raytrain_gpt.core.registry import count_model
from raytrain_gpt.errors import CheckpointError

MODEL_FILE = "model.safetensors"
_POSITIONS = "wpe.weight"
_GROUP = "param_groups.{}"
_ON_HOST = ":cpu"


class HostSnapshot:
    """One of `num_parts` shares of the training state, copied to reused host memory.

    Share 0 has the complete model file; the optimizer's state is distributed to balance sizes. A copy costs
    one pass through memory and can be written while training continues.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, part: int = 0, num_parts: int = 1
    ) -> None:
        self._optimizer, self._part, self._num_parts = optimizer, part, num_parts
        self._parameters = dict(model.named_parameters())
        self._files: dict[str, dict[str, Tensor]] = {}
        if part == 0:
            self._files[MODEL_FILE] = {k: _host_like(p) for k, p in self._parameters.items()}
        self._optim_file = f"optim-{part:05d}.safetensors"
        self._layout: dict[str, Any] = {}
        self._lay_out(state_by_owner(self._parameters, optimizer))

    def _lay_out(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Allocate this share of the optimizer's state, which may not exist before the first step."""
        layout = {k: (t.shape, t.dtype) for state in states.values() for k, t in state.items()}
        if layout == self._layout:
            return
        self._layout = layout
        loads = [0] * self._num_parts
        loads[0] = sum(p.numel() for p in self._parameters.values())
        share: dict[str, Tensor] = {}
        for state in states.values():
            part = loads.index(min(loads))
            loads[part] += sum(t.numel() for t in state.values() if t.dim())
            if part == self._part:
                share |= {name: _host_like(t) for name, t in state.items()}
        self._files.pop(self._optim_file, None)
        if share:
            self._files[self._optim_file] = share

    def refresh(self) -> None:
        """Copy the state; waits for the device.

        Ranks of a sharded model call it together. Tensors are gathered and copied one at a time, so at most
        one full tensor exists besides the shards.

        Raises:
            CheckpointError: the optimizer's state has a value that is not a tensor or number.
        """
        states = state_by_owner(self._parameters, self._optimizer)
        self._lay_out(states)
        copies = {k: copy for file in self._files.values() for k, copy in file.items()}
        devices = set()
        tensors = chain(self._parameters.items(), *(state.items() for state in states.values()))
        for name, source in tensors:
            tensor = full_tensor(source.detach())
            if name in copies:
                copies[name].copy_(tensor, non_blocking=True)
                devices.add(tensor.device)
        for device in devices:
            synchronize(device)

    def files(self) -> list[str]:
        """Return the file names of this share."""
        return list(self._files)

    def write(self, file: str, path: Path) -> None:
        """Write one file as of the last copy."""
        # More metadata keys would make the bytes differ between processes.
        save_file(self._files[file], path, metadata={"format": "pt"})


def has_finite_parameters(model: nn.Module) -> bool:
    """Whether this rank's parameters, or its shards of them, are finite; waits for the device."""
    # A sum shows any NaN or infinity of its terms, and takes a tenth of the time of `isfinite` on a CPU.
    sums = [local_tensor(p.detach()).sum(dtype=torch.float32) for p in model.parameters()]
    return bool(torch.isfinite(torch.stack(sums)).all())


def _host_like(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")


def state_by_owner(
    parameters: Mapping[str, nn.Parameter], optimizer: Optimizer
) -> dict[str, dict[str, Tensor]]:
    """Return parameter or group -> name in the files -> tensor, in the same order on all ranks.

    Raises:
        CheckpointError: a file cannot hold a value of the state.
    """
    if not optimizer.state.keys() <= {*parameters.values()}:
        raise CheckpointError(
            "the optimizer has state that belongs to no parameter, which a checkpoint cannot hold; keep it "
            "by parameter, or as numbers in param_groups"
        )
    states: dict[str, dict[Any, object]]
    states = {name: optimizer.state.get(p, {}) for name, p in parameters.items()}
    groups = zip(numbers_of_groups(optimizer.param_groups), optimizer.group_numbers, strict=True)
    for i, (now, built) in enumerate(groups):
        states[_GROUP.format(i)] = {k: v for k, v in now.items() if v != built.get(k)}
    flat: dict[str, dict[str, Tensor]] = {}
    for owner, state in states.items():
        if bad := [key for key in state if not (isinstance(key, str) and key.isidentifier())]:
            raise CheckpointError(
                f"the optimizer's state of {owner} has the key {bad[0]!r}; name it like a variable"
            )
        # Sorted, since ranks gather together, and the order of keys may differ between them.
        is_on_host = owner not in parameters or parameters[owner].is_cpu
        values = (_as_tensors(f"{owner}/{key}", state[key], is_on_host) for key in sorted(state))
        flat[owner] = dict(chain.from_iterable(values))
    return flat


def _as_tensors(name: str, value: object, is_on_host: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of a value whose parameter is on the host or not."""
    match value:
        case Tensor():
            yield name + _ON_HOST * (value.is_cpu and not is_on_host), value
        case bool():
            yield f"{name}:bool", torch.tensor(value)
        case int():
            yield f"{name}:int", torch.tensor(value, dtype=torch.int64)
        case float():
            yield f"{name}:float", torch.tensor(value, dtype=torch.float64)
        case None:
            yield f"{name}:none", torch.tensor(False)
        case list():
            yield f"{name}:list", torch.tensor(len(value))
            for i, item in enumerate(value):
                yield from _as_tensors(f"{name}/{i}", item, is_on_host)
        case _:
            raise CheckpointError(
                f"the optimizer's state {name} is a {type(value).__name__}, which a checkpoint cannot hold; "
                "use tensors, numbers, None, and lists of them"
            )


def _from_tensors(tensors: Mapping[str, Tensor], name: str) -> Any:
    """Read a value back; raises KeyError, ValueError, ArithmeticError or RuntimeError if damaged."""
    for kind, convert in (("bool", bool), ("int", int), ("float", float)):
        if (number := tensors.get(f"{name}:{kind}")) is not None:
            return convert(number.item())
    if f"{name}:none" in tensors:
        return None
    if (tensor := tensors.get(name + _ON_HOST)) is not None:
        return tensor
    if (length := tensors.get(f"{name}:list")) is not None:
        return [_from_tensors(tensors, f"{name}/{i}") for i in range(int(length.item()))]
    return tensors[name]


def load_model(directory: Path, model: nn.Module, crop_context: bool = False) -> None:
    """Read the weights of a checkpoint's files into a model of the same shape.

    Args:
        model: Not sharded.
        crop_context: Allow a shorter context, which uses the first positions.

    Raises:
        CheckpointError: the file is missing or damaged, or the shapes differ.
    """
    tensors, parameters = dict(_tensors(directory / MODEL_FILE)), dict(model.named_parameters())
    ours = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    if crop_context and _POSITIONS in tensors:
        tensors[_POSITIONS] = tensors[_POSITIONS][: ours[_POSITIONS][0]]
    theirs = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise CheckpointError(
                f"{directory} has {name} {theirs.get(name, 'missing')}, but the model has "
                f"{ours.get(name, 'none')}; use the configuration it was trained with"
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def check_model_size(directory: Path, shape: GPTShape) -> None:
    """Compare a checkpoint's size with its configuration, before a model takes memory.

    Raises:
        CheckpointError: the file is missing or damaged, or its number of parameters differs.
    """
    with _opened(directory / MODEL_FILE) as file:
        stored = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    try:
        expected = count_model(shape).num_parameters
    except RuntimeError:
        expected = None  # beyond 64 bits
    if stored != expected:
        raise CheckpointError(
            f"{directory / MODEL_FILE} has {stored} parameters, but its configuration gives "
            f"{expected or 'too many'} (num_layers={shape.num_layers}, embd_size={shape.embd_size}, "
            f"seq_len={shape.seq_len}, vocab_size={shape.vocab_size}); use another checkpoint"
        )


def load_optimizer(
    directory: Path,
    model: nn.Module,
    optimizer: Optimizer,
    listed: Container[str] | None = None,
) -> None:
    """Read the optimizer's state from a checkpoint's files; sharded models read shards.

    Args:
        optimizer: Just built; tensors in its state must be in the files, with the same shapes.
        listed: File names in the checkpoint, or None for all existing ones.

    Raises:
        CheckpointError: the files are missing or damaged, lack tensors of the model, or have other shapes.
    """
    parameters = dict(model.named_parameters())
    built = {
        f"{name}/{key}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }
    optimizer.state.clear()  # makes room for the tensors that are read
    states: dict[str, dict[str, Tensor]] = defaultdict(dict)
    paths = sorted(directory.glob("optim-*.safetensors"))
    for path in [path for path in paths if listed is None or path.name in listed]:
        for full_name, tensor in _tensors(path):
            name, _, key = full_name.partition("/")
            wanted = tuple(built.get(full_name.removesuffix(_ON_HOST), tensor).shape)
            if tuple(tensor.shape) != wanted:
                raise CheckpointError(
                    f"{directory} has optimizer state {full_name} {tuple(tensor.shape)}, but the model has "
                    f"{wanted}; use the configuration it was trained with"
                )
            if (parameter := parameters.get(name)) is not None and ":" not in key:
                is_alike = tensor.shape == parameter.shape
                tensor = shard_like(tensor, parameter) if is_alike else tensor.to(parameter.device)
            states[name][key] = tensor
    for full_name in built:
        name, _, key = full_name.partition("/")
        if key not in states[name] and key + _ON_HOST not in states[name]:
            raise CheckpointError(f"{directory} has no optimizer state '{full_name}'")
    try:
        values = {
            name: {key: _from_tensors(tensors, key) for key in _keys(tensors)}
            for name, tensors in states.items()
        }
    except (KeyError, ValueError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(f"{directory} has a damaged optimizer state: {error}") from None
    for name, parameter in parameters.items():
        if values.get(name):
            optimizer.state[parameter] = values[name]
    for i, (group, numbers) in enumerate(
        zip(optimizer.param_groups, optimizer.group_numbers, strict=True)
    ):
        read = values.get(_GROUP.format(i), {})
        # The rest, such as the parameters, never comes from a checkpoint of this optimizer.
        group.update({k: v for k, v in read.items() if k in numbers or k not in group})


def _keys(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the keys of a state, without the items of its lists."""
    return [name.partition(":")[0] for name in tensors if "/" not in name]


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
