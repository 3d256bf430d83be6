"""Check for the compiler and Python headers that `torch.compile` needs for Triton's driver or CPU kernels."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import ConfigError


def missing_compiler(on_gpu: bool) -> str:
    """Name the missing compiler or headers, or return an empty string."""
    variable, names = ("CC", ("gcc", "clang")) if on_gpu else ("CXX", ("g++", "clang++"))
    if not os.environ.get(variable) and not any(map(shutil.which, names)):
        return "a C compiler" if on_gpu else "a C++ compiler"
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    return "" if headers.exists() else f"Python's headers ({headers})"


def check_compiler(config: Config, on_gpu: bool, where: str) -> None:
    """Raise ConfigError if this machine (`where` in the message) cannot compile what `config` needs."""
    # On GPUs, document masks also compile a kernel.
    has_kernel = on_gpu and not config.model.dropout
    has_kernel &= config.train.activation_checkpointing != "selective"
    names = ("compile", "document_mask") if has_kernel else ("compile",)
    fields = [name for name in names if config.field_values()[name]]
    missing = missing_compiler(on_gpu) if fields else ""
    if missing:
        raise ConfigError(
            f"{' and '.join(f'{name}=true' for name in fields)} needs {missing} on {where}; install "
            f"{'gcc' if on_gpu else 'g++'} and python3-dev, or set {' and '.join(fields)} to false"
        )
