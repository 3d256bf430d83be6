"""Built-in kinds and their settings."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from raytrain_gpt.config.kinds import Kind, Settings, declare
from raytrain_gpt.config.wording import check_divides


class LlamaSettings(Settings):
    """Settings of Llama, Qwen2 and Qwen3: rotary positions, grouped heads, gated MLP."""

    num_kv_heads: int | None = Field(None, ge=1)
    """Key-value heads per block; must divide num_heads; null: num_heads."""
    head_size: int | None = Field(None, ge=2, le=2**16, multiple_of=2)
    """Channels per attention head; null: embd_size / num_heads."""
    mlp_size: int | None = Field(None, ge=1, le=2**24)
    """Hidden channels of the MLP; null: 8/3 of embd_size, rounded to a multiple of 64."""
    tied_embeddings: bool = True
    """Share one matrix between embedding and output head; false: separate weights."""
    rope_theta: float = Field(10_000.0, ge=1)
    """Base of the rotary positions' wavelengths."""
    rope_factor: float = Field(1.0, ge=1)
    """Divisor of the slow rotations, as in Llama 3.1, for contexts beyond rope_context; 1: off."""
    rope_context: int = Field(8192, ge=1, le=2**24)
    """Context, in tokens, of the training before rope_factor; no effect if that is 1."""
    norm_eps: float = Field(1e-6, gt=0)
    """Constant added to the mean square in RMSNorm."""

    def check(self, section: Any) -> None:
        if self.head_size is None and section.embd_size // section.num_heads % 2:
            raise ValueError(
                f"embd_size={section.embd_size} / num_heads={section.num_heads} gives an odd head size, and "
                "rotary positions need an even one; choose another num_heads"
            )
        if self.num_kv_heads is not None:
            check_divides("num_kv_heads", self.num_kv_heads, "num_heads", section.num_heads)


Qwen3Settings = LlamaSettings
"""The name in user code of earlier versions."""


class AdamWSettings(Settings):
    """Settings of AdamW, and of optimizers that use it for some parameters."""

    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay; applied to matrices and embeddings, not to biases and norms."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay rate of AdamW's first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay rate of AdamW's second moment."""


class MuonSettings(AdamWSettings):
    """Settings of Muon."""

    muon_momentum: float = Field(0.95, ge=0, lt=1)
    """Decay rate of the momentum of the blocks' matrices."""
    muon_head_group: int = Field(0, ge=0)
    """Number of heads whose queries, keys or values are orthogonalized as one matrix; 0: all heads."""
    normuon_beta2: float = Field(0.0, ge=0, lt=1)
    """Decay rate of the mean squares that even out the neurons' updates (NorMuon); 0: off."""
    embedding_lr_factor: float = Field(1.0, gt=0)
    """Learning rate of an embedding that is not the head, relative to that of everything else."""


class WsdSettings(Settings):
    """Settings of warmup-stable-decay."""

    decay_fraction: float = Field(0.2, gt=0, le=1)
    """Fraction of max_steps spent on the final linear decay to min_lr."""


class WandbSettings(Settings):
    """Settings of Weights & Biases."""

    wandb_project: str = "raytrain-gpt"
    """Project in Weights & Biases."""
    wandb_entity: str | None = None
    """User or team in Weights & Biases; null: the key's default."""
    wandb_mode: Literal["online", "offline"] = "online"
    """Upload now or later; offline, the fallback without a key, writes files for `wandb sync`."""


class TrackioSettings(Settings):
    """Settings of Trackio."""

    trackio_project: str = "raytrain-gpt"
    """Project in Trackio."""
    trackio_space: str | None = None
    """Hugging Face Space that shows the project; null: keep it on this machine."""


declare(
    (
        Kind("architecture", "gpt2", Settings, "raytrain_gpt.core.gpt2:GPT2"),
        Kind("architecture", "llama", LlamaSettings, "raytrain_gpt.core.llama:Llama"),
        Kind("architecture", "qwen2", LlamaSettings, "raytrain_gpt.core.llama:Qwen2"),
        Kind("architecture", "qwen3", LlamaSettings, "raytrain_gpt.core.llama:Qwen3"),
        Kind("optimizer", "adamw", AdamWSettings, "raytrain_gpt.core.optim:AdamW", True),
        Kind("optimizer", "muon", MuonSettings, "raytrain_gpt.core.muon:Muon", True),
        Kind("schedule", "cosine", Settings, "raytrain_gpt.core.optim:cosine"),
        Kind("schedule", "wsd", WsdSettings, "raytrain_gpt.core.optim:wsd"),
        Kind("schedule", "constant", Settings, "raytrain_gpt.core.optim:constant"),
        Kind("evaluations", "hellaswag", Settings, "raytrain_gpt.evaluate.hellaswag:HELLASWAG"),
        Kind(
            "trackers",
            "tensorboard",
            Settings,
            "raytrain_gpt.trackers.tensorboard_events:TensorBoard",
        ),
        Kind("trackers", "mlflow", Settings, "raytrain_gpt.trackers.mlflow_run:MLflow"),
        Kind("trackers", "ray_metrics", Settings, "raytrain_gpt.runs.ray_metrics:RayMetrics"),
        Kind("trackers", "wandb", WandbSettings, "raytrain_gpt.trackers.wandb_run:Wandb"),
        Kind("trackers", "trackio", TrackioSettings, "raytrain_gpt.trackers.wandb_run:Trackio"),
    )
)
