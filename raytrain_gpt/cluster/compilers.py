"""Check for what `torch.compile` needs: a compiler, Python's headers, a directory that may hold code."""

from __future__ import annotations

import os
import shutil
import sysconfig
import tempfile
from pathlib import Path

from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import ConfigError

_NOEXEC = 8  # os.ST_NOEXEC, which macOS lacks


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
    if not fields:
        return
    needs = f"{' and '.join(f'{name}=true' for name in fields)} needs"
    way_out = f"or set {' and '.join(fields)} to false"
    if missing := missing_compiler(on_gpu):
        raise ConfigError(
            f"{needs} {missing} on {where}; install {'gcc' if on_gpu else 'g++'} and python3-dev, {way_out}"
        )
    cache = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir())
    cache.mkdir(parents=True, exist_ok=True)
    if os.statvfs(cache).f_flag & _NOEXEC:
        raise ConfigError(
            f"{needs} a directory to load compiled code from, but {cache} on {where} is mounted noexec; set "
            f"TMPDIR or TORCHINDUCTOR_CACHE_DIR to another directory, {way_out}"
        )
