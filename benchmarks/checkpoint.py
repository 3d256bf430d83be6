"""Time that a checkpoint costs training: synchronous, and written in the background.

A GPT makes real optimizer steps; checkpoints go through `CheckpointWriter` to disk, with hashes and
fsync. Both ways run in turn:

- synchronous: `begin` and `collect` at once, all of it a stall;
- asynchronous: the stall is the time in `begin` and `collect`; steps meanwhile are slower than those around.

    python benchmarks/checkpoint.py [--pairs 7] [--workers 2] [--threads 2] [--directory DIR] …

Several workers are gloo processes with DDP; the slowest rank counts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from harness import VOCAB_SIZE, ratios, report
from torch.nn.parallel import DistributedDataParallel

from raytrain_gpt.checkpoint.catalog import Catalog, CheckpointState
from raytrain_gpt.checkpoint.collectives import Collectives
from raytrain_gpt.checkpoint.writer import CheckpointWriter, WrittenCheckpoint
from raytrain_gpt.config.sections import OptimSection
from raytrain_gpt.core.gpt2 import GPT2
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.optim import build_optimizer, update
from raytrain_gpt.format import amount
from raytrain_gpt.storage.location import Location

STEPS_AROUND = 6
"""Steps without writing before and after each asynchronous checkpoint."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--num_layers", type=int, default=10)
    parser.add_argument("--embd_size", type=int, default=512)
    parser.add_argument("--seq_len", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=2, help="of each worker")
    parser.add_argument("--workers", type=int, default=1)
    # One core stays for Ray's own processes, as in overhead.py; the writing can use it as well.
    parser.add_argument("--threads", type=int, help="of each worker")
    parser.add_argument("--directory", help="on the disk to measure")
    parser.add_argument("--rank", type=int, help="be this worker (internal)")
    args = parser.parse_args()
    if args.rank is not None:
        work(args)
        return
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        argv = [*sys.argv[1:], f"--directory={directory}"]
        workers = [
            subprocess.Popen([sys.executable, __file__, *argv, f"--rank={rank}"])
            for rank in range(args.workers)
        ]
        codes = [worker.wait() for worker in workers]
    sys.exit(1 if any(codes) else 0)


@dataclass(frozen=True)
class Pair:
    """One synchronous and one asynchronous checkpoint, in seconds, of the slowest rank.

    Attributes:
        sync_s: The synchronous one, from `begin` to the end of `collect`.
        stall_s: In `begin` and `collect` of the asynchronous one.
        write_s: Its writing in the background.
        steps: Steps while it was written.
        step_s: A step just before and after it, mean.
        slower_s: What the steps while it was written took longer, in all.
    """

    sync_s: float
    stall_s: float
    write_s: float
    steps: int
    step_s: float
    slower_s: float


class Training:
    """A model that trains on made tokens, and the checkpoints it writes."""

    def __init__(self, args: argparse.Namespace, ranks: Collectives) -> None:
        torch.manual_seed(ranks.rank)
        heads = args.embd_size // 64
        shape = GPTShape(args.num_layers, heads, args.embd_size, args.seq_len, VOCAB_SIZE)
        self.ranks, self.step, self.num_parameters = ranks, 0, shape.num_parameters
        self.raw_model = GPT2(shape)
        self.raw_model.init_weights(0)
        self.optimizer = build_optimizer(self.raw_model, OptimSection())
        self.model = (
            DistributedDataParallel(self.raw_model, gradient_as_bucket_view=True)
            if ranks.world_size > 1
            else self.raw_model
        )
        self.tokens = torch.randint(0, VOCAB_SIZE, (args.sequences, args.seq_len + 1))
        self.catalog = Catalog(Location.of(args.directory))
        self.saver = CheckpointWriter(
            self.catalog, "001", ranks, self.raw_model, self.optimizer, keep=1
        )

    def train(self) -> float:
        """Seconds of one step, until all ranks know whether one is still writing, as in a run."""
        started = time.perf_counter()
        self.model(self.tokens[:, :-1], self.tokens[:, 1:]).backward()
        update(self.optimizer, list(self.raw_model.parameters()), 1e-4, 1.0)
        self.step += 1
        (self.writing,) = self.ranks.any_later(self.saver.writing)()
        return time.perf_counter() - started

    def begin(self) -> float:
        """Seconds blocked in it."""
        self.ranks.any_later(False)()
        started = time.perf_counter()
        # Older checkpoints are removed between the measurements.
        self.saver.begin(made_state(self.step, self.ranks), {}, prune=False)
        return time.perf_counter() - started

    def collect(self) -> tuple[float, WrittenCheckpoint]:
        """Seconds blocked in it, and what was saved."""
        started = time.perf_counter()
        saved = self.saver.collect()
        return time.perf_counter() - started, saved

    def slowest(self, seconds: float) -> float:
        """The largest value of all ranks."""
        return max(self.ranks.all_gather_json(seconds, float))

    def synchronous(self) -> float:
        """Seconds of a checkpoint without training."""
        self.train()
        blocked_s = self.begin()
        return self.slowest(blocked_s + self.collect()[0])

    def asynchronous(self) -> tuple[float, float, list[float], list[float]]:
        """Stall and writing in seconds; seconds of the steps while writing, and of those around."""
        around = [self.train() for _ in range(STEPS_AROUND)]
        blocked_s = self.begin()
        meanwhile = [self.train()]
        while self.writing:
            meanwhile.append(self.train())
        collect_s, saved = self.collect()
        around += [self.train() for _ in range(STEPS_AROUND)]
        return (
            self.slowest(blocked_s + collect_s),
            self.slowest(saved.write_s),
            [self.slowest(seconds) for seconds in meanwhile],
            [self.slowest(seconds) for seconds in around],
        )

    def tidy(self) -> None:
        """Remove all checkpoints but the last."""
        if self.ranks.rank == 0:
            self.catalog.prune(1)

    def pair(self, asynchronous_first: bool) -> Pair:
        """Measure both ways."""
        sync_s = 0.0 if asynchronous_first else self.synchronous()
        self.tidy()
        stall_s, write_s, meanwhile, around = self.asynchronous()
        self.tidy()
        if asynchronous_first:
            sync_s = self.synchronous()
            self.tidy()
        step_s = statistics.mean(around)
        slower_s = sum(meanwhile) - len(meanwhile) * step_s
        return Pair(sync_s, stall_s, write_s, len(meanwhile), step_s, slower_s)


def made_state(step: int, ranks: Collectives) -> CheckpointState:
    """What `state.json` has."""
    return CheckpointState(
        step=step,
        next_batch=step,
        order_hash="00",
        val_loss=None,
        tokens_seen=0,
        config={},
        manifest_hash="made",
        vocab_hash="made",
        vocab_size=VOCAB_SIZE,
        order_version=1,
        num_workers=ranks.world_size,
    )


def work(args: argparse.Namespace) -> None:
    """One rank; rank 0 prints."""
    threads = args.threads or max(1, ((os.cpu_count() or 1) - 1) // args.workers)
    torch.set_num_threads(threads)
    if args.workers > 1:
        rendezvous = f"file://{args.directory}/rendezvous"
        dist.init_process_group(
            "gloo", init_method=rendezvous, rank=args.rank, world_size=args.workers
        )
    training = Training(args, Collectives(args.rank, args.workers))
    with contextlib.redirect_stdout(None if args.rank else sys.stdout):
        measure(args, threads, training)
    if args.workers > 1:
        dist.destroy_process_group()


def measure(args: argparse.Namespace, threads: int, training: Training) -> None:
    """A pair to warm up, then those that count."""
    first = training.pair(asynchronous_first=True)
    size_bytes = training.catalog.complete()[-1].size_bytes
    print(
        f"{amount(training.num_parameters)} parameters, {size_bytes / 1e6:.0f} MB a checkpoint, "
        f"{args.workers} workers with {threads} threads each",
        flush=True,
    )
    pairs = []
    for i in range(args.pairs):
        pair = training.pair(asynchronous_first=i % 2 == 1)
        pairs.append(pair)
        print(
            f"at once {pair.sync_s:.2f} s | stall {pair.stall_s:.3f} s, "
            f"{pair.stall_s / pair.sync_s:.3f} of it | {pair.write_s:.2f} s in the background, "
            f"{pair.steps} steps of {pair.step_s:.3f} s slower by {pair.slower_s:.2f} s",
            flush=True,
        )
    seconds = [{name: round(value, 4) for name, value in asdict(pair).items()} for pair in pairs]
    medians = {
        name: round(statistics.median(one[name] for one in seconds), 4) for name in seconds[0]
    }
    stalls, synchronous = [p.stall_s for p in pairs], [p.sync_s for p in pairs]
    report(
        num_parameters=training.num_parameters,
        checkpoint_bytes=size_bytes,
        workers=args.workers,
        threads=threads,
        pairs=seconds,
        medians=medians,
        first_stall_s=round(first.stall_s, 4),
        sync_mb_per_s=round(size_bytes / 1e6 / medians["sync_s"]),
        stall_fractions=ratios(stalls, synchronous),
        cost_fractions=ratios([p.stall_s + p.slower_s for p in pairs], synchronous),
    )


if __name__ == "__main__":
    main()
