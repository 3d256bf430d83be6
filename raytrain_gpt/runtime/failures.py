"""Find the user's error inside what Ray raises."""

from __future__ import annotations

from collections.abc import Iterator

from raytrain_gpt.errors import UserError


def causes(error: BaseException) -> Iterator[BaseException]:
    """An exception and everything it was raised from, through Ray's wrappers too."""
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


def user_error_in(error: BaseException) -> UserError | None:
    """The first of our user errors inside an exception, as it was raised, or None."""
    for cause in causes(error):
        # Ray derives a class from RayTaskError and the cause's; the cause itself has the clean text.
        if isinstance(cause, UserError) and not hasattr(cause, "as_instanceof_cause"):
            return cause
    return None
