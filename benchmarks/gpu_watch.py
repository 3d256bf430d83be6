"""A GPU's clocks, temperature and power while it trains, and a profile of a few steps."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from raytrain_gpt.events import Profile
from raytrain_gpt.train.profile import STEPS_BEFORE_PROFILE, StepProfile

PROFILED_STEPS = 2
STEPS_AFTER = STEPS_BEFORE_PROFILE + PROFILED_STEPS
"""Untimed steps: those before a profile and those in it."""
GPU_STATE = {
    "clocks.sm": "sm_clock_mhz",
    "clocks.max.sm": "max_sm_clock_mhz",
    "clocks.mem": "memory_clock_mhz",
    "temperature.gpu": "temperature_c",
    "power.draw": "power_w",
    "power.limit": "power_limit_w",
}
"""Name in nvidia-smi -> name in the JSON."""
SDPA = re.compile(
    r"aten::_scaled_dot_product_(?:attention_)?(cudnn|flash|efficient|math)|(flex)_attention"
)

State = dict[str, float | None]


def profiled(steps: Iterator[Any], steps_done: int, device: torch.device) -> dict[str, Any]:
    """Return torch's table of the last `PROFILED_STEPS` steps, and the GPU's state during the steps.

    Args:
        steps: At least `STEPS_AFTER` steps, not yet done; their results are ignored.
    """
    taken: list[Profile] = []
    profile = StepProfile(
        PROFILED_STEPS,
        steps_done,
        steps_done + STEPS_AFTER,
        device,
        taken.append,
    )
    with ThreadPoolExecutor(1) as thread:
        state = thread.submit(gpu_state, device)
        for _ in profile.record_steps(steps):
            pass
    (shown,) = taken
    used = (
        sdpa(shown.trace) if shown.trace else None
    )  # empty if the export failed; the speed is still valid
    return {"gpu": state.result(), "sdpa": used, "profile": shown.table.splitlines()}


def sdpa(trace: bytes) -> list[str]:
    """Return the kinds of attention kernels in a profile's trace, or [] if matrix products compute it."""
    names = {event.get("name", "") for event in json.loads(gzip.decompress(trace))["traceEvents"]}
    matches = (SDPA.search(name) for name in names)
    return sorted({match[1] or match[2] for match in matches if match})


def gpu_state(device: torch.device) -> State | None:
    """Return the current clocks, temperature and power, or None without a GPU or nvidia-smi."""
    if device.type != "cuda":
        return None
    uuid = torch.cuda.get_device_properties(device).uuid
    command = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={','.join(GPU_STATE)}"]
    command += ["--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
        return parsed_state(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):  # must not fail a measurement
        return None


def parsed_state(line: str) -> State:
    """Parse nvidia-smi's values, some of which may be unknown: `1980, 1980, 3201, 64, [N/A], 700.00`."""
    texts = [text.strip() for text in line.split(",")]
    numbers = [float(text) if re.fullmatch(r"[\d.]+", text) else None for text in texts]
    return dict(zip(GPU_STATE.values(), numbers, strict=True))


def hardest_state(device: torch.device, over: threading.Event) -> State | None:
    """Sample the state every 2 s until `over` is set; return the one with most power, or None."""
    states = []
    while not over.wait(2):
        states += [state for state in [gpu_state(device)] if state is not None]
    return max(states, key=lambda state: state["power_w"] or 0, default=None)
