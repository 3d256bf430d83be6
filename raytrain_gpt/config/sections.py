"""The sections of a configuration: every field with its type, limits, default and what it means."""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from raytrain_gpt.config.batch import divisors, nearest

STEPS_BEFORE_PROFILE = 5
"""Steps after a start that `profile_steps` leaves out: they compile, fill caches and warm up."""

QWEN3_FIELDS = ("num_kv_heads", "mlp_size", "tied_embeddings", "rope_theta")
"""Fields that `gpt2` does not have."""

SHAPE_FIELDS = ("architecture", "num_layers", "num_heads", "embd_size", *QWEN3_FIELDS)
"""What a checkpoint's weights fix."""

AUTO_MEMORY_FIELDS = ("micro_batch_sequences", "activation_checkpointing")
"""Whose `auto` is decided by what fits in memory, and kept when a run goes on."""

SAFE = "may change when a run goes on"
"""Marks a field that does not change the maths; every other one is refused on resume."""


class Strict(BaseModel):
    """Immutable, without unknown fields, infinities and NaNs; the text below a field describes it."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*")
    @classmethod
    def _in_64_bits(cls, value: Any, info: ValidationInfo) -> Any:
        # Seeds are hashed, so they may have any size where their field does not limit them.
        if isinstance(value, int) and abs(value) >= 2**63 and info.field_name != "seed":
            raise PydanticCustomError("64_bits", "must be less than 2**63")
        return value


def _at_least(least: int, value: Any) -> Any:
    if isinstance(value, int) and value < least:
        raise PydanticCustomError("too_few", f"must be {least} or more, or auto")
    return value


CountOrAuto = Annotated[int | Literal["auto"], AfterValidator(partial(_at_least, 1))]


def _is_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._=-]*", value):
        raise PydanticCustomError(
            "name",
            "must start with a letter or digit, and contain only letters, digits and . _ = -",
        )
    return value


Name = Annotated[str, AfterValidator(_is_name)]
"""A directory's name that needs no quotes in a shell or URL."""


class SafeSection(Strict):
    """A section all of whose fields are SAFE."""


def _check_divides(name: str, value: int, whole: str, number: int) -> None:
    if number % value:
        raise ValueError(
            f"{name}={value} does not divide {whole}={number}; "
            f"nearest: {name} {nearest(divisors(number), value)}"
        )


class ModelSection(Strict):
    """The architecture and its sizes."""

    architecture: Literal["gpt2", "qwen3"] = "gpt2"
    """gpt2, or the modern qwen3: rotary positions, RMSNorm, gated MLP, no biases."""
    num_layers: int = Field(4, ge=1, le=10_000)
    """Number of transformer blocks."""
    num_heads: int = Field(4, ge=1)
    """Attention heads per block; must divide embd_size."""
    embd_size: int = Field(128, ge=1, le=2**20)
    """Width of the embedding and of the residual stream."""
    num_kv_heads: int | None = Field(None, ge=1)
    """Heads of keys and values; must divide num_heads; null: num_heads (qwen3 only)."""
    mlp_size: int | None = Field(None, ge=1, le=2**24)
    """Channels inside the MLP; null: 8/3 of embd_size, to a multiple of 64 (qwen3 only)."""
    tied_embeddings: bool = True
    """Use the embedding as head; false: the head has weights of its own (qwen3 only)."""
    rope_theta: float = Field(10_000.0, ge=1)
    """Base of the rotary positions' wavelengths (qwen3 only)."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Dropout probability during training."""
    init_from: Annotated[str | None, SAFE] = None
    """Checkpoint or run whose weights, and sizes unless set, a new run starts from; null: random weights."""

    @model_validator(mode="after")
    def _is_possible(self) -> ModelSection:
        _check_divides("num_heads", self.num_heads, "embd_size", self.embd_size)
        if self.architecture == "gpt2":
            for name in QWEN3_FIELDS:
                default = type(self).model_fields[name].default
                if (value := getattr(self, name)) != default:
                    raise ValueError(
                        f"{name}={value} does not go with architecture=gpt2; set architecture to qwen3, or "
                        f"{name} to {'null' if default is None else default}"
                    )
        elif self.embd_size // self.num_heads % 2:
            raise ValueError(
                f"embd_size={self.embd_size} in num_heads={self.num_heads} is an odd number of channels a "
                "head, which rotary positions turn in pairs; set num_heads to one that leaves an even number"
            )
        if self.num_kv_heads is not None:
            _check_divides("num_kv_heads", self.num_kv_heads, "num_heads", self.num_heads)
        return self


class DataSection(Strict):
    """What is trained on."""

    data_path: Annotated[str, SAFE] = "data/stdlib"
    """Prepared dataset: a directory or s3://bucket/prefix; a weighted mixture: data/web=0.7,data/code=0.3."""
    seq_len: int = Field(128, ge=1, le=2**24)
    """Context length in tokens."""
    data_cache_gb: Annotated[float, SAFE] = Field(0.0, ge=0)
    """Disk cache on every node for datasets read from object storage (GB); 0: off."""
    document_mask: bool = False
    """Keep attention within each document and restart positions at 0; false: attend across documents."""


class OptimSection(Strict):
    """The optimizer and its learning rate."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon for the matrices of the blocks and adamw for the rest, at the same peak_lr."""
    peak_lr: float = Field(1e-3, gt=0)
    """Learning rate after warm-up."""
    min_lr: float = Field(1e-4, ge=0)
    """Learning rate at the end of the schedule; at most peak_lr."""
    warmup_steps: int = Field(50, ge=0)
    """Steps of linear warm-up to peak_lr."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """Learning rate after warm-up: cosine decay, wsd (warmup-stable-decay) or constant."""
    decay_fraction: float = Field(0.2, gt=0, le=1)
    """Final share of max_steps that wsd spends decaying linearly to min_lr."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay of matrices and embeddings; biases and norms are not decayed."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay rate of AdamW's first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay rate of AdamW's second moment."""
    grad_clip: float = Field(1.0, gt=0)
    """Clip gradients to this global norm."""

    @model_validator(mode="after")
    def _rates_ordered(self) -> OptimSection:
        if self.min_lr > self.peak_lr:
            raise ValueError(
                f"min_lr={self.min_lr:g} is above peak_lr={self.peak_lr:g}; "
                f"set min_lr to at most {self.peak_lr:g} (usual: {self.peak_lr / 10:g})"
            )
        return self


class TrainSection(Strict):
    """Steps, batch and arithmetic."""

    max_steps: Annotated[int, SAFE] = Field(300, ge=1)
    """Optimizer steps of the whole run; raise it to extend a finished run."""
    global_batch_tokens: int = Field(4096, ge=1, le=2**40)
    """Tokens per optimizer step over all workers; a multiple of seq_len."""
    micro_batch_sequences: Annotated[CountOrAuto, SAFE] = 16
    """Sequences per worker in a forward pass; fewer if its share needs it; auto: as many as fit in memory."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """auto: bf16 on GPUs and CPUs that have it, else fp32 (TF32 on GPUs); fp16 uses loss scaling."""
    parallel: Annotated[Literal["ddp", "fsdp"], SAFE] = "ddp"
    """ddp: a copy of the model on every worker; fsdp: weights, gradients and optimizer state are sharded."""
    exact: bool = False
    """Weights the same to the last bit at any number of workers: gradients are added up as integers."""
    compile: Annotated[bool, SAFE] = False
    """Compile the model with torch.compile."""
    activation_checkpointing: Annotated[Literal["none", "selective", "full", "auto"], SAFE] = "none"
    """Recompute activations to save memory; selective: only cheap ones; auto: only what does not fit."""
    seed: int = Field(1337, ge=0, lt=2**32)
    """Seed for weights, data order and dropout."""
    log_every_steps: Annotated[int, SAFE] = Field(10, ge=1)
    """Steps between console lines; metrics.jsonl always has every step."""
    checkpoint_every_steps: Annotated[int, SAFE] = Field(250, ge=1)
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: Annotated[int, SAFE] = Field(10, ge=1)
    """Number of newest checkpoints to keep, in addition to the one with the best validation loss."""
    profile_steps: Annotated[int, SAFE] = Field(0, ge=0, le=10)
    """Steps to profile on rank 0 after warm-up; 0: off."""

    @model_validator(mode="after")
    def _can_be_exact(self) -> TrainSection:
        for name, value, instead in (
            ("parallel", "fsdp", "ddp"),
            ("precision", "fp16", "bf16 or fp32"),
            ("micro_batch_sequences", "auto", "a number, which decides the sums"),
        ):
            if self.exact and getattr(self, name) == value:
                raise ValueError(
                    f"exact=true does not go with {name}={value}; set {name} to {instead}"
                )
        return self

    @model_validator(mode="after")
    def _profile_within_the_run(self) -> TrainSection:
        at_most = max(self.max_steps - STEPS_BEFORE_PROFILE, 0)
        if self.profile_steps > at_most:
            raise ValueError(
                f"profile_steps={self.profile_steps} after the first {STEPS_BEFORE_PROFILE} steps is "
                f"beyond max_steps={self.max_steps}; set profile_steps to at most {at_most}, or "
                f"max_steps to {self.profile_steps + STEPS_BEFORE_PROFILE} or more"
            )
        return self


class SpikesSection(SafeSection):
    """Bad steps: a loss or gradient norm that is not finite or far above those before."""

    spike_detection: bool = True
    """Detect loss spikes and roll back to before them; false: only skip updates that are not finite."""
    spike_zscore: float = Field(6.0, gt=0)
    """Standard deviations above the rolling mean at which a loss or gradient norm counts as a spike."""
    spike_window_steps: int = Field(128, ge=8)
    """Steps in the rolling mean and standard deviation."""
    spike_patience: int = Field(10, ge=1)
    """Consecutive steps with a bad loss before the run rolls back to an earlier checkpoint."""
    skip_before: int = Field(5, ge=0)
    """Global batches to skip before the first bad one, in addition to the bad ones."""


class EvalSection(SafeSection):
    """Validation loss, HellaSwag and samples during training."""

    eval_every_steps: int = Field(250, ge=1)
    """Steps between evaluations; the last step is always evaluated."""
    eval_tokens: int = Field(10_485_760, ge=1)
    """Validation tokens per evaluation at most; always the first ones of the val split."""
    eval_mode: Literal["inline", "async"] = "inline"
    """inline: training waits for each evaluation; async: a separate Ray task evaluates the checkpoints."""
    hellaswag_path: str | None = None
    """HellaSwag .jsonl file to score at every evaluation; download: fetch the public file; null: off."""
    sample_prompt: str = "Hello, I am a language model,"
    """Prompt of the samples drawn at every evaluation."""
    num_samples: int = Field(5, ge=0)
    """Samples per evaluation; 0: none."""
    max_new_tokens: int = Field(32, ge=1)
    """Tokens generated per sample."""
    top_k: int = Field(50, ge=1)
    """Sample from the k most likely tokens."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature; 0: always the most likely token."""


class ClusterSection(SafeSection):
    """What the run asks of Ray."""

    num_workers: Annotated[int | Literal["auto"], AfterValidator(partial(_at_least, 0))] = "auto"
    """Training processes, one per GPU; auto: one for each GPU, or 1 without; 0: local mode, without Ray."""
    min_workers: int | None = Field(None, ge=1)
    """Continue with as few workers as this while the cluster has no more; null: num_workers."""
    resize_after_s: float = Field(60.0, ge=0)
    """Scale up after more capacity has been available this long (seconds)."""
    use_gpu: bool | Literal["auto"] = "auto"
    """Train on GPUs; auto: if the cluster has any."""
    gpus_per_worker: float = Field(1.0, gt=0, le=1)
    """GPUs per worker; below 1 only with one worker, so that trials can share a GPU."""
    cpus_per_worker: CountOrAuto = "auto"
    """CPUs and torch threads per worker; auto: a share of this machine's cores (1 on a given cluster)."""
    max_failures: int = Field(3, ge=0)
    """Restarts in a row without progress before the run gives up."""
    max_preemptions: int | None = Field(None, ge=0)
    """Restarts after preemption before the run gives up; not counted by max_failures; null: no limit."""
    hang_timeout_s: float | None = Field(1800.0, gt=0)
    """Restart when a rank has made no progress for this long (seconds); null: never."""

    @model_validator(mode="after")
    def _counts(self) -> ClusterSection:
        if self.gpus_per_worker < 1 and self.num_workers not in ("auto", 1):
            raise ValueError(
                f"gpus_per_worker={self.gpus_per_worker:g} does not go with num_workers="
                f"{self.num_workers}: workers on one GPU cannot reduce gradients, and local mode has a whole "
                "one; set num_workers to 1"
            )
        if self.num_workers == 0 and self.min_workers is not None:
            raise ValueError(
                f"min_workers={self.min_workers} needs workers of Ray, num_workers=0 has none; set "
                "min_workers to null, or num_workers to 1 or more"
            )
        if isinstance(self.num_workers, int) and (self.min_workers or 0) > self.num_workers:
            raise ValueError(
                f"min_workers={self.min_workers} is above num_workers={self.num_workers}; "
                f"set min_workers to at most {self.num_workers}"
            )
        return self


class RunSection(SafeSection):
    """Name and place of the run."""

    run_name: Name = Field("quickstart", max_length=200)
    """Directory of the run below storage_path; the same name resumes the run."""
    storage_path: str = "runs"
    """Directory of all runs, shared by all nodes, or s3://bucket/prefix."""
    branch_from: str | None = None
    """Checkpoint of another run, RUN@STEP or its directory, that a new run goes on from; null: none."""
    resume: Literal["auto", "never"] = "auto"
    """auto: continue from the newest good checkpoint; never: fail if the run already has one."""
    retry_for_s: float = Field(300.0, ge=0)
    """Retry an unreachable object store for this long before the run stops (seconds)."""
    s3_endpoint: str | None = None
    """Endpoint URL of an S3-compatible store; null: AWS_ENDPOINT_URL, else Amazon S3."""


class TrackingSection(SafeSection):
    """Where curves go besides the run's own files."""

    mlflow_uri: str | None = "auto"
    """MLflow tracking URI; auto: mlflow.db (SQLite) in storage_path; null: off."""
    experiment: str = "raytrain-gpt"
    """Name of the MLflow experiment."""
    tensorboard: bool = True
    """Write TensorBoard event files to the run's directory."""
