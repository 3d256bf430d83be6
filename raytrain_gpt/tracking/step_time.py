"""Time breakdown of profiled steps, read from their Chrome trace.

Every instant of the steps is attributed to one kind, so the kinds add up to the total. Spans are layered
over the steps, and later entries of this list cover earlier ones:

- on a CPU: collectives of other threads, then operators of the training thread, inner ones last. The
  rest is Python between the operators.
- on a GPU: the training thread's waits for data, then communication kernels, then all other kernels.
  The rest is an idle GPU.

An operator's kind follows from its name and the names of the operators around it; a kernel's from the
operator that launched it. torch's own tables (`key_averages`) add up durations instead, which count an
instant twice if threads or streams overlap.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # the GPU benchmark runs without pyarrow, which run files need
    from raytrain_gpt.tracking.run_files import Row

STEP_SPAN = "training step"
DATA_WAIT_SPAN = "data wait"
"""Spans that the profiler adds to a trace."""

KINDS = {
    "matmul": "matrix products",
    "attention": "attention",
    "elementwise": "elementwise, normalization, copies",
    "loss": "softmax and loss",
    "optimizer": "clipping and optimizer",
    "communication": "communication",
    "data_wait": "waiting for data",
    "rest": "rest",
}
"""Kind of work -> label in texts."""
REST = {"cpu": "rest (Python, outside of operators)", "cuda": "rest (GPU idle)"}
NUM_OPERATORS = 10

_PATTERNS = {
    "data_wait": re.compile(f"^{DATA_WAIT_SPAN}$"),
    "optimizer": re.compile(r"^optimizer\.|foreach|adamw|linalgvectornorm"),
    "communication": re.compile(
        r"^(nccl|gloo|c10d|fsdp)|^torch(\.|::)distributed|allreduce|allgather|reducescatter|"
        r"recordparamcomms"
    ),
    "attention": re.compile(r"scaleddotproduct|flash|fmha|attention|sdpa"),
    "matmul": re.compile(
        r"matmul|linear|\b(add|b|baddb|scaled)?mm(backward|activation)?\d*\b|"
        r"gemm|cutlass|cublas|nvjet|xmma"
    ),
    "loss": re.compile(r"softmax|nllloss|crossentropy|logsumexp|chunkedmean"),
    # These look up and call compiled code, but compute nothing.
    "rest": re.compile(r"^(torchdynamo|torch-compiled|pregraph|aotdispatcher|compiledfunction)"),
}
"""(kind, pattern of names in lower case without `_`); the first match counts."""
_RANKS = {kind: i for i, kind in enumerate([*list(_PATTERNS)[:-1], "elementwise", "rest"])}
"""Precedence among nested operators: a copy inside the optimizer counts as optimizer."""

Event = dict[str, Any]


@dataclass(frozen=True)
class StepTimeBreakdown:
    """Time breakdown of some steps of one rank, in total seconds of these steps.

    Attributes:
        device: `cuda` for a GPU's time, `cpu` for the training thread's.
        kinds_s: Seconds for every name of `KINDS`; they add up to `total_s`.
        operators: Operators with the most self time, in descending order: name, kind, time_s without nested
            operators, and calls.
    """

    first_step: int
    num_steps: int
    device: str
    total_s: float
    kinds_s: dict[str, float]
    operators: list[Row]

    @classmethod
    def of_row(cls, row: Row) -> StepTimeBreakdown | None:
        """Parse a `profile` event's row, or return None if it is damaged."""
        try:
            use = cls(**{field.name: row[field.name] for field in fields(cls)})
            use.text()  # raises if a field is damaged
            return use if all(o["kind"] in KINDS for o in use.operators) else None
        except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError):
            return None

    def title(self) -> str:
        """Return `steps 7 to 8, 212.4 ms per step, of the training thread`."""
        last = self.first_step + self.num_steps - 1
        steps = f"steps {self.first_step} to {last}" if self.num_steps > 1 else f"step {last}"
        where = "of the GPU" if self.device == "cuda" else "of the training thread"
        return f"{steps}, {self.per_step_ms(self.total_s):.1f} ms per step, {where}"

    def label(self, kind: str) -> str:
        return REST[self.device] if kind == "rest" else KINDS[kind]

    def per_step_ms(self, time_s: float) -> float:
        return 1000 * time_s / self.num_steps

    def share(self, time_s: float) -> float:
        return time_s / self.total_s if self.total_s else 0.0

    def text(self) -> str:

        def line(name: str, time_s: float) -> str:
            return (
                f"  {name:60} {self.per_step_ms(time_s):9.2f} ms per step {self.share(time_s):6.1%}"
            )

        lines = [f"profile of {self.title()} (recording slows steps: compare shares)"]
        lines += [line(self.label(kind), time_s) for kind, time_s in self.kinds_s.items()]
        lines.append("operators with the most self time:")
        for o in self.operators:
            calls = f"{o['calls'] / self.num_steps:g} calls per step"
            lines.append(f"{line(o['name'][:60], o['time_s'])}  {calls}")
        return "\n".join(lines)


def time_use(trace: dict[str, Any], first_step: int) -> StepTimeBreakdown:
    """Break down the time of a trace's steps.

    `trace` is a Chrome trace of torch's profiler with a `STEP_SPAN` around every step.
    """
    work = [e for e in trace["traceEvents"] if e.get("ph") == "X" and "dur" in e]
    work.sort(key=lambda e: (e["ts"], -e["dur"]))  # outer operators first
    on_cpu = [e for e in work if e.get("cat") in ("cpu_op", "user_annotation")]
    steps = [e for e in on_cpu if e["name"] == STEP_SPAN]
    on_cpu = [e for e in on_cpu if e["name"] != STEP_SPAN]
    on_gpu = [e for e in work if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    kinds = _kinds_on_cpu(on_cpu)
    training = [e for e in on_cpu if e["tid"] == steps[0]["tid"]]
    if on_gpu:
        layers = [(e, "data_wait") for e in training if kinds[id(e)] == "data_wait"]
        layers += _kernels(on_gpu, on_cpu, kinds)
    else:
        layers = [(e, "communication") for e in on_cpu if kinds[id(e)] == "communication"]
        layers += [(e, kind) for e in training if (kind := kinds[id(e)]) != "rest"]
    own_s, rest_s = _shared_out(steps, layers)
    kinds_s = dict.fromkeys(KINDS, 0.0) | {"rest": rest_s}
    by_operator: dict[tuple[str, str], list[float]] = defaultdict(list)
    for (event, kind), time_s in zip(layers, own_s, strict=True):
        kinds_s[kind] += time_s
        if time_s:
            by_operator[event["name"], kind].append(time_s)
    operators: list[Row] = [
        {"name": name, "kind": kind, "time_s": round(sum(times_s), 9), "calls": len(times_s)}
        for (name, kind), times_s in by_operator.items()
    ]
    return StepTimeBreakdown(
        first_step=first_step,
        num_steps=len(steps),
        device="cuda" if on_gpu else "cpu",
        total_s=round(sum(step["dur"] for step in steps) / 1e6, 9),
        kinds_s={kind: round(time_s, 9) for kind, time_s in kinds_s.items()},
        operators=sorted(operators, key=lambda o: -o["time_s"])[:NUM_OPERATORS],
    )


def _kinds_on_cpu(events: list[Event]) -> dict[int, str]:
    """Return event `id` -> kind of every operator; outer operators come first."""
    kinds: dict[int, str] = {}
    stacks: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        around = stacks[event["tid"]]
        while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"]:
            around.pop()
        outer = kinds[id(around[-1])] if around else "rest"
        kind = _named(event["name"], "elementwise" if event["cat"] == "cpu_op" else "rest")
        kinds[id(event)] = min(kind, outer, key=_RANKS.__getitem__)
        around.append(event)
    return kinds


def _kernels(
    on_gpu: list[Event], on_cpu: list[Event], kinds: dict[int, str]
) -> list[tuple[Event, str]]:
    """Return every kernel with its kind, communication first, so that the others cover it."""
    launchers = {e.get("args", {}).get("External id"): kinds[id(e)] for e in on_cpu}
    launchers[None] = "rest"
    kernels_and_kinds = []
    for kernel in on_gpu:
        launcher = launchers.get(kernel.get("args", {}).get("External id"), "rest")
        # Compiled code launches all its kernels from one span, so use the kernels' names. A copy
        # launched during a data wait is work of the GPU.
        kind = _named(kernel["name"], "elementwise")
        if launcher != "data_wait":
            kind = min(kind, launcher, key=_RANKS.__getitem__)
        kernels_and_kinds.append((kernel, kind))
    return sorted(kernels_and_kinds, key=lambda kernel: kernel[1] != "communication")


def _named(name: str, otherwise: str) -> str:
    plain = name.lower().replace("_", "")
    return next((kind for kind, names in _PATTERNS.items() if names.search(plain)), otherwise)


def _shared_out(steps: list[Event], layers: list[tuple[Event, str]]) -> tuple[list[float], float]:
    """Return each layer's seconds of the steps not covered by later layers, and the seconds of no layer."""
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in (*steps, *(event for event, _ in layers))]
    edges, positions = np.unique(np.array(spans, np.float64), return_inverse=True)
    positions = positions.reshape(-1, 2)
    owner: npt.NDArray[np.int64] = np.full(len(edges) - 1, -2)
    for first, stop in positions[: len(steps)]:
        owner[first:stop] = -1
    inside = owner == -1
    for i, (first, stop) in enumerate(positions[len(steps) :]):
        owner[first:stop] = i
    seconds = np.bincount(
        owner[inside] + 1, np.diff(edges)[inside] / 1e6, minlength=len(layers) + 1
    )
    return seconds[1:].tolist(), float(seconds[0])
