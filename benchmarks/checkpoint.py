"""Training time that a checkpoint costs, synchronous or written in the background.

A GPT makes real optimizer steps; checkpoints go through `CheckpointWriter` to disk, with hashes and
fsync. Both ways run in turn:

- synchronous: `begin`, then `collect` immediately; training stalls during both;
- asynchronous: training stalls in `begin` and `collect`; steps between them are slower than other steps.

    python benchmarks/checkpoint.py [--pairs 7] [--threads 1] [--directory DIR] …

`--directory` is on the disk to measure.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import torch
from harness import CORES, VOCAB_SIZE, flags, in_rounds, ratios, report

from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.checkpoint.checkpoint_state import CheckpointState
from raytrain_gpt.checkpoint.collectives import Collectives
from raytrain_gpt.checkpoint.writer import CheckpointWriter, WrittenCheckpoint
from raytrain_gpt.config.sections import OptimSection
from raytrain_gpt.core.gpt2 import GPT2
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.optim import update
from raytrain_gpt.core.registry import build_optimizer, count_model
from raytrain_gpt.storage.location import Location

STEPS_AROUND = 6
"""Steps without writing before and after each asynchronous checkpoint."""


def main() -> None:
    # One core stays free, as for Ray's processes in a run; the writing can also use it.
    args = flags(
        __doc__,
        pairs=7,
        num_layers=10,
        embd_size=512,
        seq_len=64,
        sequences=2,
        threads=max(1, CORES - 1),
        directory=tempfile.gettempdir(),
    ).parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        training = Training(args, directory)
        first_stall_s = training.asynchronous()
        training.synchronous()
        training.details.clear()
        size_bytes = training.catalog.complete()[-1].size_bytes
        ways = {"asynchronous": training.asynchronous, "synchronous": training.synchronous}
        stalls = in_rounds(list(ways), args.pairs, lambda way, number: ways[way](), "s")
    stall_s, sync_s = stalls["asynchronous"], stalls["synchronous"]
    pairs = [
        {"sync_s": round(s, 4), "stall_s": round(a, 4), **details}
        for s, a, details in zip(sync_s, stall_s, training.details, strict=True)
    ]
    medians = {name: round(statistics.median(one[name] for one in pairs), 4) for name in pairs[0]}
    cost_s = [one["stall_s"] + one["slower_s"] for one in pairs]
    report(
        num_parameters=training.num_parameters,
        checkpoint_bytes=size_bytes,
        threads=args.threads,
        pairs=pairs,
        medians=medians,
        first_stall_s=round(first_stall_s, 4),
        sync_mb_per_s=round(size_bytes / 1e6 / medians["sync_s"]),
        stall_fractions=ratios(stall_s, sync_s),
        cost_fractions=ratios(cost_s, sync_s),
    )


class Training:
    """A model that trains on random tokens, and its checkpoints.

    Attributes:
        details: One entry per asynchronous checkpoint: seconds of writing in the background (`write_s`),
            number of steps during it (`steps`), seconds per step before and after it (`step_s`), and total
            extra seconds of the steps during it (`slower_s`).
    """

    def __init__(self, args: argparse.Namespace, directory: str) -> None:
        torch.manual_seed(0)
        heads = args.embd_size // 64
        shape = GPTShape(args.num_layers, heads, args.embd_size, args.seq_len, VOCAB_SIZE)
        self.step, self.num_parameters = 0, count_model(shape).num_parameters
        self.model = GPT2(shape)
        self.model.init_weights(0)
        self.optimizer = build_optimizer(self.model, OptimSection())
        self.tokens = torch.randint(0, VOCAB_SIZE, (args.sequences, args.seq_len + 1))
        self.catalog = Catalog(Location.of(directory))
        ranks = Collectives(0, 1)
        self.writer = CheckpointWriter(
            self.catalog, "001", ranks, self.model, self.optimizer, keep=1
        )
        self.details: list[dict[str, float]] = []

    def train(self) -> float:
        """Train one step and return its seconds."""
        started = time.perf_counter()
        self.model(self.tokens[:, :-1], self.tokens[:, 1:]).backward()
        update(self.optimizer, list(self.model.parameters()), 1e-4, 1.0)
        self.step += 1
        return time.perf_counter() - started

    def begin(self) -> float:
        """Start a checkpoint and return the seconds blocked."""
        state = CheckpointState(
            step=self.step,
            next_batch=self.step,
            order_hash="00",
            val_loss=None,
            tokens_seen=0,
            config={},
            manifest_hash="made",
            vocab_hash="made",
            vocab_size=VOCAB_SIZE,
            order_version=1,
            num_workers=1,
        )
        started = time.perf_counter()
        self.writer.begin(state, {}, prune=False)  # older ones are removed after the measurement
        return time.perf_counter() - started

    def collect(self) -> tuple[float, WrittenCheckpoint | None]:
        """Finish a checkpoint and return the seconds blocked, and the checkpoint."""
        started = time.perf_counter()
        written = self.writer.collect()
        return time.perf_counter() - started, written

    def synchronous(self) -> float:
        """Return the seconds of a checkpoint without concurrent training."""
        self.train()
        stall_s = self.begin() + self.collect()[0]
        self.catalog.prune(1)
        return stall_s

    def asynchronous(self) -> float:
        """Return the seconds for which a background checkpoint blocks training."""
        around = [self.train() for _ in range(STEPS_AROUND)]
        begin_s = self.begin()
        meanwhile = [self.train()]
        while self.writer.writing:
            meanwhile.append(self.train())
        collect_s, written = self.collect()
        around += [self.train() for _ in range(STEPS_AROUND)]
        self.catalog.prune(1)
        step_s = statistics.mean(around)
        slower_s = sum(meanwhile) - len(meanwhile) * step_s
        seconds = {"write_s": written.write_s, "step_s": step_s, "slower_s": slower_s}
        rounded = {name: round(value, 4) for name, value in seconds.items()}
        self.details.append({"steps": len(meanwhile), **rounded})
        return begin_s + collect_s


if __name__ == "__main__":
    main()
