"""What grows with the number of ranks, on one machine and without a model.

- `recorder`: the actor of a run, with clients that are a run's own `RecorderClient`: each holds its long
  poll, rank 0 sends rows, the driver asks for news. CPU seconds of its process per second, its memory, and
  the time from the order to stop until every client has it.
- `split`: made rows through the run's own sharded Ray Dataset to consumers that only look at them: a chunk is
  cut into a row for each. Rows per second, the first row, and CPU time of the process that deals them.
- `agree`: gloo's all-reduce of 3 bytes, as the ranks have it in every step, among processes that were forked.

Clients and consumers are threads of a few processes, which share the machine with what is measured.

    python benchmarks/many_ranks.py recorder --ranks 8 64 512
    python benchmarks/many_ranks.py split --ranks 8 64 512 [--chunk_mb 128]
    python benchmarks/many_ranks.py agree --ranks 8 16 32

Prints one JSON object last. (Cost of the order: reading.py.)
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from fractions import Fraction
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import ray
import torch
import torch.distributed as dist
from harness import report
from ray.data import ExecutionOptions
from reading import absent_shards

from raytrain_gpt.cluster.connection import connected
from raytrain_gpt.config.schema import Config
from raytrain_gpt.data.mixture import Mixture, WeightedDataset
from raytrain_gpt.ingest import ray_dataset
from raytrain_gpt.storage.location import Location
from raytrain_gpt.tracking.recorder import RecorderSpec
from raytrain_gpt.tracking.recorder_handle import ActorRecorder, RecorderHandle
from raytrain_gpt.tracking.sync import RunSync
from raytrain_gpt.train.attempt import POLL_S
from raytrain_gpt.train.heartbeat import RecorderClient

PROCESSES = 4
"""Among which clients and consumers are divided."""
STEP_S = 0.1
AGREEMENTS = 200
FIRST_AGREEMENTS = 20
"""Not counted: connections are made."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["recorder", "split", "agree"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--seconds", type=float, default=20.0, help="of the recorder's measurement")
    parser.add_argument(
        "--chunk_mb", type=float, default=128.0, help="a window of 2^26 uint16 is 134"
    )
    parser.add_argument("--chunks", type=int, default=16)
    args = parser.parse_args()
    measures = {
        "recorder": lambda num: record(num, args.seconds),
        "split": lambda num: split(num, args.chunk_mb, args.chunks),
        "agree": agree,
    }
    with nullcontext() if args.part == "agree" else connected(PROCESSES, print):
        found = [measures[args.part](num) for num in args.ranks]
    report(part=args.part, found=found)


def record(num_ranks: int, seconds: float) -> dict[str, Any]:
    """The recorder with so many ranks."""
    with tempfile.TemporaryDirectory() as work:
        config = Config().updated({"mlflow_uri": None, "max_steps": 10**6})
        sync = RunSync(Location.of(Path(work)))
        recorder = ActorRecorder(RecorderSpec(sync, config, {}, 0, None, [], []))
        clients = [Clients.remote(recorder, part) for part in parts_of(num_ranks)]
        started = time.perf_counter()
        while len(recorder.ask("ranks")) < num_ranks:
            time.sleep(0.05)
        all_there_s = time.perf_counter() - started
        process = actor_process("Recorder")
        used = cpu_s_while(process, lambda: watch(recorder, seconds))
        memory = process.memory_info().rss
        ordered_at = time.time()
        recorder.ask("command", "stop")
        stopped = ray.get([client.stopped_at.remote() for client in clients])
        told = [at - ordered_at for found in stopped for at in found]
        for client in clients:
            ray.kill(client)
        recorder.end()
    result = {
        "ranks": num_ranks,
        "all_there_s": round(all_there_s, 2),
        "cpu_s_per_s": round(used, 4),
        "memory_mb": round(memory / 1e6),
        "stop_median_s": round(statistics.median(told), 4),
        "stop_last_s": round(max(told), 4),
    }
    print(result, flush=True)
    return result


def watch(recorder: RecorderHandle, seconds: float) -> None:
    """What the driver does while the ranks train."""
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        recorder.ask("take_news", POLL_S)
        recorder.ask("stalled_s")


class Told(threading.Event):
    """Knows when it was set."""

    at = 0.0

    def set(self) -> None:
        """Set it."""
        self.at = time.time()
        super().set()


@ray.remote(num_cpus=0)
class Clients:
    """Clients of some ranks, which make progress as if they trained."""

    def __init__(self, recorder: RecorderHandle, ranks: range) -> None:
        self._clients = [RecorderClient(recorder, rank, None) for rank in ranks]
        for client in self._clients:
            client.stop = Told()
        threading.Thread(target=self._train, daemon=True).start()

    def _train(self) -> None:
        step = 0
        while True:
            time.sleep(STEP_S)
            step += 1
            for client in self._clients:
                client.progress()
            self._clients[0].rows([row(step)])  # what is not of rank 0 sends nothing

    def stopped_at(self) -> list[float]:
        """When each of them was told to stop, once all are; they leave."""
        for client in self._clients:
            client.stop.wait()
            client.close()
        return [client.stop.at for client in self._clients]


def row(step: int) -> dict[str, Any]:
    """A step's row."""
    numbers = {"train/loss": 3.0, "optim/lr": 1e-3, "optim/grad_norm": 1.0, "data/epoch": 0}
    speed = {"perf/tokens_per_s": 1e6, "perf/step_time_s": STEP_S, "perf/data_wait_s": 0.0}
    return {"step": step, **numbers, **speed, "perf/mfu": None, "data/order_hash": "0" * 16}


def split(num_ranks: int, chunk_mb: float, num_chunks: int) -> dict[str, Any]:
    """The sharded dataset with so many ranks; its first chunk is not counted."""
    manifest, batch_tokens = absent_shards(100, 100_000_000), 2**26
    config = Config().updated({"seq_len": 1024, "global_batch_tokens": batch_tokens})
    data = Mixture((WeightedDataset(Location.of(Path("made")), manifest, Fraction(1)),))
    spec = ray_dataset.IngestSpec(config, data, num_ranks)
    row_bytes = round(chunk_mb * 1e6 / num_ranks)
    ray_dataset._read_chunk = made_rows(row_bytes)
    dataset = ray_dataset.ingest_dataset(spec, num_chunks)
    dataset.context.execution_options = ExecutionOptions(preserve_order=True)
    started = time.time()
    shards = dataset.streaming_split(num_ranks, equal=True)
    process = actor_process("SplitCoordinator")
    consuming = [consume.remote([shards[r] for r in part], part) for part in parts_of(num_ranks)]
    cpu_s, left = [], consuming
    while left:
        _, left = ray.wait(left, num_returns=len(left), timeout=0.02)
        cpu_s.append((time.time(), sum(process.cpu_times()[:2])))
    memory_mb, num_threads = round(process.memory_info().rss / 1e6), process.num_threads()
    seen = [times for found in ray.get(consuming) for times in found]
    first, last = max(times[0] for times in seen), max(times[-1] for times in seen)
    rows = sum(at > first for times in seen for at in times)
    used = [cpu for at, cpu in cpu_s if first <= at <= last + 0.1]
    result = {
        "ranks": num_ranks,
        "row_mb": row_bytes / 1e6,
        "rows": rows,
        "first_row_s": round(min(times[0] for times in seen) - started, 2),
        "all_have_one_s": round(first - started, 2),
        "rows_per_s": round(rows / (last - first), 1),
        "mb_per_s": round(rows * row_bytes / 1e6 / (last - first)),
        "dealing_cpu_ms_a_row": round(1000 * (used[-1] - used[0]) / rows, 2),
        "dealing_memory_mb": memory_mb,
        "dealing_threads": num_threads,
    }
    ray.kill(shards[0]._coord_actor)
    print(result, flush=True)
    return result


def made_rows(row_bytes: int) -> Callable[..., pa.Table]:
    """Stands for what reads a chunk: rows for all ranks, as many and as large, at once."""

    def read_chunk(table: pa.Table, spec: ray_dataset.IngestSpec) -> pa.Table:
        count = spec.world_size
        return pa.table(
            {
                "rank": pa.array(range(count), pa.int64()),
                "first": pa.array([table["first"][0].as_py()] * count, pa.int64()),
                "tokens": pa.array([bytes(row_bytes)] * count, pa.large_binary()),
            }
        )

    return read_chunk


@ray.remote(num_cpus=0)
def consume(shards: list[Any], ranks: range) -> list[list[float]]:
    """When each of some ranks got each of its rows."""

    def rows(shard: Any, rank: int) -> list[float]:
        times, batch = [], -1
        for table in shard.iter_batches(batch_size=1, batch_format="pyarrow", prefetch_batches=1):
            assert table["rank"][0].as_py() == rank
            assert table["first"][0].as_py() >= batch
            batch = table["first"][0].as_py()
            times.append(time.time())
        return times

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(rows, shards, ranks))


def agree(num_ranks: int) -> dict[str, Any]:
    """The all-reduce of every step among so many processes."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as work:
        times = context.SimpleQueue()
        processes = [
            context.Process(target=agreeing, args=(rank, num_ranks, work, times))
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        connect_s, seconds, num_files = times.get()
        for process in processes:
            process.join()
    result = {
        "ranks": num_ranks,
        "connect_s": round(connect_s, 3),
        "median_ms": round(1000 * statistics.median(seconds), 3),
        "mean_ms": round(1000 * statistics.mean(seconds), 3),
        "open_files_of_a_rank": num_files,
    }
    print(result, flush=True)
    return result


def agreeing(rank: int, num_ranks: int, work: str, times: Any) -> None:
    """One process: a rank."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    dist.init_process_group("gloo", f"file://{work}/store", rank=rank, world_size=num_ranks)
    connect_s = time.perf_counter() - started
    seconds = []
    for _ in range(FIRST_AGREEMENTS + AGREEMENTS):
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(torch.zeros(3, dtype=torch.uint8), dist.ReduceOp.MAX)
        seconds.append(time.perf_counter() - started)
    if rank == 0:
        times.put((connect_s, seconds[FIRST_AGREEMENTS:], psutil.Process().num_fds()))
    dist.barrier()
    dist.destroy_process_group()


def parts_of(num_ranks: int) -> Iterator[range]:
    """The ranks of each process."""
    share = -(-num_ranks // min(num_ranks, PROCESSES))
    return (range(first, min(first + share, num_ranks)) for first in range(0, num_ranks, share))


def actor_process(name: str) -> psutil.Process:
    """The process of the actor of a class, which answers already or soon."""
    while True:
        for process in psutil.process_iter():
            try:
                if process.cmdline()[:1] and process.cmdline()[0].startswith(f"ray::{name}"):
                    return process
            except psutil.Error:
                continue
        time.sleep(0.05)


def cpu_s_while(process: psutil.Process, operation: Callable[[], None]) -> float:
    """CPU seconds of a process per second while something is done here."""
    before, started = sum(process.cpu_times()[:2]), time.perf_counter()
    operation()
    return (sum(process.cpu_times()[:2]) - before) / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
