"""FLOPs per token against independent counts, including torch's, and peak FLOPs of listed devices only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from raytrain_gpt.config.built_in import Qwen3Settings
from raytrain_gpt.core.device import peak_flops, resolve_precision
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.registry import count_model, new_model

OF_QWEN3 = {"num_kv_heads": 1, "mlp_size": 40}
QWEN3 = {"architecture": "qwen3", "settings": Qwen3Settings(**OF_QWEN3)}
UNTIED = QWEN3 | {"settings": Qwen3Settings(**OF_QWEN3, tied_embeddings=False)}


def counted_flops(shape: GPTShape, num_sequences: int) -> int:
    """Count FLOPs of forward and backward with torch, with attention as plain matrix products.

    The head is not chunked, because torch skips products that are added in place.
    """
    with torch.device("meta"):
        model = new_model(shape)
        ids = torch.zeros(num_sequences, shape.seq_len, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        F.cross_entropy(model.logits(ids).flatten(0, 1), ids.flatten()).backward()
    return counter.get_total_flops()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "more", "num_sequences"),
    [((2, 4, 64, 48, 257), {}, 3), ((3, 2, 48, 7, 64), QWEN3, 1), ((1, 1, 32, 16, 100), UNTIED, 3)],
    ids=["gpt2", "qwen3", "untied"],
)
def test_flops_are_those_that_torch_counts(
    sizes: tuple[int, ...], more: dict[str, Any], num_sequences: int
) -> None:
    """Both sides count full, unmasked attention; the formula also counts biases and norms."""
    shape = GPTShape(*sizes, **more)
    matrices = (
        shape.num_layers * count_model(shape).block_elements
        + count_model(shape).embedding_parameters
    )
    vectors = count_model(shape).num_parameters - matrices
    num_tokens = num_sequences * shape.seq_len
    counted = counted_flops(shape, num_sequences)
    assert counted == num_tokens * (count_model(shape).flops_per_token - 6 * vectors)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", 181e12),  # not an L4
        ("NVIDIA L400", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("cpu", None),
    ],
)
def test_known_devices_alone_have_a_peak_and_in_bf16_only(name: str, peak: float | None) -> None:
    assert peak_flops(name, "bf16") == peak
    assert peak_flops(name, "fp32") is None


@pytest.mark.parametrize(
    ("found", "mkldnn", "precision"),
    [
        ({"amx_bf16": True, "avx512_bf16": False}, True, "bf16"),
        ({"amx_bf16": False, "avx512_bf16": True}, True, "bf16"),
        ({"architecture": "arm64", "bf16": True}, True, "bf16"),
        ({"architecture": "arm64", "bf16": True}, False, "fp32"),
        ({"amx_bf16": False, "avx512_bf16": False, "avx512_f": True}, True, "fp32"),
        ({}, True, "fp32"),
    ],
)
def test_auto_is_bf16_on_a_cpu_that_multiplies_it_natively(
    found: dict[str, object], mkldnn: bool, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: mkldnn)
    cpu = torch.device("cpu")
    assert resolve_precision("auto", cpu) == precision
    assert [resolve_precision(asked, cpu) for asked in ("fp32", "bf16")] == ["fp32", "bf16"]
