"""Our errors inside Ray's exceptions, and system errors that a user can fix."""

from __future__ import annotations

import errno
import os

import pytest
import torch
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError, RayTaskError
from ray.train.v2._internal.exceptions import (
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
)
from safetensors import SafetensorError

from raytrain_gpt.cluster.failures import is_out_of_memory, root_cause, user_error_in
from raytrain_gpt.errors import ClusterError


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_one_line_however_it_is_told(number: int) -> None:
    """The system's quota and its limit of file sizes count too."""
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


CUDA = """CUDA error: {}
CUDA kernel errors might be asynchronously reported at some other API call.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
For more detailed error information, run with CUDA_LOG_FILE=stderr
"""
NCCL = """NCCL error in: NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO for details)
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
{}"""
TRACEBACK = """ray::f() (pid=7, ip=10.0.0.1)
  File "a.py", line 1, in f
ValueError: wrong shape"""


def dead_actor() -> ActorDiedError:
    why = ActorDiedErrorContext(error_message="Its worker process has died.", actor_id=b"a" * 16)
    return ActorDiedError(why)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (
            torch.AcceleratorError(CUDA.format("invalid device ordinal")),
            "AcceleratorError: CUDA error: invalid device ordinal",
        ),
        (RuntimeError(NCCL.format("no route to 10.0.0.2")), "RuntimeError: no route to 10.0.0.2"),
        (
            WorkerHealthCheckTimeoutError("A check hangs."),
            "WorkerHealthCheckTimeoutError: A check hangs.",
        ),
        (
            WorkerHealthCheckFailedError("A check failed.\n", dead_actor()),
            "ActorDiedError: Its worker process has died.",
        ),
        (RayTaskError("f", TRACEBACK, None), "RayTaskError: ValueError: wrong shape"),
        (
            RuntimeError("Error in loading:\n\tno wte\n\tno wpe"),
            "RuntimeError: Error in loading: no wte",
        ),
        (
            RuntimeError("(sqlite3) it is locked\n[SQL: BEGIN]"),
            "RuntimeError: (sqlite3) it is locked",
        ),
        (RuntimeError("\n"), "RuntimeError"),
    ],
)
def test_the_line_with_the_cause_is_shown(error: Exception, cause: str) -> None:
    assert root_cause(error) == cause


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RayTaskError("f", f"{TRACEBACK}\ntorch.OutOfMemoryError: no memory", None),
        torch.AcceleratorError(CUDA.format("out of memory")),
        RuntimeError(NCCL.format("Cuda failure 2 'out of memory'")),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
)
def test_a_lack_of_memory_is_known_whoever_reports_it(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("text", ["CUDA error: invalid device ordinal", "the disk is out of space"])
def test_other_errors_are_no_lack_of_memory(text: str) -> None:
    assert not is_out_of_memory(RuntimeError(text))
