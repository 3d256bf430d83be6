"""Find this package's errors inside Ray's exceptions."""

from __future__ import annotations

import re
from collections.abc import Iterator

from raytrain_gpt import errors
from raytrain_gpt.errors import ClusterError, RaytrainGptError, is_full
from raytrain_gpt.redact import redacted

_NO_MEMORY = re.compile(r"(?i)torch.OutOfMemoryError|CUDA.*out of memory|STATUS_ALLOC_FAILED")
"""Of torch; of CUDA, NCCL and Triton; of cuBLAS and cuDNN."""
_CAUSE_IS_LAST = re.compile(r"^ +File \"|^The actor |^Last error:\n\S", re.MULTILINE)
"""In tracebacks, in Ray's messages about dead actors, and in NCCL's."""
_IN_TRACEBACK = re.compile(r"^raytrain_gpt\.errors\.(\w+): (.+)$", re.MULTILINE)


def user_error_in(error: BaseException) -> RaytrainGptError | None:
    """Return the first error of this package in an exception's chain, or None."""
    for cause in causes(error):
        if type(cause).__module__ == errors.__name__ and isinstance(cause, RaytrainGptError):
            return cause
        # Ray Data drops the cause when it sends an exception to the driver; only its traceback remains.
        for name, message in _IN_TRACEBACK.findall(str(cause)):
            kind = getattr(errors, name, None)
            if isinstance(kind, type) and issubclass(kind, RaytrainGptError):
                return kind(message)
    if any(map(is_full, causes(error))):
        return ClusterError(
            f"no space left on a disk that the run writes to ({root_cause(error)}); older checkpoints "
            "are intact: make room and run the same command again"
        )
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device had too little memory for an exception's cause."""
    return any(
        type(cause).__name__ == "OutOfMemoryError" or _NO_MEMORY.search(str(cause))
        for cause in causes(error)
    )


def root_cause(error: BaseException) -> str:
    """Return the line of the innermost exception's message with the cause, with secrets redacted.

    It is the first unless _CAUSE_IS_LAST, as CUDA, Ray Train and others add advice below it.
    """
    *_, innermost = causes(error)
    text = redacted(str(innermost))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    goes_on = bool(lines) and lines[0].endswith(":")
    shown = lines[-1:] if _CAUSE_IS_LAST.search(text) else lines[: 1 + goes_on]
    return " ".join([f"{type(innermost).__name__}:", *shown]).removesuffix(":")


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and its causes, also through Ray's wrappers."""
    seen: set[int] = set()
    waiting: list[object] = [error]
    while waiting:
        current = waiting.pop(0)
        if not isinstance(current, BaseException) or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        # RayTaskError keeps the original in `cause`, Ray Train in `worker_failures` by rank.
        waiting += [getattr(current, "cause", None), current.__cause__, current.__context__]
        waiting += list(getattr(current, "worker_failures", {}).values())
        waiting.append(getattr(current, "controller_failure", None))
        waiting.append(getattr(current, "health_check_failure", None))
