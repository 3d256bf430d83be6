"""Training state as named whole tensors, and back: safetensors only, so reading runs no code."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from raytrain_gpt.errors import CheckpointError

MODEL_FILE = "model.safetensors"
OPTIM_FILE = "optim-00000.safetensors"


def save_state(directory: Path, model: nn.Module, optimizer: torch.optim.AdamW) -> None:
    """Write the model's and the optimizer's tensors into a directory."""
    _save(directory / MODEL_FILE, dict(model.state_dict()))
    moments = {
        f"{name}/{key}": tensor
        for name, parameter in model.named_parameters()
        for key, tensor in optimizer.state[parameter].items()
    }
    _save(directory / OPTIM_FILE, moments)


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    # More metadata than this would make the bytes differ from process to process.
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(whole, path, metadata={"format": "pt"})


def load_model(directory: Path, model: nn.Module) -> None:
    """Read the weights of a checkpoint into a model.

    Raises:
        CheckpointError: the file is missing or damaged, or the shapes differ.
    """
    tensors = _load(directory / MODEL_FILE)
    ours = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    theirs = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise CheckpointError(
                f"{directory} has {name} {theirs.get(name, 'missing')}, the model "
                f"{ours.get(name, 'none of it')}; use the configuration it was trained with"
            )
    model.load_state_dict(tensors)


def load_optimizer(directory: Path, model: nn.Module, optimizer: torch.optim.AdamW) -> None:
    """Read the optimizer's state of a checkpoint.

    Raises:
        CheckpointError: the files are missing or damaged, or tensors of the model are not in them
            or have other shapes.
    """
    tensors: dict[str, Tensor] = {}
    for path in sorted(directory.glob("optim-*.safetensors")):
        tensors.update(_load(path))
    for name, parameter in model.named_parameters():
        try:
            optimizer.state[parameter] = {
                key: tensors[f"{name}/{key}"].to(parameter.device)
                for key in ("step", "exp_avg", "exp_avg_sq")
            }
        except KeyError as error:
            raise CheckpointError(f"{directory} has no optimizer state {error}") from None
        for key in ("exp_avg", "exp_avg_sq"):
            moment = optimizer.state[parameter][key]
            if moment.shape != parameter.shape:
                raise CheckpointError(
                    f"{directory} has optimizer state {name}/{key} {tuple(moment.shape)}, the model "
                    f"{tuple(parameter.shape)}; use the configuration it was trained with"
                )


def _load(path: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None
    return tensors
