"""Count and check kernel launches of the product on a GPU that is not there; run.sh runs it.

    run.sh                       every case
    run.sh qwen3 gpt2-ddp …      some cases

A case trains a few steps of a model of full width and two layers, in bf16 and compiled, on the null GPU of
null_cuda.cpp: kernels, copies and waits are recorded and do nothing. Counted are graphs after settling, three
steps, an evaluation and a further step; launches of a micro-batch and of an update; the bytes that generated
kernels move per token and layer; the allocator's peak. The roofline takes 88% of 3.35 TB/s, 750 or 600
TFLOP/s, attention at 350 forward and 300 backward, and at least 2 µs per launch. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from raytrain_gpt.config.load import load_preset
from raytrain_gpt.core import loop
from raytrain_gpt.core.accumulation import ExactAccumulator, FloatAccumulator
from raytrain_gpt.core.device import make_autocast, set_cuda_defaults
from raytrain_gpt.core.loop import MicroBatch, train_steps, warm_up_ddp_buckets
from raytrain_gpt.core.memory import MemoryModel
from raytrain_gpt.core.model import GPT, GPTShape
from raytrain_gpt.core.parallel import shard
from raytrain_gpt.core.registry import build_optimizer, new_model
from raytrain_gpt.ingest.feed import to_device

HBM_BYTES_PER_S = 0.88 * 3.35e12
LAUNCH_S = 2e-6
ATTENTION_FLOPS = {"forward": 350e12, "backward": 300e12}
BF16 = 14
"""cudaDataType of bf16 in recorded matrix products."""
MICRO_BATCHES = 2
TRIGONOMETRY = re.compile(r"libdevice\.(?:cos|sin|pow)|tl_math\.(?:cos|sin)")


@dataclasses.dataclass(frozen=True)
class Case:
    """A configuration to count.

    Attributes:
        ranks: Pretended ranks; this process is rank 0, and null collectives return at once.
    """

    preset: str = "gpt2-124m"
    layers: int = 2
    sequences: int = 32
    mode: str = "none"
    parallel: str = "none"
    ranks: int = 1
    exact: bool = False
    document_mask: bool = False
    narrow_residual: bool = False
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)


QWEN3 = "modern-124m"
CASES = {
    "gpt2": Case(),
    "qwen3": Case(QWEN3),
    "gpt2-12": Case(layers=12),
    "qwen3-12": Case(QWEN3, layers=12),
    "gpt2-selective": Case(mode="selective"),
    "qwen3-selective": Case(QWEN3, mode="selective"),
    "gpt2-bf16-residual": Case(narrow_residual=True),
    "qwen3-bf16-residual": Case(QWEN3, narrow_residual=True),
    "gpt2-exact": Case(exact=True),
    "gpt2-document-mask": Case(document_mask=True),
    "gpt2-ddp": Case(parallel="ddp", ranks=2),
    "qwen3-ddp": Case(QWEN3, parallel="ddp", ranks=2),
    "gpt2-fsdp": Case(parallel="fsdp", ranks=2),
    "qwen3-fsdp": Case(QWEN3, parallel="fsdp", ranks=2),
    "350m": Case("gpt2-350m", layers=1, sequences=16),
    "1.5b": Case("gpt2-1.5b", layers=1, sequences=4),
}


class Recorder:
    """Events of the null GPU: (kind, name, bytes, numbers)."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["NULL_GPU"])
        self._library.null_mark.argtypes = [ctypes.c_char_p]
        self._file = Path(os.environ["TMPDIR"], f"events-{os.getpid()}.tsv")

    def mark(self, text: str) -> None:
        self._library.null_mark(text.encode())

    def start(self) -> None:
        self._library.null_record(1)

    def events(self) -> list[tuple[str, str, int, list[int]]]:
        """Take all events since the last call."""
        self._library.null_dump(str(self._file).encode())
        rows = [line.split("\t") for line in self._file.read_text().splitlines()]
        return [
            (kind, name, int(size), [*map(int, values.split(","))])
            for kind, name, size, values in rows
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--one", action="store_true", help="measure here (internal)")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measured(CASES[args.cases[0]])))
        return
    found, failed = {}, []
    for name in args.cases:
        command = [sys.executable, __file__, "--one", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            failed.append(f"{name}: exit {done.returncode}")
            continue
        found[name] = json.loads(done.stdout.splitlines()[-1])
        print(name, found[name], flush=True)
        failed += [f"{name}: {problem}" for problem in problems(CASES[name], found[name])]
    print(json.dumps({"torch": torch.__version__, "cases": found, "failed": failed}))
    sys.exit(bool(failed))


def problems(case: Case, found: dict[str, Any]) -> list[str]:
    """Return a line for each number that misses its limit."""
    muon = load_preset(case.preset).optim.optimizer == "muon"
    limits = {
        "symbolic_graphs": 0,
        "further_graphs": 0,
        "products_not_bf16": 0,
        "waits_in_a_step": 8 if case.parallel == "ddp" else 0,  # DDP times its first steps
        "trigonometry_in_layers": 0,
        "update_launches": 300 if muon else 50,
    }
    over = [
        f"{name} {found[name]}, at most {most}"
        for name, most in limits.items()
        if found[name] > most
    ]
    graphs = [found["graphs"], found["evaluation_graphs"]]
    if case.parallel == "none" and graphs != [2, 1]:  # DDP cuts at its buckets, FSDP at blocks
        over.append(f"{graphs} graphs for training and evaluation, not [2, 1]")
    if case.parallel == "none" and not case.exact and not case.document_mask:
        ratio = found["predicted_gb"] / found["peak_gb"]
        if not 0.9 < ratio < 1.1 and case.layers > 1:
            over.append(f"predicted memory is {ratio:.2f} of the peak")
    return over


def measured(case: Case) -> dict[str, Any]:
    """Train on the null GPU and count."""
    set_cuda_defaults()
    recorder, codes = Recorder(), collect_codes()
    replace_cudnn_attention(recorder)
    device = torch.device("cuda", 0)
    config = load_preset(case.preset).updated({"num_layers": case.layers, **case.fields})
    shape = GPTShape.of(config, 50257)
    if case.exact:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    model = new_model(shape, case.mode, 50256 if case.document_mask else None)
    model.narrow_residual = case.narrow_residual
    model.init_weights(0)
    model.to(device)
    model.compile(fullgraph=case.parallel == "none")
    net, group = distributed(model, case, device)
    optimizer = build_optimizer(model, config.optim, torch.bfloat16, group)
    autocast = make_autocast("bf16", device)
    batches = made_batches(case.sequences, shape.seq_len, device, recorder)
    accumulation: Any = FloatAccumulator(net, MICRO_BATCHES)
    if case.exact:
        accumulation = ExactAccumulator([*model.parameters()], MICRO_BATCHES)
    loop.update = marked(recorder, "update", loop.update)
    recorder.start()
    if case.parallel == "ddp":
        zeros = to_device(np.zeros((case.sequences, shape.seq_len + 1), np.uint16), device)
        warm_up_ddp_buckets(net, zeros, autocast)
    torch.cuda.reset_peak_memory_stats()
    results = train_steps(
        net,
        optimizer,
        batches,
        accumulation,
        first_step=0,
        max_steps=10**6,
        learning_rate=lambda step: 1e-3,
        grad_clip=1.0,
        autocast=autocast,
        seed=0,
    )
    for _ in range(3):
        recorder.events()
        next(results)
    events, training_codes = recorder.events(), list(codes)
    peak_bytes = torch.cuda.max_memory_allocated()
    model.eval()
    inputs, targets = next(batches)
    with torch.no_grad(), autocast():
        model(inputs, targets)
    evaluation_graphs = len(codes) - len(training_codes)
    model.train()
    next(results)
    residual = "bf16" if case.narrow_residual else "fp32"
    compiled = config.updated({"compile": True, "residual_dtype": residual})
    predicted = MemoryModel(compiled, shape, True)
    return {
        **counted(events, training_codes, case, shape),
        "graphs": len(training_codes),
        "evaluation_graphs": evaluation_graphs,
        "further_graphs": len(codes) - len(training_codes) - evaluation_graphs,
        "symbolic_graphs": sum(re.search(r"^\s+s\d+ = ", code, re.M) is not None for code in codes),
        "peak_gb": round(peak_bytes / 1e9, 2),
        "predicted_gb": round(predicted.predict(case.sequences, case.mode).total / 1e9, 2),
        "cubins": len([*Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin")]),
    }


def distributed(model: GPT, case: Case, device: torch.device) -> tuple[torch.nn.Module, Any]:
    """Return what is trained, and the group that shares the optimizer's work."""
    if case.ranks == 1:
        return model, None
    os.environ["WORLD_SIZE"] = str(case.ranks)
    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=case.ranks, device_id=device)
    if case.parallel == "fsdp":
        shard(model, device, torch.bfloat16)
        return model, dist.group.WORLD
    options = {"gradient_as_bucket_view": True, "broadcast_buffers": False}
    return torch.nn.parallel.DistributedDataParallel(model, **options), dist.group.WORLD


def made_batches(
    sequences: int, seq_len: int, device: torch.device, recorder: Recorder
) -> Iterator[MicroBatch]:
    """Yield micro-batches as a run's feed does, one ahead."""
    block, ahead = np.zeros((sequences, seq_len + 1), np.uint16), None
    while True:
        ready, ahead = ahead, to_device(block, device)
        if ready is not None:
            recorder.mark("micro_batch")
            yield ready


def collect_codes() -> list[str]:
    """Return a list that gets the code of every graph that Inductor compiles, without its caches."""
    import torch._functorch.config
    import torch._inductor.config
    from torch._inductor.graph import GraphLowering

    torch._inductor.config.benchmark_kernel = True  # writes every kernel's bytes into the code
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    codes: list[str] = []
    GraphLowering.save_output_code = staticmethod(codes.append)  # type: ignore[method-assign]
    return codes


def replace_cudnn_attention(recorder: Recorder) -> None:
    """Replace cuDNN's attention, which cannot plan without a device, by empty results."""
    library = torch.library.Library("aten", "IMPL")

    def forward(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> Any:
        recorder.mark("attention forward")
        sums = q.new_empty(*q.shape[:3], 1, dtype=torch.float32)
        empty = q.new_empty((), dtype=torch.int64)
        return torch.empty_like(q), sums, None, None, q.shape[2], k.shape[2], empty, empty, None

    def backward(_: Any, q: Any, k: Any, v: Any, *__: Any, **___: Any) -> Any:
        recorder.mark("attention backward")
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    library.impl("_scaled_dot_product_cudnn_attention", forward, "CUDA")
    library.impl("_scaled_dot_product_cudnn_attention_backward", backward, "CUDA")
    globals()["_kept_alive"] = library


def marked(recorder: Recorder, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with marks around it."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        recorder.mark(name)
        result = function(*args, **kwargs)
        recorder.mark("end")
        return result

    return call


def counted(
    events: list[tuple[str, str, int, list[int]]], codes: list[str], case: Case, shape: GPTShape
) -> dict[str, Any]:
    """Count the events of one step of two micro-batches, and the roofline of one micro-batch."""
    sources = [source for code in codes for source in kernel_sources(code)]
    kernels = {name: kernel_gb(source) for name, source in sources}
    trigonometric = {name for name, source in sources if TRIGONOMETRY.search(source)}
    launches: collections.Counter[str] = collections.Counter()
    seconds: collections.Counter[int] = collections.Counter()
    products_not_bf16 = waits = 0
    trigonometry, moved_gb = 0, 0.0
    phase = "between"
    attention_flops = 2.0 * case.sequences * shape.seq_len**2 * shape.embd_size
    for kind, name, size, numbers in events:
        if kind == "mark":
            if name.startswith("attention"):
                way = name.split()[1]
                flops = attention_flops * (2.5 if way == "backward" else 1)
                launches[phase] += 1
                for tflops in (750, 600):
                    seconds[tflops] += flops / ATTENTION_FLOPS[way]
            else:
                phase = {"end": "between"}.get(name, name)
            continue
        waits += kind == "wait" or "blocks" in name
        if kind not in ("kernel", "triton", "product", "set"):
            continue
        launches[phase] += 1
        if phase == "update":
            continue
        num_bytes = size
        flops = 0.0
        if kind == "product":
            m, n, k, batch, a_type, c_type = numbers
            products_not_bf16 += (a_type, c_type) != (BF16, BF16)
            flops = 2.0 * m * n * k * max(batch, 1)
        elif kind == "triton":
            num_bytes = round(kernels.get(name, 0) * 1e9)
            moved_gb += num_bytes / 1e9
            trigonometry += name in trigonometric
        for tflops in (750, 600):
            at_least = max(LAUNCH_S, num_bytes / HBM_BYTES_PER_S)
            seconds[tflops] += max(at_least, flops / (tflops * 1e12))
    tokens = case.sequences * shape.seq_len * MICRO_BATCHES
    return {
        "micro_batch_launches": launches["micro_batch"] // MICRO_BATCHES
        + launches["between"] // MICRO_BATCHES,
        "update_launches": launches["update"],
        "products_not_bf16": products_not_bf16,
        "waits_in_a_step": waits,
        "trigonometry_in_layers": max(0, trigonometry // MICRO_BATCHES - 2),
        "kernel_bytes_per_token_and_layer": round(moved_gb * 1e9 / tokens / case.layers),
        "roofline_ms": {t: round(s * 1e3 / MICRO_BATCHES, 1) for t, s in seconds.items()},
    }


def kernel_sources(code: str) -> list[tuple[str, str]]:
    """Return the names and sources of a graph's Triton kernels."""
    pattern = r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str"
    return re.findall(pattern, code, re.DOTALL)


def kernel_gb(source: str) -> float:
    """Return the gigabytes that a kernel moves, by Inductor's count."""
    found = re.search(r"'kernel_num_gb': ([0-9.e-]+)", source)
    return float(found[1]) if found else 0.0


if __name__ == "__main__":
    main()
