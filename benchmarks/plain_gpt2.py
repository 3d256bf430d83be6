"""A plain GPT-2 and its training loop in nanoGPT's style, for comparison with the product.

It uses no code of the product, but has the features of a good small script: padded vocabulary, tied
embedding, PyTorch's attention, autocast, TF32, `torch.compile`. On a GPU, pinned batches are copied
asynchronously.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INIT_STD = 0.02

Batch = tuple[Tensor, Tensor]
"""Inputs and targets, int64 (sequences, context)."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model."""

    num_layers: int
    num_heads: int
    num_channels: int
    context: int
    num_ids: int


class PlainBlock(nn.Module):
    """Attention and MLP, each behind a LayerNorm and added to the residual stream."""

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
    """Model with GPT-2's random weights; returns the mean loss over targets other than -100."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.num_ids, sizes.num_channels)
        self.positions = nn.Embedding(sizes.context, sizes.num_channels)
        self.blocks = nn.ModuleList(PlainBlock(sizes) for _ in range(sizes.num_layers))
        self.norm = nn.LayerNorm(sizes.num_channels)
        self.head = nn.Linear(sizes.num_channels, sizes.num_ids, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                ends_branch = name.endswith(("out.weight", "down.weight"))
                scale = math.sqrt(2 * sizes.num_layers) if ends_branch else 1
                nn.init.normal_(parameter, std=INIT_STD / scale)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def train_plainly(
    model: PlainGPT,
    batches: Iterator[Batch],
    device: torch.device,
    learning_rate: Callable[[int], float],
    *,
    bf16: bool,
    fused: bool,
    compiled: bool = False,
    micro_steps: int = 1,
) -> Iterator[Tensor]:
    """Train until the batches end; yields the mean loss of every step, on the device.

    Args:
        model: On the device.
        batches: On the host, `micro_steps` of them per step.
        learning_rate: Takes the number of updates done.
        bf16: Autocast; otherwise everything is fp32.
        fused: Fused AdamW.
        micro_steps: Forward and backward passes per step.
    """
    torch.set_float32_matmul_precision("high")
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=fused)
    run = torch.compile(model) if compiled else model
    model.train()

    def next_batch() -> Batch | None:
        batch = next(batches, None)
        if batch is None:
            return None
        x, y = (z.contiguous() for z in batch)
        if device.type != "cuda":
            return x.to(device), y.to(device)
        return tuple(z.pin_memory().to(device, non_blocking=True) for z in (x, y))

    batch, step = next_batch(), 0
    while batch is not None:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        total = torch.zeros((), device=device)
        for _ in range(micro_steps):
            assert batch is not None, "batches end with a step"
            cast = torch.autocast(device.type, torch.bfloat16) if bf16 else contextlib.nullcontext()
            with cast:
                loss = run(*batch) / micro_steps
            batch = next_batch()
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        yield total
