"""Where the time of profiled steps went, read from their trace in Chrome's format.

Every instant of the steps is given to one thing, so that the parts add up to the whole:

1. Without a GPU: to the innermost operator of the thread that trains. While it is in none, to
   communication if a collective of another thread runs; what then remains is the rest.
2. With one: to the kernel that runs. While there is none but communication's, to that; while there is
   none at all, to waiting for data if the thread that trains does, else to the rest, an idle GPU.

What kind an operator is of follows from its name and the names of the operators it lies in; a kernel is
of the kind of the operator that launched it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from raytrain_gpt.tracking.run_files import Row

STEP_SPAN = "training step"
DATA_WAIT_SPAN = "data wait"
"""The names of the spans that the profile itself puts into a trace."""

KINDS = {
    "matmul": "matrix products",
    "attention": "attention",
    "elementwise": "elementwise, normalisation, copies",
    "loss": "softmax and loss",
    "optimizer": "clipping and optimizer",
    "communication": "communication",
    "data_wait": "waiting for data",
    "rest": "rest",
}
"""What time goes to, and how it is called in texts."""
REST = {"cpu": "rest (Python, outside of operators)", "cuda": "rest (GPU idle)"}
NUM_OPERATORS = 10

_WHOLE = {
    "data_wait": re.compile(f"^{DATA_WAIT_SPAN}$"),
    "optimizer": re.compile(r"^optimizer\.|foreach|adamw|linalgvectornorm"),
    "communication": re.compile(
        r"^(nccl|gloo|c10d|fsdp)|^torch(\.|::)distributed|allreduce|allgather|reducescatter|"
        r"recordparamcomms"
    ),
    "attention": re.compile(r"scaleddotproduct|flash|fmha|attention|sdpa"),
}
"""Kinds of whatever lies in an operator of theirs; names are in lower case, without `_`."""
_INNERMOST = {
    "loss": re.compile(r"softmax|nllloss|crossentropy|logsumexp|chunkedmean"),
    "matmul": re.compile(
        r"matmul|linear|\b(add|b|baddb|scaled)?mm(backward|activation)?\d*\b|"
        r"gemm|cutlass|cublas|nvjet|xmma"
    ),
}
"""Kinds of operators that may lie in each other: the innermost counts."""
_DISPATCH = re.compile(r"^(torchdynamo|torch-compiled|pregraph|aotdispatcher|compiledfunction)")
"""What finds and calls compiled code."""
_GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_CPU_WORK = ("cpu_op", "user_annotation")

Event = dict[str, Any]


@dataclass(frozen=True)
class Operator:
    """What one operator, or kernel of a GPU, took.

    Attributes:
        name: As torch calls it.
        kind: Of `KINDS`.
        time_s: Its own, without the operators that lie in it, of all steps together.
        calls: Of all steps together.
    """

    name: str
    kind: str
    time_s: float
    calls: int


@dataclass(frozen=True)
class TimeUse:
    """What the time of some steps of one rank went to.

    Attributes:
        first_step: The first of them.
        num_steps: How many.
        device: `cuda`: the time of a GPU; `cpu`: of the thread that trains.
        total_s: Of all steps together.
        kinds_s: Seconds for every name of `KINDS`; they add up to `total_s`.
        operators: Those with most time of their own, in falling order.
    """

    first_step: int
    num_steps: int
    device: str
    total_s: float
    kinds_s: dict[str, float]
    operators: list[Operator]

    def facts(self) -> Row:
        """The same for an event's row."""
        facts = asdict(self)
        facts["total_s"] = round(self.total_s, 9)
        facts["kinds_s"] = {kind: round(time_s, 9) for kind, time_s in self.kinds_s.items()}
        return facts

    @classmethod
    def of_row(cls, row: Row) -> TimeUse:
        """From a row that holds `facts`."""
        names = ("first_step", "num_steps", "device", "total_s", "kinds_s")
        operators = [Operator(**operator) for operator in row["operators"]]
        return cls(**{name: row[name] for name in names}, operators=operators)

    def title(self) -> str:
        """`steps 7 to 8, 212.4 ms a step, of the thread that trains`."""
        last = self.first_step + self.num_steps - 1
        steps = f"steps {self.first_step} to {last}" if self.num_steps > 1 else f"step {last}"
        where = "of the GPU" if self.device == "cuda" else "of the thread that trains"
        return f"{steps}, {self.a_step_ms(self.total_s):.1f} ms a step, {where}"

    def label(self, kind: str) -> str:
        """How a kind is called in texts."""
        return REST[self.device] if kind == "rest" else KINDS[kind]

    def a_step_ms(self, time_s: float) -> float:
        """Milliseconds a step of a time of all steps."""
        return 1000 * time_s / self.num_steps

    def share(self, time_s: float) -> float:
        """A part of the whole, 0 to 1."""
        return time_s / self.total_s if self.total_s else 0.0

    def text(self) -> str:
        """The tables for reading: kinds, then operators."""
        lines = [f"profile of {self.title()} (recorded, so slower than others)"]
        for kind, time_s in self.kinds_s.items():
            lines.append(f"  {self.label(kind):60} {self._numbers(time_s)}")
        lines.append("most time of their own:")
        for o in self.operators:
            calls = f"{o.calls / self.num_steps:g} calls a step"
            lines.append(f"  {o.name[:60]:60} {self._numbers(o.time_s)}  {calls}")
        return "\n".join(lines)

    def _numbers(self, time_s: float) -> str:
        return f"{self.a_step_ms(time_s):9.2f} ms a step {self.share(time_s):6.1%}"


def time_use(trace: dict[str, Any], first_step: int) -> TimeUse:
    """What the steps of a trace went to.

    Args:
        trace: A Chrome trace of torch's profiler with a `STEP_SPAN` around every step.
        first_step: Of the trace.
    """
    work = [e for e in trace["traceEvents"] if e.get("ph") == "X" and "dur" in e]
    on_cpu = [e for e in work if e.get("cat") in _CPU_WORK]
    on_gpu = [e for e in work if e.get("cat") in _GPU_WORK]
    steps = [e for e in on_cpu if e["name"] == STEP_SPAN]
    kinds = _kinds_on_cpu(on_cpu)
    training = [e for e in on_cpu if e["tid"] == steps[0]["tid"] and e["name"] != STEP_SPAN]
    if on_gpu:
        layers = _gpu_layers(on_gpu, on_cpu, kinds, training)
    else:
        others = [(e, k) for e in on_cpu if (k := kinds[id(e)]) == "communication"]
        known = [(e, k) for e in _outermost_first(training) if (k := kinds[id(e)]) != "rest"]
        layers = others + known
    own_s, rest_s = _shared_out(steps, layers)
    kinds_s = dict.fromkeys(KINDS, 0.0) | {"rest": rest_s}
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for (event, kind), time_s in zip(layers, own_s, strict=True):
        kinds_s[kind] += time_s
        if time_s:
            found[event["name"], kind].append(time_s)
    operators = [Operator(n, k, round(sum(s), 9), len(s)) for (n, k), s in found.items()]
    operators.sort(key=lambda operator: -operator.time_s)
    total_s = sum(step["dur"] for step in steps) / 1e6
    device = "cuda" if on_gpu else "cpu"
    return TimeUse(first_step, len(steps), device, total_s, kinds_s, operators[:NUM_OPERATORS])


def _gpu_layers(
    on_gpu: list[Event], on_cpu: list[Event], kinds: dict[int, str], training: list[Event]
) -> list[tuple[Event, str]]:
    """What a GPU's time may go to, what counts more later."""
    launched_by = {
        e["args"]["External id"]: kinds[id(e)]
        for e in _outermost_first(on_cpu)
        if "External id" in e.get("args", ())
    }
    waits = [(e, "data_wait") for e in training if kinds[id(e)] == "data_wait"]
    communication: list[tuple[Event, str]] = []
    computation: list[tuple[Event, str]] = []
    for event in on_gpu:
        launcher = launched_by.get(event.get("args", {}).get("External id"), "rest")
        kind = launcher
        if launcher in ("elementwise", "rest", "data_wait"):
            # Compiled code launches all its kernels from one span: their names say more.
            kind = _named(event["name"]) or "elementwise"
        layer = communication if kind == "communication" else computation
        layer.append((event, kind))
    return waits + communication + computation


def _kinds_on_cpu(events: list[Event]) -> dict[int, str]:
    """The kind of every operator, by its `id`."""
    kinds: dict[int, str] = {}
    threads: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        threads[event["tid"]].append(event)
    for thread in threads.values():
        around: list[Event] = []
        for event in _outermost_first(thread):
            while around and _end(around[-1]) <= event["ts"]:
                around.pop()
            outer = kinds[id(around[-1])] if around else "rest"
            kinds[id(event)] = _kind_within(outer, event)
            around.append(event)
    return kinds


def _kind_within(outer: str, event: Event) -> str:
    if outer in _WHOLE:
        return outer
    if named := _named(event["name"]):
        return named
    if outer in _INNERMOST:
        return outer
    computes = event["cat"] == "cpu_op" and not _DISPATCH.search(_plain(event["name"]))
    return "elementwise" if computes else outer


def _named(name: str) -> str | None:
    """The kind that a name tells."""
    plain = _plain(name)
    for kind, pattern in (_WHOLE | _INNERMOST).items():
        if pattern.search(plain):
            return kind
    return None


def _plain(name: str) -> str:
    return name.lower().replace("_", "")


def _outermost_first(events: Iterable[Event]) -> list[Event]:
    """By start; of those that start together the longest first."""
    return sorted(events, key=lambda e: (e["ts"], -e["dur"]))


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def _shared_out(steps: list[Event], layers: list[tuple[Event, str]]) -> tuple[list[float], float]:
    """Seconds within the steps that each layer has to itself, and those that none has.

    A later layer covers the ones before.
    """
    spans = [(e["ts"], _end(e)) for e in (*steps, *(event for event, _ in layers))]
    edges, places = np.unique(np.array(spans, np.float64), return_inverse=True)
    places = places.reshape(-1, 2)
    owner: npt.NDArray[np.int64] = np.full(len(edges) - 1, -2)
    for first, stop in places[: len(steps)]:
        owner[first:stop] = -1
    inside = owner == -1
    for i, (first, stop) in enumerate(places[len(steps) :]):
        owner[first:stop] = i
    seconds = np.bincount(
        owner[inside] + 1, np.diff(edges)[inside] / 1e6, minlength=len(layers) + 1
    )
    return seconds[1:].tolist(), float(seconds[0])
