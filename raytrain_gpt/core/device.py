"""Device, precision and seeds of one worker, and what can be asked of a device."""

from __future__ import annotations

import contextlib
import random
import resource
from collections.abc import Callable

import numpy as np
import torch

from raytrain_gpt.errors import ConfigError


def best_device() -> torch.device:
    """CUDA, else MPS, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def has_bf16(device: torch.device) -> bool:
    """Whether a device computes bf16 by itself."""
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def resolve_precision(asked: str, device: torch.device) -> str:
    """`fp32`, `bf16` or `fp16`.

    Raises:
        ConfigError: bf16 is asked for on a GPU that has none.
    """
    if asked == "bf16" and not has_bf16(device):
        raise ConfigError(
            f"precision=bf16, but {torch.cuda.get_device_name(device)} computes no bf16; "
            "set precision to fp16, fp32 or auto"
        )
    if asked == "auto":
        return "bf16" if device.type == "cuda" and has_bf16(device) else "fp32"
    return asked


def matmul_dtype(precision: str) -> torch.dtype | None:
    """What autocast computes matmuls in; None for `fp32`, which has no autocast."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)


def dtype_of_matmul(tensor: torch.Tensor) -> torch.dtype:
    """What a matrix product with a tensor is computed in here: autocast's type, else the tensor's own."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


def autocast_of(
    precision: str, device: torch.device
) -> Callable[[], contextlib.AbstractContextManager[object]]:
    """Makes the context that forward passes run in; weights stay fp32."""
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs that have it
    dtype = matmul_dtype(precision)
    if dtype is None:
        return contextlib.nullcontext
    return lambda: torch.autocast(device.type, dtype)


def seed_everything(seed: int, rank: int) -> None:
    """Seed Python, NumPy and torch from the run's seed and this rank."""
    random.seed(seed * 100_003 + rank)
    np.random.seed((seed + rank) % 2**32)
    torch.manual_seed(seed * 100_003 + rank)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory since the process began: allocated on a GPU, else resident on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
