"""What `prepare` costs against a plain pool of tiktoken processes, and whether its memory grows.

Both read the same JSON lines with the same number of cores and write uint16 ids: `prepare` parquet
shards with hashes, as a command that starts Ray; the pool, of `multiprocessing`, a raw file for each of
the text's, with `encode_ordinary` for each document. They take turns, and a ratio is of two next to each
other, so that a noisy machine disturbs both alike. The text is Python's standard library over and over,
or the .jsonl files (field `text`) of a directory.

    TIKTOKEN_CACHE_DIR=… python benchmarks/tokenizing.py [--pairs 3] [--text_mb 256] [--text DIR] …

Prints one JSON object last: tokens/s of the whole commands, and of their steady part, from the end of
the first files to the end of the last; and the most memory of all processes of `prepare` together (PSS)
in the first and the last third of the steady part. (This file is not called tokenize.py because Python's
own module of that name would be hidden by it.)
"""

from __future__ import annotations

import argparse
import contextlib
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
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tiktoken
from processes import sum_of_pss
from training import ratios, without_cluster

from raytrain_gpt.data.shards import read_manifest
from raytrain_gpt.data.tokenizer import load_tokenizer

TEXT_FILES = 64
SAMPLE_EVERY_S = 0.5

Ended = list[tuple[float, int]]
"""Clock and tokens of every file that was finished, in order."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--text", type=Path, help="directory of .jsonl files; default: made ones")
    parser.add_argument("--text_mb", type=int, default=256, help="megabytes of made text")
    parser.add_argument("--tokenizer", default="gpt2")
    parser.add_argument("--pool", type=Path, help="be the pool and write there (used inside)")
    args = parser.parse_args()
    if args.pool:
        pool(args)
        return
    measured: dict[str, list[Measured]] = {"prepare": [], "pool": []}
    with tempfile.TemporaryDirectory() as work:
        text = args.text or made_text(Path(work, "text"), args.text_mb * 10**6)
        for i in range(args.pairs):
            for way in ("prepare", "pool") if i % 2 else ("pool", "prepare"):
                out = Path(work, f"{way}-{i}")
                one = prepared(text, out, args) if way == "prepare" else pooled(text, out, args)
                measured[way].append(one)
                print(
                    f"{way}: {one.tokens} tokens, {one.per_s:,.0f} a second in all, "
                    f"{one.steady_per_s:,.0f} when it runs",
                    flush=True,
                )
    whole = {way: [one.per_s for one in all_of] for way, all_of in measured.items()}
    steady = {way: [one.steady_per_s for one in all_of] for way, all_of in measured.items()}
    print(
        json.dumps(
            {
                "tokens": [one.tokens for one in measured["prepare"]],
                "cores": os.cpu_count(),
                "tokens_per_s": {way: [round(one) for one in s] for way, s in whole.items()},
                "steady_tokens_per_s": {
                    way: [round(one) for one in s] for way, s in steady.items()
                },
                "ratios": ratios(whole["prepare"], whole["pool"]),
                "steady_ratios": ratios(steady["prepare"], steady["pool"]),
                "memory_mb": {
                    way: [one.most_mb() for one in all_of] for way, all_of in measured.items()
                },
            }
        )
    )


@dataclass
class Measured:
    """One command.

    Attributes:
        seconds: From its start to its end.
        ended: What it finished.
        memory: (clock, bytes) of all its processes, sampled.
    """

    seconds: float = 0.0
    ended: Ended = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """All that were written."""
        return sum(tokens for _, tokens in self.ended)

    @property
    def per_s(self) -> float:
        """Tokens a second of the whole command."""
        return self.tokens / self.seconds

    @property
    def _steady(self) -> Ended:
        """From the moment on when every core has finished a file."""
        return self.ended[(os.cpu_count() or 1) - 1 :]

    @property
    def steady_per_s(self) -> float:
        """Tokens a second of the steady part."""
        (first, _), *rest = self._steady
        if len(rest) < 3:
            sys.exit(f"only {len(self.ended)} tasks ended; give more text")
        return sum(tokens for _, tokens in rest) / (rest[-1][0] - first)

    def most_mb(self) -> dict[str, float]:
        """The most memory in the first and the last third of the steady part."""
        first, last = self._steady[0][0], self._steady[-1][0]
        third = (last - first) / 3
        spans = {"first_third": (first, first + third), "last_third": (last - third, last)}
        return {
            name: round(max((size for at, size in self.memory if a <= at <= b), default=0) / 1e6)
            for name, (a, b) in spans.items()
        }


def prepared(text: Path, out: Path, args: argparse.Namespace) -> Measured:
    """`raytrain-gpt prepare` of all text."""
    command = [sys.executable, "-m", "raytrain_gpt.cli", "prepare", str(text), f"--out={out}"]
    with measuring([*command, f"--tokenizer={args.tokenizer}"]) as measured:
        pass
    # A task writes its shards at its end.
    ends: dict[str, tuple[float, int]] = {}
    for shard in read_manifest(out).shards:
        task = shard.path.partition("-")[2]
        before, tokens = ends.get(task, (0.0, 0))
        ends[task] = (max(before, (out / shard.path).stat().st_mtime), tokens + shard.tokens)
    measured.ended = sorted(ends.values())
    return measured


def pooled(text: Path, out: Path, args: argparse.Namespace) -> Measured:
    """The pool over all text."""
    command = [sys.executable, __file__, f"--pool={out}", f"--text={text}"]
    with measuring([*command, f"--tokenizer={args.tokenizer}"]) as measured:
        pass
    size = np.dtype(np.uint16).itemsize
    files = [file.stat() for file in out.iterdir()]
    measured.ended = sorted((file.st_mtime, file.st_size // size) for file in files)
    return measured


@contextlib.contextmanager
def measuring(command: list[str]) -> Iterator[Measured]:
    """Run a command to its end, and measure it."""
    measured = Measured()
    started = time.time()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=without_cluster())
    done = threading.Event()

    def watch() -> None:
        while not done.wait(SAMPLE_EVERY_S):
            measured.memory.append((time.time(), sum_of_pss(process.pid)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        if process.wait():
            sys.exit(f"{' '.join(command)} failed")
        measured.seconds = time.time() - started
    finally:
        done.set()
        watcher.join()
    yield measured


def made_text(directory: Path, size: int) -> Path:
    """JSON lines of about `size` bytes of text in files of equal size; no two documents are the same."""
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
    """Tokenize every file of the text in a pool of processes, one for each core."""
    args.pool.mkdir()
    jobs = [(file, args.pool / f"{file.stem}.bin") for file in sorted(args.text.glob("*.jsonl"))]
    with multiprocessing.Pool(os.cpu_count(), load, (args.tokenizer,)) as processes:
        for _ in processes.imap_unordered(tokenize_file, jobs):
            pass


encoding: tiktoken.Encoding
"""Of a process of the pool."""


def load(tokenizer: str) -> None:
    """Begin a process of the pool."""
    global encoding
    encoding = load_tokenizer(tokenizer)


def tokenize_file(job: tuple[Path, Path]) -> None:
    """Write the ids of one file's documents, each closed by `eot`."""
    source, out = job
    with source.open() as lines, out.open("wb") as ids:
        for line in lines:
            tokens = encoding.encode_ordinary(json.loads(line)["text"])
            tokens.append(encoding.eot_token)
            ids.write(np.array(tokens, np.uint16).tobytes())


if __name__ == "__main__":
    main()
