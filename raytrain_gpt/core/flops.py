"""What a token costs, and what a device could do at most."""

from __future__ import annotations

from raytrain_gpt.core.gpu_specs import device_of
from raytrain_gpt.core.model import GPTShape


def flops_per_token(shape: GPTShape) -> float:
    """Floating point operations of forward and backward for one token.

    `6·N + 12·layers·embd_size·seq_len`, N without the position embedding. Causal attention counts in full,
    and what activation checkpointing computes again does not count: it is no progress.
    Source: Chowdhery et al., "PaLM" (2022), appendix B.
    """
    matmul_parameters = shape.num_parameters - shape.seq_len * shape.embd_size
    return 6 * matmul_parameters + 12 * shape.num_layers * shape.embd_size * shape.seq_len


def peak_flops(device_name: str, precision: str) -> float | None:
    """Peak FLOP/s of one device, or None where it is not known.

    Dense bf16 and fp16 have the same one. In fp32 there is none: matrix products then run in TF32 and the
    rest does not, so that no one peak is right.
    """
    device = device_of(device_name)
    return device.bf16_flops if device and precision in ("bf16", "fp16") else None
