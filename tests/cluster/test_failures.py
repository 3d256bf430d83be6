"""Our errors inside Ray's exceptions, and system errors that a user can fix."""

from __future__ import annotations

import errno
import os

from safetensors import SafetensorError

from raytrain_gpt.cluster.failures import user_error_in
from raytrain_gpt.errors import ClusterError


def test_a_full_disk_is_one_line_however_it_is_told() -> None:
    number = errno.ENOSPC
    system = OSError(number, os.strerror(number), "/runs/x/model.safetensors")
    told_by_rust = SafetensorError(f"I/O error: {os.strerror(number)} (os error {number})")
    for cause in (system, told_by_rust):
        wrapped = RuntimeError("a worker failed")
        wrapped.__cause__ = cause
        found = user_error_in(wrapped)
        assert isinstance(found, ClusterError)
        assert "no space left" in str(found)
        assert "run the same command again" in str(found)
        assert "\n" not in str(found)


def test_another_error_of_the_system_is_not_taken_for_one() -> None:
    assert user_error_in(OSError(errno.EIO, os.strerror(errno.EIO))) is None
