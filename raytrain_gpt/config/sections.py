"""Sections of the configuration: each field with its type, limits, default and description."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from raytrain_gpt.config.kinds import Selector, Strict
from raytrain_gpt.config.open_section import Name, Names, OpenSection
from raytrain_gpt.config.wording import check_divides

SHAPE_FIELDS = ("architecture", "num_layers", "num_heads", "embd_size")
"""Fields fixed by a checkpoint's weights, in addition to the settings of the architecture."""

AUTO_MEMORY_FIELDS = ("micro_batch_sequences", "activation_checkpointing")
"""Fields whose `auto` the memory fit resolves; a resumed run reuses the result."""

SAFE = "may change on resume"
"""Marker of fields that do not affect the math; a resumed run refuses changes of all others."""

DEFAULT_DATA = "data/stdlib"
"""Dataset that the quickstart prepares if it is missing."""

URL = "may be a URL"
"""Marker of fields that are checked for passwords."""


def _at_least(least: int, value: Any) -> Any:
    if isinstance(value, int) and value < least:
        raise PydanticCustomError("too_few", f"must be {least} or more, or auto")
    return value


CountOrAuto = Annotated[int | Literal["auto"], AfterValidator(partial(_at_least, 1))]


class SafeSection(Strict):
    """Section with only SAFE fields."""


class ModelSection(OpenSection):
    """Architecture and sizes."""

    selectors = ("architecture",)
    architecture: Name = "gpt2"
    """Model family; gpt2, llama (rotary positions, RMSNorm, gated MLP), qwen2 (llama with biases of queries,
    keys and values), qwen3 (llama with norms of queries and keys), or one from --code."""
    num_layers: int = Field(4, ge=1, le=10_000)
    """Number of transformer blocks."""
    num_heads: int = Field(4, ge=1)
    """Attention heads per block; must divide embd_size."""
    embd_size: int = Field(128, ge=1, le=2**20)
    """Width of the embedding and of the residual stream."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Dropout probability during training."""
    init_from: Annotated[str | None, SAFE, URL] = None
    """Checkpoint to initialize weights from, and any model size left unset; null: random weights."""

    @model_validator(mode="after")
    def _is_valid(self) -> ModelSection:
        check_divides("num_heads", self.num_heads, "embd_size", self.embd_size)
        return self


class DataSection(Strict):
    """Training data."""

    data_path: Annotated[str, SAFE, URL] = DEFAULT_DATA
    """Prepared dataset; a directory, s3://bucket/prefix, or a mixture: data/web=0.7,data/code=0.3."""
    seq_len: int = Field(128, ge=1, le=2**24)
    """Context length in tokens."""
    document_mask: bool = False
    """Attend only within documents, with positions restarting at 0; false: attend across documents."""


class OptimSection(OpenSection):
    """Optimizer and learning rate."""

    selectors = ("optimizer", "schedule")
    optimizer: Name = "adamw"
    """Update rule; adamw, muon for block matrices with adamw for everything else, or one from --code."""
    peak_lr: float = Field(1e-3, gt=0)
    """Learning rate after warm-up."""
    min_lr: float = Field(1e-4, ge=0)
    """Learning rate at the end of the schedule; at most peak_lr."""
    warmup_steps: int = Field(50, ge=0)
    """Steps of linear warm-up to peak_lr."""
    schedule: Name = "cosine"
    """Learning rate schedule after warm-up; cosine decay, wsd (warmup-stable-decay), constant, or one from
    --code."""
    grad_clip: float = Field(1.0, gt=0)
    """Global gradient norm to clip to."""

    @model_validator(mode="after")
    def _rates_ordered(self) -> OptimSection:
        schedule = self.registry.find("schedule", self.schedule)
        if self.min_lr > self.peak_lr and schedule is not None and schedule.is_built_in:
            raise ValueError(
                f"min_lr={self.min_lr:g} is above peak_lr={self.peak_lr:g}; "
                f"set min_lr to at most {self.peak_lr:g} (usual: {self.peak_lr / 10:g})"
            )
        return self


class TrainSection(Strict):
    """Steps, batch and arithmetic."""

    max_steps: Annotated[int, SAFE] = Field(300, ge=1)
    """Optimizer steps of the run; raise it to extend a finished run."""
    global_batch_tokens: int = Field(4096, ge=1, le=2**40)
    """Tokens per optimizer step over all workers; a multiple of seq_len."""
    micro_batch_sequences: Annotated[CountOrAuto, SAFE] = 16
    """Sequences per worker and forward pass; lowered to divide the worker's share; auto: as many as fit."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Precision of activations; auto: bf16 where the device has it, else fp32 (TF32 on GPUs)."""
    residual_dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type of the residual stream if precision is bf16; bf16: less memory traffic on GPUs."""
    parallel: Annotated[Literal["ddp", "fsdp"], SAFE] = "ddp"
    """Parallelism; ddp: replicate the model; fsdp: shard weights, gradients and optimizer state."""
    gradient_dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type in which DDP sends gradients between workers; bf16: half the traffic, rounded sums."""
    exact: bool = False
    """Train bit-identical weights on any number of workers, by summing gradients as integers; slower."""
    compile: Annotated[bool, SAFE] = False
    """Compile the model with torch.compile."""
    activation_checkpointing: Annotated[Literal["none", "selective", "full", "auto"], SAFE] = "none"
    """Recompute activations to save memory; selective: cheap ops only; auto: only as much as needed."""
    seed: int = Field(1337, ge=0, lt=2**32)
    """Seed of weights, data order and dropout."""
    log_every_steps: Annotated[int, SAFE] = Field(10, ge=1)
    """Steps between console lines; metrics.jsonl has every step."""
    checkpoint_every_steps: Annotated[int, SAFE] = Field(250, ge=1)
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: Annotated[int, SAFE] = Field(10, ge=1)
    """Newest checkpoints to keep, in addition to the one with the best validation loss."""
    profile_steps: Annotated[int, SAFE] = Field(0, ge=0, le=10)
    """Steps to profile on rank 0 after warm-up; 0: off."""

    @model_validator(mode="after")
    def _exclusive(self) -> TrainSection:
        sharded = "parallel=fsdp" if self.parallel == "fsdp" else None
        exact = "exact=true" if self.exact else None
        for other, name, value, instead in (
            (exact, "parallel", "fsdp", "ddp"),
            (exact, "precision", "fp16", "bf16 or fp32"),
            (exact, "micro_batch_sequences", "auto", "a number"),
            (exact, "gradient_dtype", "bf16", "fp32"),
            (sharded, "gradient_dtype", "bf16", "fp32"),
        ):
            if other and getattr(self, name) == value:
                raise ValueError(
                    f"{other} and {name}={value} are mutually exclusive; set {name} to {instead}"
                )
        return self


class SpikesSection(SafeSection):
    """Steps with a loss or gradient norm that is not finite, or far above earlier ones."""

    spike_detection: bool = True
    """Detect loss spikes and roll back; false: only skip updates that are not finite."""
    spike_zscore: float = Field(6.0, gt=0)
    """Standard deviations above the rolling mean at which a loss or gradient norm counts as a spike."""
    spike_window_steps: int = Field(128, ge=8)
    """Steps in the rolling mean and standard deviation."""
    spike_patience: int = Field(10, ge=1)
    """Consecutive steps with a bad loss before the run rolls back to an earlier checkpoint."""
    skip_before: int = Field(5, ge=0)
    """Global batches to skip before the first bad one, in addition to the bad ones."""


class EvalSection(SafeSection, OpenSection):
    """Validation loss, HellaSwag, other evaluations and samples during training."""

    selectors = ("evaluations",)

    eval_every_steps: int = Field(250, ge=1)
    """Steps between evaluations; the last step is always evaluated."""
    eval_tokens: int = Field(10_485_760, ge=1)
    """Maximum number of validation tokens per evaluation; always the first of the val split."""
    hellaswag_path: Annotated[str | None, URL] = None
    """HellaSwag .jsonl file to score at each evaluation; download: fetch the public file; null: off."""
    evaluations: Names = ()
    """Comma-separated evaluations from --code."""
    sample_prompt: str = "Hello, I am a language model,"
    """Prompt of the samples at each evaluation."""
    num_samples: int = Field(5, ge=0)
    """Samples per evaluation; 0: none."""
    max_new_tokens: int = Field(32, ge=1)
    """Tokens generated per sample."""
    top_k: int = Field(50, ge=1)
    """Number of most likely tokens to sample from."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature; 0: the most likely token."""

    def chosen_names(self) -> list[tuple[Selector, str]]:
        """Return (selector, name) of each evaluation; `hellaswag_path` chooses HellaSwag."""
        built_in: list[tuple[Selector, str]] = [("evaluations", "hellaswag")]
        return built_in * (self.hellaswag_path is not None) + super().chosen_names()

    @model_validator(mode="after")
    def _hellaswag_by_its_path(self) -> EvalSection:
        if "hellaswag" in self.evaluations:
            raise ValueError("evaluations cannot name hellaswag; set hellaswag_path instead")
        return self


class ClusterSection(SafeSection):
    """Workers and resources."""

    num_workers: Annotated[int | Literal["auto"], AfterValidator(partial(_at_least, 0))] = "auto"
    """Training processes; auto: one per GPU, or 1 without GPUs; 0: local mode, without Ray."""
    min_workers: int | None = Field(None, ge=1)
    """Minimum number of workers to keep training with when nodes disappear; null: num_workers."""
    resize_after_s: float = Field(60.0, ge=0)
    """Seconds for which more capacity must be available before scaling up."""
    use_gpu: bool | Literal["auto"] = "auto"
    """Train on GPUs; auto: if the cluster has any."""
    gpus_per_worker: float = Field(1.0, gt=0, le=1)
    """GPUs per worker; below 1, for one worker only: share a GPU and its memory with other jobs."""
    cpus_per_worker: CountOrAuto = "auto"
    """CPUs and torch threads per worker; auto: this machine's cores divided, or 1 on an existing cluster."""
    max_failures: int = Field(3, ge=0)
    """Consecutive restarts without progress before the run fails."""
    max_preemptions: int | None = Field(None, ge=0)
    """Restarts after preemption before the run fails, not counted by max_failures; null: no limit."""
    hang_timeout_s: float | None = Field(480.0, gt=0)
    """Seconds without progress of a rank after which the workers restart; null: never."""

    @property
    def torch_timeout_s(self) -> float:
        """Longest wait in a torch collective: the driver first sees which rank the others wait for."""
        return 30 * 86400.0 if self.hang_timeout_s is None else self.hang_timeout_s + 120

    @property
    def workers(self) -> int:
        """`num_workers`, once it is resolved."""
        assert self.num_workers != "auto"
        return self.num_workers

    @property
    def num_cpus(self) -> int:
        """CPUs per worker, once they are resolved."""
        assert self.cpus_per_worker != "auto"
        return self.cpus_per_worker

    @property
    def num_gpus(self) -> float:
        """GPUs per worker, at most 1; 0 on CPUs. Without a cluster, `use_gpu: auto` counts as true."""
        return 0.0 if self.use_gpu is False else self.gpus_per_worker

    @property
    def least_workers(self) -> int:
        """Minimum number of workers to keep training with."""
        return self.min_workers or self.workers

    @property
    def is_local(self) -> bool:
        """Whether the run trains in the command's process (or `torchrun`'s), without Ray."""
        return self.num_workers == 0

    @model_validator(mode="after")
    def _counts(self) -> ClusterSection:
        if self.gpus_per_worker < 1 and self.num_workers not in ("auto", 0, 1):
            raise ValueError(
                f"gpus_per_worker={self.gpus_per_worker:g} does not apply to num_workers="
                f"{self.num_workers}: NCCL needs one GPU per worker; set num_workers to 1"
            )
        if self.num_workers != "auto" and 0 < self.num_workers < (self.min_workers or 0):
            raise ValueError(
                f"min_workers={self.min_workers} is above num_workers={self.num_workers}; "
                f"set min_workers to at most {self.num_workers}"
            )
        return self


class RunSection(SafeSection):
    """Run name and storage location."""

    run_name: Name = Field("quickstart", max_length=200)
    """Name of the run and of its directory in storage_path; the same name resumes it."""
    storage_path: Annotated[str, URL] = "runs"
    """Directory of all runs, shared by all nodes, or s3://bucket/prefix."""
    branch_from: Annotated[str | None, URL] = None
    """Checkpoint to branch from (RUN@STEP or path), with optimizer state and data position; null: off."""
    resume: Literal["auto", "never"] = "auto"
    """Resume an existing run; auto: from the newest good checkpoint; never: fail if it has a checkpoint."""
    retry_for_s: float = Field(300.0, ge=0)
    """Seconds to retry an unreachable object store before the run stops."""
    s3_endpoint: Annotated[str | None, URL] = None
    """Endpoint URL of an S3-compatible store; null: AWS_ENDPOINT_URL, or Amazon S3."""


class TrackingSection(SafeSection, OpenSection):
    """Trackers."""

    selectors = ("trackers",)
    trackers: Names = ()
    """Comma-separated trackers besides MLflow and TensorBoard: wandb, trackio, or names from --code."""

    mlflow_uri: Annotated[str | None, URL] = "auto"
    """MLflow tracking URI; auto: mlflow.db (SQLite) in storage_path; null: off."""
    experiment: str = "raytrain-gpt"
    """Name of the MLflow experiment."""
    tensorboard: bool = True
    """Write TensorBoard event files in the run's directory."""
    ray_metrics: bool = True
    """Export metrics on the Prometheus endpoint of a Ray cluster that the command joins."""
