"""Speed of `prepare` against a plain pool of tiktoken processes.

Both read the same JSON lines on the same cores. `prepare` starts Ray and writes parquet shards with hashes;
the pool writes a raw uint16 file per input. The text is Python's standard library repeated, or a directory of
.jsonl files with the field `text`.

    TIKTOKEN_CACHE_DIR=… python benchmarks/tokenizing.py [--rounds 3] [--text_mb 256] [--text DIR] …

The JSON has tokens/s of the commands in total and in steady state: from the end of the first files, one per
core, to the end of the last file.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np
import tiktoken
from harness import CORES, flags, in_new_process, in_rounds, ratios, report, without_cluster

from raytrain_gpt.data.shards import read_manifest
from raytrain_gpt.data.tokenizer import load_tokenizer

TEXT_FILES = 64
WAYS = ("prepare", "pool")


def main() -> None:
    args = flags(__doc__, rounds=3, text="", text_mb=256, tokenizer="gpt2").parse_args()
    tokens: list[int] = []
    steady: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as work:
        text = Path(args.text or made_text(Path(work, "text"), args.text_mb * 10**6))

        def tokens_per_s(way: str, number: int) -> float:
            out = Path(work, f"{way}-{number}")
            started = time.perf_counter()
            {"prepare": prepare, "pool": pool_in_new_process}[way](text, out, args.tokenizer)
            seconds = time.perf_counter() - started
            ends = file_ends(out)
            steady[way].append(steady_per_s(ends))
            total = sum(tokens for _, tokens in ends)
            if way == "prepare":
                tokens.append(total)
            return total / seconds

        per_s = in_rounds(WAYS, args.rounds, tokens_per_s, "tokens/s")
    report(
        tokens=tokens,
        tokens_per_s={way: [round(one) for one in all_of] for way, all_of in per_s.items()},
        steady_tokens_per_s={way: [round(one) for one in s] for way, s in steady.items()},
        ratios=ratios(per_s["prepare"], per_s["pool"]),
        steady_ratios=ratios(steady["prepare"], steady["pool"]),
    )


def steady_per_s(ends: list[tuple[float, int]]) -> float:
    """Return the tokens/s after every core has finished a file."""
    (first, _), *rest = ends[CORES - 1 :]
    if len(rest) < 3:
        sys.exit(f"only {len(ends)} tasks ended; give more text")
    return sum(tokens for _, tokens in rest) / (rest[-1][0] - first)


def file_ends(out: Path) -> list[tuple[float, int]]:
    """Return (time, tokens) of every finished file of either way, in order of time."""
    if not (out / "manifest.json").exists():
        raw = [file.stat() for file in out.iterdir()]
        return sorted((stat.st_mtime, stat.st_size // 2) for stat in raw)
    ends: dict[str, tuple[float, int]] = {}
    for shard in read_manifest(out).shards:  # a task writes its shards at its end
        task = shard.path.partition("-")[2]
        before, tokens = ends.get(task, (0.0, 0))
        ends[task] = (max(before, (out / shard.path).stat().st_mtime), tokens + shard.tokens)
    return sorted(ends.values())


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


def prepare(text: Path, out: Path, tokenizer: str) -> None:
    """Run `raytrain-gpt prepare`."""
    command = [sys.executable, "-m", "raytrain_gpt.cli", "prepare", str(text), f"--out={out}"]
    command += [f"--tokenizer={tokenizer}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=without_cluster())


def pool_in_new_process(text: Path, out: Path, tokenizer: str) -> None:
    """Run the pool as a command would, including interpreter startup."""
    in_new_process(pool, text, out, tokenizer)


def pool(text: Path, out: Path, tokenizer: str) -> None:
    """Tokenize every file in a pool of processes, one per core."""
    out.mkdir()
    jobs = [(file, out / f"{file.stem}.bin") for file in sorted(text.glob("*.jsonl"))]
    with multiprocessing.Pool(CORES, load, (tokenizer,)) as processes:
        for _ in processes.imap_unordered(tokenize_file, jobs):
            pass


encoding: tiktoken.Encoding
"""Tokenizer of a pool process."""


def load(tokenizer: str) -> None:
    """Initialize a pool process."""
    global encoding
    encoding = load_tokenizer(tokenizer).encoding


def tokenize_file(job: tuple[Path, Path]) -> None:
    """Write the ids of one file's documents, each followed by the end token."""
    source, out = job
    with source.open() as lines, out.open("wb") as ids:
        for line in lines:
            tokens = [*encoding.encode_ordinary(json.loads(line)["text"]), encoding.eot_token]
            ids.write(np.array(tokens, np.uint16).tobytes())


if __name__ == "__main__":
    main()
