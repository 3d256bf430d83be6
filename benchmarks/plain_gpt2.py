"""A plain GPT-2 and its training loop in the manner of nanoGPT, which the product is compared with.

Nothing of the product is in it. Padded vocabulary, tied embedding, PyTorch's own attention, autocast, TF32,
`torch.compile` of the model, on a GPU fused AdamW and batches pinned and copied without waiting: what a good
small script has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """Of the model."""

    num_layers: int
    num_heads: int
    num_channels: int
    context: int
    num_ids: int


class PlainBlock(nn.Module):
    """Attention and MLP, each behind a LayerNorm and added to the stream."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        channels = sizes.num_channels
        self.num_heads = sizes.num_heads
        self.norm_1 = nn.LayerNorm(channels)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)
        self.norm_2 = nn.LayerNorm(channels)
        self.up = nn.Linear(channels, 4 * channels)
        self.down = nn.Linear(4 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm_1(x)).split(c, dim=2)
        q, k, v = (z.view(b, t, self.num_heads, -1).transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).contiguous().view(b, t, c))
        y = F.gelu(self.up(self.norm_2(x)), approximate="tanh")
        out: Tensor = x + self.down(y)
        return out


class PlainGPT(nn.Module):
    """The model; returns the mean loss."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.num_ids, sizes.num_channels)
        self.places = nn.Embedding(sizes.context, sizes.num_channels)
        self.blocks = nn.ModuleList(PlainBlock(sizes) for _ in range(sizes.num_layers))
        self.norm = nn.LayerNorm(sizes.num_channels)
        self.head = nn.Linear(sizes.num_channels, sizes.num_ids, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.places(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1), ignore_index=-1)


def train_plainly(
    model: PlainGPT,
    blocks: Iterator[Tensor],
    device: torch.device,
    *,
    bf16: bool,
    compiled: bool,
    micro_steps: int,
    learning_rate: float,
) -> Iterator[Tensor]:
    """Train for as long as there are blocks; the mean loss of every step, on the device.

    Args:
        model: On the device.
        blocks: int64 (sequences, context + 1) on the host, `micro_steps` of them a step.
        device: Where it trains.
        bf16: Autocast, else everything is fp32.
        compiled: With `torch.compile`.
        micro_steps: Forward and backward passes of a step.
        learning_rate: The same in all steps.
    """
    torch.set_float32_matmul_precision("high")
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=fused)
    run = torch.compile(model) if compiled else model
    model.train()

    def next_batch() -> tuple[Tensor, Tensor] | None:
        block = next(blocks, None)
        if block is None:
            return None
        x, y = block[:, :-1].contiguous(), block[:, 1:].contiguous()
        if device.type != "cuda":
            return x.to(device), y.to(device)
        return tuple(z.pin_memory().to(device, non_blocking=True) for z in (x, y))

    batch = next_batch()
    while batch is not None:
        total = torch.zeros((), device=device)
        for _ in range(micro_steps):
            assert batch is not None, "blocks end with a step"
            cast = torch.autocast(device.type, torch.bfloat16) if bf16 else contextlib.nullcontext()
            with cast:
                loss = run(*batch) / micro_steps
            batch = next_batch()
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield total
