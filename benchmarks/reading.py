"""Speed of reading training data, without a model.

- `task`: tokens/s of one reading task: a window from disk, object store and cache, two epochs each (the first
  also opens the shards);
- `ray`: tokens/s from shards through the sharded Ray Dataset of a run to micro-batches in the workers, from
  the first micro-batch on;
- `order`: seconds and memory for the order and manifest of a dataset of 1T tokens; reads no data.

    python benchmarks/reading.py task [--tokens 67108864] [--shards 64] [--latency_ms 0 50] [--threads 1 16]
    python benchmarks/reading.py ray [--tokens 200000000] [--workers 2] [--latency_ms 50 [--cache]]
    python benchmarks/reading.py order [--shards 10000] [--shard_tokens 100000000]

The object store is a process on this machine that answers each request after the latency.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pickle
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TypeVar

import numpy as np
import ray
import torch
from harness import made_dataset, made_manifest, report
from ray.data import ExecutionOptions

from raytrain_gpt.cluster.connection import connect
from raytrain_gpt.config.schema import Config
from raytrain_gpt.data import reader
from raytrain_gpt.data.mixture import Mixture, WeightedDataset
from raytrain_gpt.data.order import Order, sequence_hashes
from raytrain_gpt.data.shards import MANIFEST_FILE, Manifest, Shard, read_manifest, write_manifest
from raytrain_gpt.ingest.feed import TrainFeed, rank_chunks
from raytrain_gpt.ingest.ray_dataset import IngestSpec, ingest_dataset
from raytrain_gpt.storage.location import Location

SEQ_LEN = 1024
VOCAB_SIZE = 50257
TASK_BATCH, RAY_BATCH = 512, 64
"""Sequences per step."""
EPOCHS = 4
"""Of `ray`: enough windows that those read ahead before the clock starts hardly count."""
NUM_RANKS = 512
KEYS = {
    "AWS_ACCESS_KEY_ID": "any",
    "AWS_SECRET_ACCESS_KEY": "any",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}

T = TypeVar("T")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    task = commands.add_parser("task")
    task.add_argument("--tokens", type=int, default=2**26)
    task.add_argument("--shards", type=int, default=64)
    task.add_argument("--latency_ms", type=float, nargs="+", default=[0.0, 50.0])
    task.add_argument("--threads", type=int, nargs="+", default=[1, reader.READ_THREADS])
    through_ray = commands.add_parser("ray")
    through_ray.add_argument("--tokens", type=int, default=200_000_000)
    through_ray.add_argument("--workers", type=int, default=2)
    through_ray.add_argument("--latency_ms", type=float, help="default: read from disk")
    through_ray.add_argument("--cache", action="store_true", help="cache row groups on disk")
    order = commands.add_parser("order")
    order.add_argument("--shards", type=int, default=10_000)
    order.add_argument("--shard_tokens", type=int, default=100_000_000)
    order.add_argument("--batch_tokens", type=int, default=2**19)
    server = commands.add_parser("server", help="be the object store (internal)")
    server.add_argument("directory", type=Path)
    server.add_argument("latency_ms", type=float)
    args = parser.parse_args()
    {"task": read_task, "ray": read_through_ray, "order": make_order, "server": serve}[
        args.command
    ](args)


def read_task(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as work:
        os.environ["XDG_CACHE_HOME"] = f"{work}/cache"
        data = Path(work, "data")
        manifest = made_dataset(data, args.tokens, VOCAB_SIZE, args.shards)
        read("disk, memory new to the process", Location.of(data), manifest)
        ways = [read("disk", Location.of(data), manifest)]
        stores = [(ms, threads, 0) for ms in args.latency_ms for threads in args.threads]
        stores.append((max(args.latency_ms), args.threads[-1], 4 * args.tokens))
        for latency_ms, threads, cache_bytes in stores:
            reader.READ_THREADS, reader.READ_AHEAD = threads, 2 * threads
            with object_store(data, latency_ms) as store:
                name = f"store, {latency_ms:g} ms, {threads} threads" + ", cache" * bool(
                    cache_bytes
                )
                ways.append(read(name, store, manifest, cache_bytes))
    report(tokens=args.tokens, shards=args.shards, ways=ways)


def read(
    way: str, directory: Location, manifest: Manifest, cache_bytes: int = 0
) -> dict[str, str | list[int]]:
    """Tokens/s of two epochs."""
    order = Order(manifest.row_group_sequences("train", SEQ_LEN), TASK_BATCH, SEQ_LEN, seed=0)
    rates = []
    for epoch in range(2):
        first = epoch * order.batches_per_epoch
        batches = range(first, first + order.batches_per_epoch)
        ids = np.concatenate([order.batch_ids(batch) for batch in batches])
        started = time.perf_counter()
        _, delivered = reader.read_sequences(
            directory, manifest, "train", SEQ_LEN, ids, cache_bytes
        )
        rates.append(round(ids.size * SEQ_LEN / (time.perf_counter() - started)))
        assert (delivered == ids).all()
    print(f"{way}: {rates[0]:,} and {rates[1]:,} tokens/s", flush=True)
    return {"way": way, "tokens_per_s": rates}


def read_through_ray(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as work:
        os.environ.update(KEYS, XDG_CACHE_HOME=f"{work}/cache")
        connect(4, print)
        data = Path(work, "data")
        manifest = made_dataset(data, args.tokens, VOCAB_SIZE)
        is_stored = args.latency_ms is not None
        with (
            object_store(data, args.latency_ms) if is_stored else nullcontext(Location.of(data))
        ) as directory:
            config = Config().updated(
                {
                    "seq_len": SEQ_LEN,
                    "global_batch_tokens": RAY_BATCH * SEQ_LEN,
                    "seed": 1,
                    "eval_tokens": SEQ_LEN,
                    "data_cache_gb": 4e-9 * args.tokens if args.cache else 0,
                }
            )
            mixture = Mixture((WeightedDataset(directory, manifest, Fraction(1)),))
            spec = IngestSpec(config, mixture, args.workers)
            steps = EPOCHS * spec.order().batches_per_epoch
            dataset = ingest_dataset(spec, steps)
            dataset.context.execution_options = ExecutionOptions(preserve_order=True)
            started = time.perf_counter()
            shards = dataset.streaming_split(args.workers, equal=True)
            results = ray.get([consume.remote(shard, spec, r) for r, shard in enumerate(shards)])
    tokens = steps * RAY_BATCH * SEQ_LEN
    first, last = min(first for first, _ in results), max(end for _, end in results)
    report(
        tokens=tokens,
        settings=vars(args),
        first_batch_s=round(first - started, 2),
        tokens_per_s=round(tokens / (last - first)),
        tokens_per_s_with_start=round(tokens / (last - started)),
    )


@ray.remote(num_cpus=1)
def consume(shard: object, spec: IngestSpec, rank: int) -> tuple[float, float]:
    """Times of the first and last micro-batch."""
    tables = shard.iter_batches(batch_size=1, batch_format="pyarrow", prefetch_batches=1)
    chunks = rank_chunks(tables, spec, rank)
    next(chunks)
    feed = TrainFeed(chunks, RAY_BATCH // spec.world_size, torch.device("cpu"))
    first = None
    for inputs, _ in feed.micro_batches():
        first = first or time.perf_counter()
        assert inputs.dtype == torch.int64
    return first, time.perf_counter()


def make_order(args: argparse.Namespace) -> None:
    seconds: dict[str, float] = {}

    def timed(name: str, operation: Callable[[], T]) -> T:
        started = time.perf_counter()
        result = operation()
        seconds[name] = round(time.perf_counter() - started, 4)
        return result

    with tempfile.TemporaryDirectory() as work:
        write_manifest(work, absent_shards(args.shards, args.shard_tokens))
        manifest_bytes = Path(work, MANIFEST_FILE).stat().st_size
        before = peak_mb()
        manifest = timed("read the manifest", lambda: read_manifest(work))
    timed("hash the manifest", lambda: manifest.hash)
    pickled = timed("pickle the manifest", lambda: pickle.dumps(manifest))
    timed("unpickle the manifest", lambda: pickle.loads(pickled))
    counts = timed("count sequences", lambda: manifest.row_group_sequences("train", SEQ_LEN))
    size = args.batch_tokens // SEQ_LEN
    order = timed("make the order", lambda: Order(counts, size, SEQ_LEN, seed=0))
    ids = timed("first window", lambda: window_ids(order, 0))
    timed("next window", lambda: window_ids(order, order.window_end(0)))
    timed("chunks of an epoch", lambda: order.chunks(0, order.batches_per_epoch))

    def find() -> None:
        groups = np.searchsorted(np.cumsum(counts), ids, side="right")
        manifest.find_row_groups("train", np.unique(groups))

    def deal() -> None:
        sequence_hashes(ids).sum(1)
        ids.reshape(len(ids), NUM_RANKS, -1).swapaxes(0, 1).reshape(NUM_RANKS, -1)

    timed("find a window's row groups", find)
    if size % NUM_RANKS == 0:
        timed(f"deal a window to {NUM_RANKS} ranks", deal)
    report(
        tokens=args.shards * args.shard_tokens,
        row_groups=len(counts),
        windows=order.windows_per_epoch,
        manifest_bytes=manifest_bytes,
        pickled_bytes=len(pickled),
        seconds=seconds,
        memory_mb=round(peak_mb() - before),
    )


def window_ids(order: Order, first: int) -> np.ndarray:
    """Ids of a window's global batches."""
    return np.stack([order.batch_ids(batch) for batch in range(first, order.window_end(first))])


def peak_mb() -> float:
    """Peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def absent_shards(num_shards: int, shard_tokens: int) -> Manifest:
    """Manifest of shards that do not exist, with the sizes of gpt2 ids of English text."""
    return made_manifest(
        [
            Shard(
                path=f"{split}-{i:05d}.parquet",
                split=split,
                tokens=shard_tokens,
                documents=shard_tokens // 1000,
                sha256=hashlib.sha256(str(i).encode()).hexdigest(),
                text_bytes=4 * shard_tokens,
                file_bytes=round(1.49 * shard_tokens),
            )
            for i, split in enumerate(["val", *["train"] * num_shards])
        ]
    )


@contextmanager
def object_store(directory: Path, latency_ms: float) -> Iterator[Location]:
    """A directory as an object store, for this process and its children."""
    os.environ.update(KEYS)
    command = [sys.executable, __file__, "server", str(directory), str(latency_ms)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        port = int(server.stdout.readline())
        yield Location.of("s3://bucket", endpoint=f"http://127.0.0.1:{port}")
    finally:
        server.kill()
        server.wait()


class Server(ThreadingHTTPServer):
    """Files of a directory behind S3's HEAD and GET, one thread per request."""

    daemon_threads = True
    request_queue_size = 128
    directory: Path
    latency_s: float


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def do_GET(self) -> None:
        time.sleep(self.server.latency_s)
        path = self.server.directory / self.path.partition("?")[0].removeprefix("/bucket/")
        size = path.stat().st_size if path.is_file() else 0
        part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, stop = (int(part[1]), min(int(part[2]) + 1, size)) if part else (0, size)
        self.send_response(404 if not path.is_file() else 206 if part else 200)
        self.send_header("Content-Length", str(stop - start))
        if part:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.end_headers()
        if self.command == "GET" and path.is_file():
            with path.open("rb") as file:
                file.seek(start)
                self.wfile.write(file.read(stop - start))

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *args: object) -> None:
        """Log nothing."""


def serve(args: argparse.Namespace) -> None:
    with Server(("127.0.0.1", 0), Handler) as server:
        server.directory, server.latency_s = args.directory, args.latency_ms / 1000
        print(server.server_port, flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
