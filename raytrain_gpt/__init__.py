"""Pretrain GPT-2-class language models on Ray, from raw text to a trained model.

In a notebook: `from raytrain_gpt import train`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from raytrain_gpt.version import VERSION

if TYPE_CHECKING:
    from raytrain_gpt.notebook import TrainedRun as TrainedRun
    from raytrain_gpt.notebook import batch_at as batch_at
    from raytrain_gpt.notebook import replay as replay
    from raytrain_gpt.notebook import train as train

# Set before torch is loaded, here and in Ray's workers. While they wait, GNU OpenMP's threads spin for
# milliseconds, which costs more than it saves next to busy processes (docs/notebook/decisions.md).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# The package needs version 2 of Ray Train, whose modules read this when they are imported.
os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
# Under `uv run`, Ray would start its workers by `uv run` too, each in an environment of its own.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
# Launchers may leave them empty; Ray takes any value for a rank.
for _name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    if os.environ.get(_name) == "":
        del os.environ[_name]

__version__ = VERSION
__all__ = ["TrainedRun", "__version__", "batch_at", "replay", "train"]


def __getattr__(name: str) -> Any:
    """Import `train` and others on first use: Ray's tasks import this package without needing them."""
    if name in __all__:
        from raytrain_gpt import notebook

        return getattr(notebook, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
