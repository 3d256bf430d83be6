"""Training state of a checkpoint except tensors: the content of `state.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field

from raytrain_gpt.config.load import without_removed
from raytrain_gpt.data.order import BatchRanges, Position
from raytrain_gpt.data.tokenizer import Hash

STATE_VERSION = 6

_Count = Annotated[int, Field(ge=0, lt=2**53)]


@dataclass(frozen=True)
class CheckpointState:
    """The content of `state.json`.

    Attributes:
        next_batch: Global batch that the next update reads.
        order_hash: Rolling hash of the data delivered so far.
        val_loss: Validation loss at this step in nats per token, or None if not evaluated.
        config: The resolved configuration, section -> field -> value.
        num_workers: World size that wrote it.
        skipped_batches: Ranges of global batches skipped after loss spikes.
        loss_scale: fp16 loss scale and steps since it changed, or None for other precisions.
        code_sha256: Hash of the `code.py` next to it, or None for a run with only built-in kinds.
        replaced_code: Hashes of earlier code of the run, each replaced with `--accept_changed_code`.
        numerics_environment: Environment of the sums (see `core.device`), or None in imports and old files.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    step: _Count
    next_batch: _Count
    order_hash: Hash
    val_loss: float | None
    tokens_seen: _Count
    config: Annotated[dict[str, dict[str, Any]], AfterValidator(without_removed)]
    manifest_hash: Hash
    vocab_hash: Hash
    vocab_size: _Count
    order_version: int
    num_workers: _Count
    skipped_batches: BatchRanges = ()
    loss_scale: tuple[float, int] | None = None
    numerics_environment: dict[str, str] | None = None
    code_sha256: Hash | None = None
    replaced_code: tuple[Hash, ...] = ()
    state_version: int = STATE_VERSION

    @property
    def position(self) -> Position:
        """The data position after this step."""
        return Position(self.next_batch, self.order_hash, self.skipped_batches)
