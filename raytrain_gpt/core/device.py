"""The device of a worker: precision, seeds, what affects the last bits, and a table of GPUs."""

from __future__ import annotations

import contextlib
import os
import platform
import random
import re
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raytrain_gpt.errors import ConfigError
from raytrain_gpt.version import VERSION


@dataclass(frozen=True)
class GpuSpec:
    """One kind of GPU, by NVIDIA's data sheet.

    Attributes:
        name: Prefix of the name that torch reports.
        bf16_flops: Dense bf16 FLOP/s with fp32 sums, half of the figure with sparsity; fp16's if the GPU
          lacks bf16; 0 if unknown.
        is_sxm: Whether it is the SXM module, the usual meaning of a chip's plain name.
    """

    name: str
    bf16_flops: float
    memory_bytes: float
    is_sxm: bool = False
    has_bf16: bool = True


GPU_SPECS = (
    GpuSpec("Tesla T4", 65e12, 16e9, has_bf16=False),
    GpuSpec("Tesla V100-PCIE-16GB", 112e12, 16e9, has_bf16=False),
    GpuSpec("Tesla V100-PCIE-32GB", 112e12, 32e9, has_bf16=False),
    GpuSpec("Tesla V100-SXM2-16GB", 125e12, 16e9, is_sxm=True, has_bf16=False),
    GpuSpec("Tesla V100-SXM2-32GB", 125e12, 32e9, has_bf16=False),
    GpuSpec("NVIDIA GeForce RTX 3090", 71e12, 24e9),
    GpuSpec("NVIDIA GeForce RTX 4090", 165e12, 24e9),
    GpuSpec("NVIDIA GeForce RTX 5090", 209e12, 32e9),
    GpuSpec("NVIDIA RTX A6000", 155e12, 48e9),
    GpuSpec("NVIDIA L40", 181e12, 48e9),
    GpuSpec("NVIDIA L4", 121e12, 24e9),
    GpuSpec("NVIDIA A10G", 70e12, 24e9),
    GpuSpec("NVIDIA L40S", 362e12, 48e9),
    GpuSpec("NVIDIA A100-SXM4-40GB", 312e12, 40e9, is_sxm=True),
    GpuSpec("NVIDIA A100-PCIE-40GB", 312e12, 40e9),
    GpuSpec("NVIDIA A100-SXM4-80GB", 312e12, 80e9, is_sxm=True),
    GpuSpec("NVIDIA A100 80GB PCIe", 312e12, 80e9),
    GpuSpec("NVIDIA H20", 148e12, 96e9, is_sxm=True),
    GpuSpec("NVIDIA H100 PCIe", 756e12, 80e9),
    GpuSpec("NVIDIA H100 NVL", 835e12, 94e9),
    GpuSpec("NVIDIA H100 80GB HBM3", 989e12, 80e9, is_sxm=True),
    GpuSpec("NVIDIA H200 NVL", 835e12, 141e9),
    GpuSpec("NVIDIA H200", 989e12, 141e9, is_sxm=True),
    GpuSpec("NVIDIA GH200 480GB", 989e12, 96e9),
    GpuSpec("NVIDIA B200", 2250e12, 180e9, is_sxm=True),
    GpuSpec("NVIDIA B300 SXM6 AC", 2250e12, 288e9, is_sxm=True),
    GpuSpec("NVIDIA GB200", 2500e12, 186e9),
)


def gpu_spec(name: str) -> GpuSpec | None:
    """Look up a GPU by the name that torch reports; None if unlisted.

    Only full words match, and MIG slices never do: no peak is better than a wrong one.
    """
    if " MIG " in name:
        return None
    matching = [spec for spec in GPU_SPECS if re.match(rf"{re.escape(spec.name)}(?!\w)", name)]
    return max(matching, key=lambda spec: len(spec.name), default=None)


ASSUMED_MFU = 0.4
"""MFU to assume for a compiled bf16 GPT-2; good loops reach it on A100 and H100."""


def gpu_specs_matching(text: str) -> list[GpuSpec]:
    """Find GPUs by exact name, or by all words of a text like `h100` or `A100-80GB`."""
    wanted = text.casefold().removeprefix("nvidia").strip()
    exact = [spec for spec in GPU_SPECS if spec.name.casefold() == f"nvidia {wanted}"]
    words = re.findall(r"\w+", wanted)
    names = {f"{spec.name} {'SXM' * spec.is_sxm}".casefold(): spec for spec in GPU_SPECS}
    near = [spec for name, spec in names.items() if words and all(w in name for w in words)]
    return exact or near


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the peak FLOP/s of one device, or None if unlisted.

    Dense bf16 and fp16 have the same peak. fp32 has none: only matrix products run in TF32, so no single
    peak is right.
    """
    spec = gpu_spec(device_name)
    return spec.bf16_flops if spec and precision in ("bf16", "fp16") else None


def device_name(device: torch.device, in_detail: bool = False) -> str:
    """Return torch's name of a GPU, else the device's type; in detail also the kind of CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if not in_detail:
        return device.type
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    kind = model[1] if model else platform.machine()
    return f"{kind} ({torch.backends.cpu.get_cpu_capability()})"


def numerics_environment(device: torch.device, precision: str) -> dict[str, str]:
    """Return what affects the bits of gradients, in addition to weights, data and configuration."""
    return {
        "device": device_name(device, in_detail=True),
        "threads": str(torch.get_num_threads()),
        "precision": precision,
        "torch": torch.__version__,
        "raytrain-gpt": VERSION,
    }


def environment_changes(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Describe differences as `threads 1 -> 2`; empty if none."""
    return ", ".join(
        f"{name} {before.get(name)} -> {now[name]}" for name in now if before.get(name) != now[name]
    )


def best_device() -> torch.device:
    """Return CUDA, else MPS, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def has_bf16(device: torch.device) -> bool:
    """Whether a device computes in bf16; a CPU may emulate it."""
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def bf16_is_faster(device: torch.device) -> bool:
    """Whether bf16 matrix products are faster than fp32; on a CPU, if it multiplies bf16 natively.

    On a CPU only oneDNN (mkldnn) uses such instructions; without it bf16 is hundreds of times slower.
    """
    if device.type != "cpu":
        return device.type == "cuda" and has_bf16(device)
    usable = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    # Older versions of torch have no get_capabilities; `bf16` is its name on arm64.
    capabilities: Mapping[str, Any] = (
        getattr(torch.cpu, "get_capabilities", dict)() if usable else {}
    )
    return any(capabilities.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))


def resolve_precision(asked: str, device: torch.device) -> str:
    """Resolve `auto` to `fp32`, `bf16` or `fp16`; raises ConfigError for bf16 on a GPU without it."""
    if asked == "bf16" and not has_bf16(device):
        raise ConfigError(
            f"precision=bf16, but {torch.cuda.get_device_name(device)} does not support bf16; "
            "set precision to fp16, fp32 or auto"
        )
    if asked == "auto":
        return "bf16" if bf16_is_faster(device) else "fp32"
    return asked


def matmul_dtype(precision: str) -> torch.dtype | None:
    """Return the type of matrix products under autocast, or None for `fp32`, which has no autocast."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the type of a matrix product with this tensor here: autocast's, else the tensor's."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


def make_autocast(
    precision: str, device: torch.device
) -> Callable[[], contextlib.AbstractContextManager[object]]:
    """Return a factory of contexts for forward passes; weights stay fp32."""
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs that have it
    if (dtype := matmul_dtype(precision)) is None:
        return contextlib.nullcontext
    return lambda: torch.autocast(device.type, dtype)


def inference_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context for sampling from fp32 weights: bf16 on GPUs that have it, else fp32.

    Weights are cast once and kept in both types until the context ends, so enter it around many steps.
    """
    if device.type != "cuda":
        return contextlib.nullcontext()
    return make_autocast(resolve_precision("auto", device), device)()


def seed_everything(seed: int, rank: int) -> None:
    """Seed Python, NumPy and torch from the run's seed and this rank."""
    random.seed(seed * 100_003 + rank)
    np.random.seed((seed + rank) % 2**32)
    torch.manual_seed(seed * 100_003 + rank)


def set_cuda_defaults() -> None:
    """Set variables that CUDA reads when it starts, unless the user has; call this before using a GPU."""
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name
        # A fragmented GPU has no room for large tensors.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for exact; torch's usual size


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished all work queued on it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class DeviceTimestamp:
    """Time on a device: on a GPU, when it has finished all work queued so far."""

    def __init__(self, device: torch.device) -> None:
        self._event = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()
        self._at = time.perf_counter()

    def seconds_since(self, earlier: DeviceTimestamp) -> float:
        """Return the seconds since an earlier timestamp; waits for this one."""
        if self._event is None or earlier._event is None:
            return self._at - earlier._at
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1e3


Span = tuple[DeviceTimestamp, DeviceTimestamp]


class TimedContext:
    """Factory of contexts that measure what runs inside, such as autocast around a forward pass.

    Args:
        make: Function that makes the context itself.
    """

    def __init__(
        self, make: Callable[[], contextlib.AbstractContextManager[object]], device: torch.device
    ) -> None:
        self._make, self._device = make, device
        self._spans: list[Span] = []

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        started = DeviceTimestamp(self._device)
        with self._make():
            yield
        self._spans.append((started, DeviceTimestamp(self._device)))

    def take(self) -> list[Span]:
        """Return start and end of the contexts since the last call."""
        spans, self._spans = self._spans, []
        return spans


def forget_peak_memory() -> None:
    """Reset the peak of `peak_memory_bytes`, where the system can."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", "ascii")  # proc_pid_clear_refs(5)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process: allocated on a GPU, else resident on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
