"""What is known of GPUs: their peak and their memory."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One kind of GPU.

    Attributes:
        name: How the name that torch tells begins.
        bf16_flops: Dense bf16 FLOP/s, by NVIDIA's data sheet (half of the figure with sparsity).
        memory_bytes: By the data sheet.
    """

    name: str
    bf16_flops: float
    memory_bytes: float


DEVICES = (
    Device("NVIDIA L4", 121e12, 24e9),
    Device("NVIDIA A10G", 70e12, 24e9),
    Device("NVIDIA L40S", 362e12, 48e9),
    Device("NVIDIA A100-SXM4-40GB", 312e12, 40e9),
    Device("NVIDIA A100-PCIE-40GB", 312e12, 40e9),
    Device("NVIDIA A100-SXM4-80GB", 312e12, 80e9),
    Device("NVIDIA A100 80GB PCIe", 312e12, 80e9),
    Device("NVIDIA H100 PCIe", 756e12, 80e9),
    Device("NVIDIA H100 NVL", 835e12, 94e9),
    Device("NVIDIA H100 80GB HBM3", 989e12, 80e9),
    Device("NVIDIA H200 NVL", 835e12, 141e9),
    Device("NVIDIA H200", 989e12, 141e9),
    Device("NVIDIA B200", 2250e12, 180e9),
)


def device_of(name: str) -> Device | None:
    """The device of a name as torch tells it, or None where it is not known.

    An unknown device has no peak rather than a wrong one: a name must go on with another word, and a
    part of a GPU (MIG) is not the GPU.
    """
    if " MIG " in name:
        return None
    found = [d for d in DEVICES if re.match(rf"{re.escape(d.name)}(?!\w)", name)]
    return max(found, key=lambda d: len(d.name), default=None)


def devices_called(words: str) -> list[Device]:
    """The devices whose names hold some letters, for people who write `h100`."""
    wanted = words.casefold().removeprefix("nvidia").strip()
    whole = [d for d in DEVICES if d.name.casefold() == f"nvidia {wanted}"]
    return whole or [d for d in DEVICES if wanted and wanted in d.name.casefold()]
