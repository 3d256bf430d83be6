"""Speed and memory of `prepare` against a plain pool of tiktoken processes.

Both read the same JSON lines on the same cores. `prepare` starts Ray and writes parquet shards with hashes;
the pool writes a raw uint16 file per input. The text is Python's standard library repeated, or a directory
of .jsonl files (field `text`).

    TIKTOKEN_CACHE_DIR=… python benchmarks/tokenizing.py [--rounds 3] [--text_mb 256] [--text DIR] …

The JSON has tokens/s of the commands and of their steady part (end of the first files to end of the last),
and peak memory (PSS) in the first and last third of that part.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken
from harness import in_turn, ratios, report, sum_of_pss, without_cluster

from raytrain_gpt.data.shards import read_manifest
from raytrain_gpt.data.tokenizer import load_tokenizer

TEXT_FILES = 64
SAMPLE_EVERY_S = 0.5
CORES = os.cpu_count() or 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--text", type=Path, help="directory of .jsonl files; default: made text")
    parser.add_argument("--text_mb", type=int, default=256, help="megabytes of made text")
    parser.add_argument("--tokenizer", default="gpt2")
    parser.add_argument("--pool", type=Path, help="be the pool and write there (internal)")
    args = parser.parse_args()
    if args.pool:
        pool(args)
        return
    commands: dict[str, list[Command]] = {"prepare": [], "pool": []}
    with tempfile.TemporaryDirectory() as work:
        text = args.text or made_text(Path(work, "text"), args.text_mb * 10**6)
        for number in range(args.rounds):
            for way in in_turn(list(commands), number):
                one = measured(way, text, Path(work, f"{way}-{number}"), args.tokenizer)
                commands[way].append(one)
                print(
                    f"{way}: {one.per_s:,.0f} tokens/s, {one.steady_per_s:,.0f} steady", flush=True
                )
    per_s = {way: [one.per_s for one in all_of] for way, all_of in commands.items()}
    steady = {way: [one.steady_per_s for one in all_of] for way, all_of in commands.items()}
    report(
        tokens=[one.tokens for one in commands["prepare"]],
        tokens_per_s={way: [round(one) for one in all_of] for way, all_of in per_s.items()},
        steady_tokens_per_s={way: [round(one) for one in s] for way, s in steady.items()},
        ratios=ratios(per_s["prepare"], per_s["pool"]),
        steady_ratios=ratios(steady["prepare"], steady["pool"]),
        memory_mb={way: [one.peak_mb() for one in all_of] for way, all_of in commands.items()},
    )


@dataclass
class Command:
    """One command that ran.

    Attributes:
        seconds: From start to exit.
        ended: (time, tokens) of every finished file, in order.
        memory: (time, bytes) of all its processes, sampled.
    """

    seconds: float
    ended: list[tuple[float, int]]
    memory: list[tuple[float, int]]

    @property
    def tokens(self) -> int:
        """Tokens written."""
        return sum(tokens for _, tokens in self.ended)

    @property
    def per_s(self) -> float:
        """Tokens/s of the entire command."""
        return self.tokens / self.seconds

    @property
    def steady_per_s(self) -> float:
        """Tokens/s after every core has finished a file."""
        (first, _), *rest = self.ended[CORES - 1 :]
        if len(rest) < 3:
            sys.exit(f"only {len(self.ended)} tasks ended; give more text")
        return sum(tokens for _, tokens in rest) / (rest[-1][0] - first)

    def peak_mb(self) -> list[int]:
        """Peak memory in the first and last third of the steady part."""
        first, last = self.ended[CORES - 1][0], self.ended[-1][0]
        third = (last - first) / 3
        spans = [(first, first + third), (last - third, last)]
        return [
            round(max((size for at, size in self.memory if a <= at <= b), default=0) / 1e6)
            for a, b in spans
        ]


def measured(way: str, text: Path, out: Path, tokenizer: str) -> Command:
    """Run one way over all text."""
    command = [sys.executable, __file__, f"--pool={out}", f"--text={text}"]
    if way == "prepare":
        command = [sys.executable, "-m", "raytrain_gpt.cli", "prepare", str(text), f"--out={out}"]
    started, memory, done = time.time(), [], threading.Event()
    process = subprocess.Popen(
        [*command, f"--tokenizer={tokenizer}"], stdout=subprocess.DEVNULL, env=without_cluster()
    )

    def watch() -> None:
        while not done.wait(SAMPLE_EVERY_S):
            memory.append((time.time(), sum_of_pss(process.pid)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        if process.wait():
            sys.exit(f"{' '.join(command)} failed")
        seconds = time.time() - started
    finally:
        done.set()
        watcher.join()
    ends: dict[str, tuple[float, int]] = {}
    if way == "pool":
        for file in out.iterdir():
            ends[file.name] = (file.stat().st_mtime, file.stat().st_size // 2)
    else:
        for shard in read_manifest(out).shards:  # a task writes its shards at its end
            task = shard.path.partition("-")[2]
            before, tokens = ends.get(task, (0.0, 0))
            ends[task] = (max(before, (out / shard.path).stat().st_mtime), tokens + shard.tokens)
    return Command(seconds, sorted(ends.values()), memory)


def made_text(directory: Path, size: int) -> Path:
    """Write about `size` bytes of JSON lines to files of equal size, without duplicate documents."""
    directory.mkdir()
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = itertools.cycle([source.read_text("utf-8") for source in sources])
    for number in range(TEXT_FILES):
        written = 0
        with (directory / f"{number:02d}.jsonl").open("w") as lines:
            for copy in itertools.count():
                text = f"# {number}.{copy}\n{next(texts)}"
                lines.write(json.dumps({"text": text}) + "\n")
                written += len(text)
                if written >= size / TEXT_FILES:
                    break
    return directory


def pool(args: argparse.Namespace) -> None:
    """Tokenize every file in a pool of processes, one per core."""
    args.pool.mkdir()
    jobs = [(file, args.pool / f"{file.stem}.bin") for file in sorted(args.text.glob("*.jsonl"))]
    with multiprocessing.Pool(CORES, load, (args.tokenizer,)) as processes:
        for _ in processes.imap_unordered(tokenize_file, jobs):
            pass


encoding: tiktoken.Encoding
"""Tokenizer of a process of the pool."""


def load(tokenizer: str) -> None:
    """Initialize a process of the pool."""
    global encoding
    encoding = load_tokenizer(tokenizer)


def tokenize_file(job: tuple[Path, Path]) -> None:
    """Write the ids of one file's documents, each followed by the end token."""
    source, out = job
    with source.open() as lines, out.open("wb") as ids:
        for line in lines:
            tokens = [*encoding.encode_ordinary(json.loads(line)["text"]), encoding.eot_token]
            ids.write(np.array(tokens, np.uint16).tobytes())


if __name__ == "__main__":
    main()
