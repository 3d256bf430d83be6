"""The code shared by all architectures: sizes, token ids to loss, and recomputation.

Shapes: B sequences, T tokens, D channels, H heads, V padded vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from raytrain_gpt.config.kinds import BUILT_IN, Kind, Registry, Settings
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.attention import (
    SPARSE_BLOCK_TOKENS,
    SPARSE_MIN_HEAD_SIZE,
    AttentionFn,
    block_sparse_attention,
    causal_attention,
    document_starts,
    masked_attention,
)
from raytrain_gpt.core.device import autocast_dtype
from raytrain_gpt.core.loss import head_loss
from raytrain_gpt.errors import ConfigError

INIT_STD = 0.02
GPT2_VOCAB_SIZE = 50_257
_LINEAR_OPERATORS = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
_ATTENTION_OPERATORS = frozenset(
    {
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)


_NO_SETTINGS = Settings()


@dataclass(frozen=True)
class GPTShape:
    """Sizes of a model.

    Attributes:
        settings: The architecture's settings, by default its default ones.
        registry: Where the architecture is looked up.
    """

    num_layers: int
    num_heads: int
    embd_size: int
    seq_len: int
    vocab_size: int
    dropout: float = 0.0
    architecture: str = "gpt2"
    settings: Settings = _NO_SETTINGS
    registry: Registry = field(default=BUILT_IN, repr=False)

    def __post_init__(self) -> None:
        if type(self.settings) is Settings:
            object.__setattr__(self, "settings", self.kind.settings())
        if (given := type(self.settings)) is not (wanted := self.kind.settings):
            raise TypeError(
                f"architecture {self.architecture} has {wanted.__name__}, not {given.__name__}"
            )

    @classmethod
    def of(cls, config: Config, vocab_size: int) -> GPTShape:
        """Return the shape of a configuration with a tokenizer's vocabulary."""
        values, registry = config.field_values(), config.registry
        own = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        kind = registry.kind("architecture", config.model.architecture)
        settings = config.model.settings(kind.settings)
        return cls(vocab_size=vocab_size, settings=settings, registry=registry, **own)

    @property
    def kind(self) -> Kind:
        return self.registry.kind("architecture", self.architecture)

    @property
    def fields(self) -> dict[str, Any]:
        """Return the configuration fields of this shape, the inverse of `of`."""
        names = self.__dataclass_fields__.keys() - {"vocab_size", "settings", "registry"}
        own = {name: getattr(self, name) for name in self.__dataclass_fields__ if name in names}
        return own | self.settings.model_dump()

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return getattr(self.settings, "num_kv_heads", None) or self.num_heads

    @property
    def mlp_size(self) -> int:
        """Inner channels of the MLP; 4 times the width in an architecture without this setting."""
        return getattr(self.settings, "mlp_size", None) or 4 * self.embd_size

    @property
    def tied_embeddings(self) -> bool:
        """Whether head and embedding share one matrix."""
        return getattr(self.settings, "tied_embeddings", True)

    @property
    def head_size(self) -> int:
        """Channels of a head of queries, keys or values."""
        return getattr(self.settings, "head_size", None) or self.embd_size // self.num_heads

    @property
    def attention_size(self) -> int:
        """Channels of all query heads together."""
        return self.num_heads * self.head_size

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: rounded up to a multiple of 64, for speed on tensor cores."""
        return -(-self.vocab_size // 64) * 64


Layers = Callable[[Tensor, AttentionFn], Tensor]
"""A block's computation: (B, T, D) -> (B, T, D)."""


class Block(nn.Module, ABC):
    """One transformer block; tokens mix only in calls of `attend`, which hides later tokens."""

    def forward(
        self,
        x: Tensor,
        attend: AttentionFn,
        around: Callable[[Layers, Tensor, AttentionFn], Tensor],
    ) -> Tensor:
        """(B, T, D) -> (B, T, D); `around` wraps the call of `layers`."""
        return around(self.layers, x, attend)

    @abstractmethod
    def layers(self, x: Tensor, attend: AttentionFn) -> Tensor:
        """(B, T, D) -> (B, T, D)."""


class GPT(nn.Module, ABC):
    """A language model; subclasses define the architecture.

    Args:
        activation_checkpointing: `none`, `selective` or `full`, see `_recomputing`.
        document_end: Token that closes a document. Tokens then attend only within their document, and
            positions count from its start. None treats all T tokens as one text.
    """

    wte: nn.Embedding
    h: nn.ModuleList  # of `Block`
    ln_f: nn.Module
    narrow_residual = False
    """Whether the residual stream is in bf16 under bf16 autocast."""
    fused_projections: ClassVar[Mapping[str, int]] = {}
    """Name of a weight in a block -> number of projections fused in its rows, for Muon."""
    head_projections: ClassVar[Collection[str]] = ()
    """Names of the weights in a block whose rows are attention heads, for Muon."""

    def __init__(
        self,
        shape: GPTShape,
        activation_checkpointing: str = "none",
        document_end: int | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape = self.resolved(shape)
        self.activation_checkpointing = activation_checkpointing
        self.document_end = document_end
        keep = partial(_policy, (shape.embd_size, shape.attention_size))
        # Created here, since a compiled model treats it as a constant.
        self._selective = partial(create_selective_checkpoint_contexts, keep)
        self.make_layers(shape)
        for name, kind in (("wte", nn.Embedding), ("h", nn.ModuleList), ("ln_f", nn.Module)):
            if not isinstance(getattr(self, name, None), kind):
                raise ConfigError(
                    f"architecture {shape.architecture} has no {name}; set it to an nn.{kind.__name__} in "
                    "make_layers"
                )
        if len(self.h) != shape.num_layers:
            raise ConfigError(
                f"architecture {shape.architecture} has {len(self.h)} blocks in h, not "
                f"num_layers={shape.num_layers}"
            )

    @classmethod
    def resolved(cls, shape: GPTShape) -> GPTShape:
        """Replace placeholder settings of a shape, such as None, by their defaults."""
        return shape

    @abstractmethod
    def make_layers(self, shape: GPTShape) -> None:
        """Set `wte`, `h`, `ln_f` and other layers, in forward order."""

    @property
    def head_weight(self) -> Tensor:
        """Weight of the head, (V, D)."""
        return self.wte.weight

    @property
    def device(self) -> torch.device:
        return self.wte.weight.device

    @abstractmethod
    def init_weights(self, seed: int) -> None:
        """Initialize all weights."""

    @abstractmethod
    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return the first block's input: int64 (B, T), positions (B, T) or (T,) -> (B, T, D)."""

    @abstractmethod
    def positioned(self, positions: Tensor) -> Callable[[AttentionFn], AttentionFn]:
        """Add this architecture's positions, int64 (B, T) or (T,), to the blocks' attention."""

    def hidden(self, ids: Tensor) -> Tensor:
        """Return final hidden states: int64 (B, T) -> (B, T, D)."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        dropout = self.shape.dropout if self.training else 0.0
        attend: AttentionFn = partial(causal_attention, dropout=dropout)
        if self.document_end is not None:
            starts = document_starts(ids, self.document_end)  # (B, T)
            positions = positions - starts
            attend = self._attend_within(starts, dropout)
        attend = self.positioned(positions)(attend)
        x = F.dropout(
            self._embedded(ids, positions), self.shape.dropout, self.training
        )  # (B, T, D)
        for block in self.h:
            x = block(x, attend, self._recomputing)
        out: Tensor = self.ln_f(x)
        return out

    def _embedded(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(ids, positions)
        narrow = self.narrow_residual and autocast_dtype(x) == torch.bfloat16
        return x.bfloat16() if narrow else x

    def _recomputing(self, layers: Layers, x: Tensor, attend: AttentionFn) -> Tensor:
        """Compute a block's layers, recomputing activations in the backward pass; gradients are unchanged.

        `selective` recomputes norms, activations, rotations, dropout and casts, but neither attention nor
        linear layers whose outputs the backward pass needs; `full` recomputes everything.
        """
        if self.activation_checkpointing == "none" or not self.training:
            return layers(x, attend)
        contexts: dict[str, Any] = {}
        if self.activation_checkpointing == "selective":
            contexts["context_fn"] = self._selective
        is_random = self.shape.dropout > 0  # dropout must repeat exactly
        again: Tensor = checkpoint(
            layers, x, attend, use_reentrant=False, preserve_rng_state=is_random, **contexts
        )
        return again

    def _attend_within(self, starts: Tensor, dropout: float) -> AttentionFn:
        """Return the attention of all blocks; on a GPU, training uses a fused kernel that supports the model.

        Selective checkpointing saves outputs of single operators, which a compiled kernel hides.
        """
        shape = self.shape
        if (
            self.training
            and starts.is_cuda
            and dropout == 0
            and self.activation_checkpointing != "selective"
            and shape.head_size >= SPARSE_MIN_HEAD_SIZE
            and starts.shape[1] > SPARSE_BLOCK_TOKENS
        ):
            return block_sparse_attention(starts)
        return masked_attention(starts, autocast_dtype(self.wte.weight), dropout)

    def hidden_with_cache(
        self, ids: Tensor, positions: Tensor, attend_by_layer: Sequence[AttentionFn]
    ) -> Tensor:
        """Return final hidden states (B, T, D) where attention also sees cached tokens.

        `ids` are int64 (B, T), `positions` int64 (B, T) or (T,), below seq_len.
        """
        x, positioned = self._embedded(ids, positions), self.positioned(positions)
        for block, attend in zip(self.h, attend_by_layer, strict=True):
            x = block(x, positioned(attend), self._recomputing)
        out: Tensor = self.ln_f(x)
        return out

    def logits(self, ids: Tensor) -> Tensor:
        """Return next-token logits: int64 (B, T) -> (B, T, V)."""
        return F.linear(self.hidden(ids), self.head_weight)

    def forward(self, ids: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Return the cross-entropy in nats per token.

        Args:
            ids: int64 (B, T).
            targets: int64 (B, T); −100 is ignored.
            reduction: `mean` for a scalar, `none` for (B, T).
        """
        return head_loss(self.hidden(ids), self.head_weight, targets, reduction)


def _policy(
    input_sizes: Collection[int], _: Any, operation: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    if operation in _LINEAR_OPERATORS:
        rows = args[-2]
        # Only a block's last linear layer has another input size; nothing else reads its output.
        is_needed = rows.shape[1] in input_sizes
    else:
        is_needed = operation in _ATTENTION_OPERATORS
    return CheckpointPolicy.MUST_SAVE if is_needed else CheckpointPolicy.PREFER_RECOMPUTE
