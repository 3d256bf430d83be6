"""What a token costs, and what share of the device's peak a run reaches."""

from __future__ import annotations

from raytrain_gpt.core.model import GPTShape

PEAK_BF16_FLOPS = {
    "NVIDIA A100": 312e12,  # NVIDIA A100 datasheet, dense
    "NVIDIA H100 80GB HBM3": 989e12,  # NVIDIA H100 datasheet, SXM, dense
    "NVIDIA H100 PCIe": 756e12,  # NVIDIA H100 datasheet, PCIe, dense
    "NVIDIA H200": 989e12,  # NVIDIA H200 datasheet, dense
}
"""Device name prefix -> dense bf16 FLOP/s; a device that is not here has no MFU."""


def flops_per_token(shape: GPTShape) -> float:
    """Floating point operations of forward and backward for one token.

    `6·N + 12·layers·embd_size·seq_len`, N without the position embedding.
    Source: Chowdhery et al., "PaLM" (2022), appendix B.
    """
    matmul_parameters = shape.num_parameters - shape.seq_len * shape.embd_size
    return 6 * matmul_parameters + 12 * shape.num_layers * shape.embd_size * shape.seq_len


def peak_flops(device_name: str, precision: str) -> float | None:
    """Peak FLOP/s of one device, or None where it is not known."""
    if precision != "bf16":
        return None
    for prefix, peak in PEAK_BF16_FLOPS.items():
        if device_name.startswith(prefix):
            return peak
    return None
