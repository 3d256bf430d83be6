"""Your own architecture, optimizer, schedule, evaluation or tracker, in one file given as `--code FILE`.

    from raytrain_gpt.extend import Field, Settings, optimizer

    class LionSettings(Settings):
        lion_beta: float = Field(0.99, gt=0, lt=1)

    @optimizer("lion", LionSettings)
    def lion(parameters, settings, peak_lr):
        return Lion(parameters, peak_lr, settings.lion_beta)

Each decorator registers a name and returns what it decorates. The settings class is optional; its fields are
flags, configuration keys and sweep keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import Field

from raytrain_gpt.config.built_in import AdamWSettings, LlamaSettings, Qwen3Settings
from raytrain_gpt.config.kinds import Kind, Selector, Settings, register
from raytrain_gpt.errors import ConfigError

if TYPE_CHECKING:
    from raytrain_gpt.core.model import GPT, Block, GPTShape

__all__ = [
    "GPT", "AdamWSettings", "Block", "Field", "GPTShape", "LlamaSettings", "Qwen3Settings", "Settings",
    "architecture", "evaluation", "optimizer", "schedule", "tracker",
]  # fmt: skip

_MODEL = {"GPT", "Block", "GPTShape"}
T = TypeVar("T")


def __getattr__(name: str) -> Any:
    """Import the model's classes on first use: a tracker's process works without torch."""
    if name in _MODEL:
        from raytrain_gpt.core import model

        return getattr(model, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def architecture(name: str, settings: type[Settings] = Settings) -> Callable[[T], T]:
    """Register a subclass of `GPT` with `make_layers`, `init_weights`, `embed` and `positioned`.

    `shape.settings` has the settings. Blocks receive `attend`, the only way in which tokens may mix; blocks
    may differ and share parameters. Buffers must be constants, since a checkpoint has only parameters.

    Optional attributes and methods of the class:
        head_weight: Property, the weight (V, D) of the head if it is not `wte.weight`.
        resolved(shape): Class method, the shape with placeholder settings, such as None, replaced.
        fused_projections: Name of a weight in a block -> projections fused in its rows, for Muon.
        head_projections: Names of the weights in a block whose rows are attention heads, for Muon.

    For `export`, constants and static methods:
        config_of(shape): Content of transformers' `config.json`, without `bos_token_id` and the like.
        to_hf(name, tensor): Name and tensor in transformers of the parameter `name`, such as `wte.weight`.
        DESCRIPTION: Noun phrase for the model card.
        GGUF_NAME: Name of the architecture in llama.cpp, by default its own.
        add_gguf_sizes(writer, shape): Add sizes to gguf's `GGUFWriter` that not all architectures have.
        to_gguf(name, tensor, shape): Tensor in llama.cpp's layout, by default unchanged.
    """
    return _registered("architecture", name, settings)


def optimizer(
    name: str, settings: type[Settings] = Settings, elementwise: bool = False
) -> Callable[[T], T]:
    """Register a function `(parameters, settings, peak_lr)` that makes a `torch.optim.Optimizer`.

    The parameters are on their device. An `elementwise` optimizer also works with `parallel: fsdp`.
    """
    return _registered("optimizer", name, settings, elementwise)


def schedule(name: str, settings: type[Settings] = Settings) -> Callable[[T], T]:
    """Register a function `(step, max_steps, settings)` that returns a factor of peak_lr.

    It is the factor after `step` updates, and is used after the linear warm-up.
    """
    return _registered("schedule", name, settings)


def evaluation(name: str, settings: type[Settings] = Settings) -> Callable[[T], T]:
    """Register a function `(model, tokenizer, rank, world_size, settings)`, called on every rank.

    It evaluates this rank's share of the examples and returns name -> (sum, count), with the same names on
    all ranks. The row's `evaluation/name` is the sum of all ranks divided by their count, or null if that is
    not finite. A long evaluation instead yields such a dict for each batch; they are added up.

    The model is unwrapped, in eval mode, under no_grad and autocast. `model.logits(ids)` is (B, T, V),
    V padded beyond `tokenizer.n_vocab`; `model(ids, targets, reduction="none")` is (B, T) in nats, 0 at
    targets of -100. ids and targets are int64 (B, T) on `model.device`, T at most `model.shape.seq_len`.
    Python's, NumPy's and torch's generators have the same seed on all ranks and in every evaluation.
    """
    return _registered("evaluations", name, settings)


def tracker(name: str, settings: type[Settings] = Settings) -> Callable[[T], T]:
    """Register a class that receives one attempt's rows, texts and files, in a thread of its own.

    Any call may be slow or raise. `text` and `finish` are optional, as is the attribute
    `is_new`: true if its store has no rows (any more), so that all are sent.

    Methods of the class:
        __init__(run, settings): `run` is a `trackers.tracked_run.TrackedRun`.
        rows(rows): Receive rows that earlier attempts could not deliver, and this attempt's. Steps from
          `run.first_step` on may already be there from a killed attempt, and are sent again after a
          rollback. After an error, the same rows are sent again.
        text(step, name, text): Receive samples.
        finish(end, files): End the attempt; `end` is `finished`, `failed` or `interrupted`, and the files,
          paths, may be shown with it.
    """
    return _registered("trackers", name, settings)


def _registered(
    selector: Selector, name: str, settings: type[Settings], elementwise: bool = False
) -> Callable[[T], T]:
    if not isinstance(name, str):
        word = selector.removesuffix("s")
        raise ConfigError(
            f"@{word} of {name.__name__} has no name; write @{word}({name.__name__!r})"
        )

    def decorate(implementation: T) -> T:
        register(Kind(selector, name, settings, implementation, elementwise))
        return implementation

    return decorate
