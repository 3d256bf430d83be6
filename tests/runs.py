"""The small run that tests are made of, and commands in processes of their own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from raytrain_gpt.config.schema import Config

CLUSTER_CPUS = 6

SMALL = {
    "num_layers": 2,
    "num_heads": 2,
    "embd_size": 32,
    "seq_len": 32,
    "global_batch_tokens": 12 * 32,
    "micro_batch_sequences": 2,
    "max_steps": 50,
    "warmup_steps": 5,
    "peak_lr": 1e-3,
    "min_lr": 1e-4,
    "log_every_steps": 5,
    "checkpoint_every_steps": 10,
    "eval_every_steps": 25,
    "eval_tokens": 4096,
    "num_samples": 1,
    "max_new_tokens": 8,
    "cpus_per_worker": 1,
    "num_workers": 1,
    "min_workers": None,
}
"""A run of seconds: 12 sequences a step, which 1, 2, 3, 4 and 6 workers share."""


MakeConfig = Callable[..., Config]


def flags(config: Config) -> list[str]:
    """The flags that give a configuration."""
    return [
        f"--{name}={'null' if value is None else str(value).lower() if isinstance(value, bool) else value}"
        for name, value in config.field_values().items()
    ]


def command(*argv: str) -> list[str]:
    """A command line of a process of its own."""
    return [sys.executable, "-m", "raytrain_gpt.cli", *argv]


def environment(cluster: str) -> dict[str, str]:
    """Environment of a process that uses the session's cluster."""
    return {**os.environ, "RAY_ADDRESS": cluster, "PYTHONUNBUFFERED": "1"}
