"""Find this package's errors inside Ray's exceptions."""

from __future__ import annotations

import re
from collections.abc import Iterator

from raytrain_gpt import errors
from raytrain_gpt.errors import ClusterError, RaytrainGptError
from raytrain_gpt.redact import redacted

_DISK_FULL = re.compile(r"No space left on device|os error 28", re.IGNORECASE)
_IN_TRACEBACK = re.compile(r"^raytrain_gpt\.errors\.(\w+): (.+)$", re.MULTILINE)


def user_error_in(error: BaseException) -> RaytrainGptError | None:
    """Return the first error of this package in an exception's chain, or None."""
    for cause in _causes(error):
        if type(cause).__module__ == errors.__name__ and isinstance(cause, RaytrainGptError):
            return cause
        # Ray Data drops the cause when it sends an exception to the driver; only its traceback remains.
        for name, message in _IN_TRACEBACK.findall(str(cause)):
            kind = getattr(errors, name, None)
            if isinstance(kind, type) and issubclass(kind, RaytrainGptError):
                return kind(message)
    if any(_DISK_FULL.search(str(cause)) for cause in _causes(error)):
        return ClusterError(
            f"no space left on a disk that the run writes to ({root_cause(error)}); older checkpoints "
            "are intact: make room and run the same command again"
        )
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device had too little memory for an exception's cause."""
    names = [type(cause).__name__ for cause in _causes(error)]
    texts = [str(cause) for cause in _causes(error)]
    return "OutOfMemoryError" in names or any("torch.OutOfMemoryError" in text for text in texts)


def root_cause(error: BaseException) -> str:
    """Return the last line of the innermost exception's message, with secrets redacted."""
    *_, innermost = _causes(error)
    lines = redacted(str(innermost)).strip().splitlines()
    return f"{type(innermost).__name__}: {lines[-1].strip()}" if lines else type(innermost).__name__


def _causes(error: BaseException) -> Iterator[BaseException]:
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
