"""Muon for the matrices of the blocks, AdamW for embeddings, head, norms and biases.

Muon sets all singular values of the momentum update to about 1, by five Newton–Schulz iterations. Its
steps have the root mean square of AdamW's, so both share one learning rate.

- Matrices of one shape are stacked: few large products instead of many small ones.
- The ranks split each stack, which may change rounding: on some CPUs a matrix alone has another kernel.
  A sharded matrix is gathered on one rank, and its update is scattered.
- A step with non-finite gradients leaves the state unchanged, without synchronizing with the host.
- With NorMuon, each neuron's update is divided by the root of its mean square over time.

Sources: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); Liu et al., "Muon is
Scalable for LLM Training" (2025); Li et al., "NorMuon: Making Muon more efficient and scalable" (2025); Zhang
et al., "When and Why Grouping Attention Heads Accelerates Muon Optimization" (2026).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from raytrain_gpt.config.built_in import MuonSettings
from raytrain_gpt.config.sections import OptimSection
from raytrain_gpt.core.model import GPT
from raytrain_gpt.core.optim import AdamW, MatrixCounts, numbers_of_groups
from raytrain_gpt.core.parallel import local_tensor

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_ITERATIONS = 5
_ADAMW_RMS = 0.2
"""Approximate root mean square of AdamW's steps at learning rate 1."""
STACK_ELEMENTS = 2**26
"""Maximum elements per stack over all ranks, unless one matrix per rank is larger."""
_EPS = 1e-7
_MIN_MEAN_SQUARE = 1e-6
"""Lower limit of a neuron's mean square, relative to that of an orthogonal matrix."""


class Muon(AdamW):
    """Optimizer of all parameters: Muon for the matrices of the blocks, AdamW for the others.

    Fused projections are orthogonalized as separate matrices, and so are groups of `muon_head_group` heads.
    The iterations multiply in bf16 if the model does, else in fp32. For the arguments see `AdamW`.
    """

    def __init__(
        self,
        model: GPT,
        config: OptimSection,
        matmul_dtype: torch.dtype | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        trained = [(name, p) for name, p in model.h.named_parameters() if p.requires_grad]
        matrices = {name: p for name, p in trained if p.dim() == 2}
        settings = config.settings(MuonSettings)
        super().__init__(model, config, others={*matrices.values()})
        self._settings = settings
        self._add_embedding_group(model)
        self._dtype = torch.bfloat16 if matmul_dtype == torch.bfloat16 else torch.float32
        self._group = group
        self.num_shares = 1 if group is None else group.size()  # of every stack
        self._stacks: dict[tuple[torch.Size, int], list[nn.Parameter]] = {}
        for name, matrix in matrices.items():
            num_maps = _num_maps(model, name.partition(".")[2], matrix, settings.muon_head_group)
            self._stacks.setdefault((matrix.shape, num_maps), []).append(matrix)
            self.state[matrix] = {"momentum_buffer": torch.zeros_like(matrix)}
            if settings.normuon_beta2:
                neurons = len(matrix) if _rows_are_neurons(matrix, num_maps) else matrix.shape[1]
                self.state[matrix]["mean_square"] = torch.ones(neurons, device=matrix.device)

    def _add_embedding_group(self, model: GPT) -> None:
        """Move an embedding with its own learning rate into a separate group, the last one."""
        embedding, factor = model.wte.weight, self._settings.embedding_lr_factor
        self._embedding_lr_factor = 1.0
        if factor == 1 or embedding is model.head_weight or not embedding.requires_grad:
            return
        self._embedding_lr_factor = factor
        decaying = self.param_groups[0]
        decaying["params"] = [p for p in decaying["params"] if p is not embedding]
        self.add_param_group({**decaying, "params": [embedding]})
        self.group_numbers = numbers_of_groups(self.param_groups)

    @staticmethod
    def state_bytes(num_parameters: int, matrices: MatrixCounts) -> int:
        """Return bytes of the state in fp32, without scalars: two moments per parameter, one in matrices."""
        by_muon = sum(num * rows * columns for (rows, columns, _), num in matrices.items())
        return (2 * num_parameters - by_muon) * torch.float32.itemsize

    @staticmethod
    def update_bytes(matrices: MatrixCounts, num_shards: int) -> int:
        """Return the peak bytes of an update in addition to the state, in fp32.

        Stack of updates, Newton-Schulz input and output (3x the elements, sharded 4x) and two Gram matrices.
        """
        most = 0
        for (rows, columns, num_maps), num_alike in matrices.items():
            together = min(num_alike, matrices_per_stack(rows * columns, num_shards))
            grams = 2 * num_maps * min(rows // num_maps, columns) ** 2
            elements = (3 + (num_shards > 1)) * rows * columns + grams
            most = max(most, -(-together // num_shards) * elements)
        return most * torch.float32.itemsize

    @staticmethod
    def update_flops(matrices: MatrixCounts) -> int:
        """Return the FLOPs of all Newton-Schulz iterations."""
        return sum(
            num * num_maps * newton_schulz_flops(rows // num_maps, columns)
            for (rows, columns, num_maps), num in matrices.items()
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters; reads `grad_scale` and `found_inf` like a fused AdamW."""
        self.param_groups[-1]["lr"] *= self._embedding_lr_factor
        loss = super().step(closure)
        for (shape, num_maps), stack in self._stacks.items():
            size = matrices_per_stack(shape.numel(), self.num_shares)
            for start in range(0, len(stack), size):
                self._step_stack(stack[start : start + size], num_maps)
        return loss

    def _step_stack(self, matrices: list[nn.Parameter], num_maps: int) -> None:
        divisor, bad = self.grad_scale, self.found_inf.bool()
        lr = self.param_groups[0]["lr"] * (~bad).float()
        momenta = [local_tensor(self.state[matrix]["momentum_buffer"]) for matrix in matrices]
        gradients = [torch.zeros_like(m) if m.grad is None else m.grad for m in matrices]
        stack = torch.stack([local_tensor(gradient) for gradient in gradients])
        # Replaced by the momentum, which then does not change: NaN times 0 would be NaN.
        stack = torch.where(bad, torch.stack(momenta), stack.div_(divisor))
        momentum = self._settings.muon_momentum
        torch._foreach_lerp_(momenta, stack.unbind(), 1 - momentum)
        torch._foreach_lerp_(stack.unbind(), momenta, momentum)  # Nesterov's
        rows, columns = matrices[0].shape
        rms = _ADAMW_RMS * math.sqrt(max(rows // num_maps, columns))
        updates = self._orthogonalized(stack.to(self._dtype), matrices[0], num_maps)
        if self._settings.normuon_beta2:
            updates = self._evened(updates, matrices, num_maps)
        weights = [local_tensor(matrix) for matrix in matrices]
        torch._foreach_mul_(weights, 1 - lr * self._settings.weight_decay)
        torch._foreach_add_(weights, (updates.to(weights[0].dtype) * (-lr * rms)).unbind())

    def _evened(self, updates: Tensor, matrices: list[nn.Parameter], num_maps: int) -> Tensor:
        """Divide a stack of updates, or its shard, by the roots of the neurons' mean squares over time."""
        like = matrices[0]
        rows, columns = like.shape
        by_row = _rows_are_neurons(like, num_maps)
        squares = updates.float().square().sum(2 if by_row else 1)
        first_row = 0
        if self._group is not None and like is not local_tensor(like):
            first_row = sum(_shares(rows, self._group.size())[: self._group.rank()])
            if by_row:
                squares = F.pad(squares, (first_row, rows - first_row - squares.shape[1]))
            dist.all_reduce(squares, group=self._group)
        # The mean square in an orthogonal matrix is 1 / max(rows, columns).
        mean_squares = squares * (max(rows // num_maps, columns) / (columns if by_row else rows))
        states = [self.state[matrix]["mean_square"] for matrix in matrices]
        weight = (1 - self._settings.normuon_beta2) * (~self.found_inf.bool()).float()
        averages = torch.lerp(torch.stack(states), mean_squares, weight)
        torch._foreach_copy_(states, averages.unbind())
        scales = averages.clamp(min=_MIN_MEAN_SQUARE).rsqrt()
        if by_row:
            return updates * scales[:, first_row : first_row + updates.shape[1], None]
        return updates * scales[:, None, :]

    def _orthogonalized(self, stack: Tensor, like: nn.Parameter, num_maps: int) -> Tensor:
        """Set the singular values of a stack of updates to about 1; shards in, shards out."""

        def orthogonal_maps(stack: Tensor) -> Tensor:
            maps = stack.reshape(len(stack) * num_maps, len(like) // num_maps, stack.shape[2])
            return newton_schulz(maps).reshape(stack.shape)

        counts, shard_shape = _shares(len(stack), self.num_shares), stack.shape[1:]
        if self._group is None:
            parts = [orthogonal_maps(part) for part in torch.split(stack, counts) if len(part)]
            return torch.cat(parts) if len(parts) > 1 else parts[0]
        rank, num_ranks = self._group.rank(), self._group.size()
        if like is local_tensor(like):
            result = torch.empty_like(stack)
            shares = torch.split(result, counts)
            shares[rank].copy_(orthogonal_maps(torch.split(stack, counts)[rank]))
            # Not all_gather, which needs shares of one size: among many ranks, most have no matrix.
            for source in range(num_ranks):
                if counts[source]:
                    dist.broadcast(shares[source], group=self._group, group_src=source)
        else:
            rows = _shares(len(like), num_ranks)
            shapes = [(counts[rank], num, like.shape[1]) for num in rows]
            stack = torch.cat(self._all_to_all(torch.split(stack, counts), shapes), 1)
            sent = torch.split(orthogonal_maps(stack), rows, 1)
            result = torch.cat(self._all_to_all(sent, [(num, *shard_shape) for num in counts]))
        return result

    def _all_to_all(
        self, chunks: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]
    ) -> list[Tensor]:
        """Send `chunks[r]` to rank r and receive a tensor of `shapes[r]` from it."""
        sent = torch.cat([chunk.flatten() for chunk in chunks])
        sizes = [math.prod(shape) for shape in shapes]
        received = sent.new_empty(sum(sizes))
        dist.all_to_all_single(received, sent, sizes, [c.numel() for c in chunks], self._group)
        return [
            c.view(shape) for c, shape in zip(torch.split(received, sizes), shapes, strict=True)
        ]


def _num_maps(model: GPT, name: str, matrix: nn.Parameter, head_group: int) -> int:
    """Return the number of matrices in a weight; a head group that does not divide becomes the gcd."""
    fused = model.fused_projections.get(name, 1)
    if not head_group or name not in model.head_projections:
        return fused
    heads = len(matrix) // fused // model.shape.head_size
    return fused * heads // math.gcd(head_group, heads)


def _rows_are_neurons(matrix: nn.Parameter, num_maps: int) -> bool:
    """Whether NorMuon evens out a matrix's rows; otherwise its columns, which are then more than the rows."""
    return num_maps > 1 or matrix.shape[0] >= matrix.shape[1]


def _shares(number: int, num_ranks: int) -> list[int]:
    """Split a number over the ranks like FSDP splits rows: the last ranks get fewer or none."""
    share = -(-number // num_ranks)
    return [max(0, min(share, number - rank * share)) for rank in range(num_ranks)]


def matrices_per_stack(elements: int, num_ranks: int) -> int:
    """Return how many matrices of `elements` elements form one stack, equally many on every rank."""
    return num_ranks * max(1, STACK_ELEMENTS // (num_ranks * elements))


def newton_schulz_flops(rows: int, columns: int) -> int:
    """Return the FLOPs of the iterations for one matrix."""
    m, n = sorted((rows, columns))
    return _NEWTON_SCHULZ_ITERATIONS * (4 * m * m * n + 2 * m**3)


def newton_schulz(stack: Tensor) -> Tensor:
    """Set singular values to about 1 (0.7 to 1.2), keeping the singular vectors.

    `stack` is (N, R, C) in the dtype of the products; zero matrices stay zero.
    """
    a, b, c = _NEWTON_SCHULZ
    is_tall = stack.shape[1] > stack.shape[2]
    x = stack.mT if is_tall else stack
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=_EPS)  # singular values up to 1
    for _ in range(_NEWTON_SCHULZ_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
