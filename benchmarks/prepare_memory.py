"""Memory and speed of `raytrain-gpt prepare`, with a Ray cluster of its own, on generated text.

Memory is the sum over the command and all processes below it of their proportional set size (PSS), in
which a page that several share counts once.

    python benchmarks/prepare_memory.py [--text_gb 2] [--tokenizer gpt2] [--dedupe exact]

Prints one JSON object last: seconds, tokens/s, the highest sum of PSS, and that of each quarter of the
time, which shows whether memory grows.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
from processes import sum_of_pss

from raytrain_gpt.data.shards import read_manifest

FILE_BYTES = 2**26
SAMPLE_EVERY_S = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text_gb", type=float, default=2.0)
    parser.add_argument("--tokenizer", default="gpt2")
    parser.add_argument("--dedupe", default="none")
    parser.add_argument(
        "--work", type=Path, help="where text and shards go (default: a temporary one)"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.work) as work:
        source, out = Path(work, "text"), Path(work, "data")
        write_text(source, int(args.text_gb * 1e9))
        argv = [sys.executable, "-m", "raytrain_gpt.cli", "prepare", str(source), "--out", str(out)]
        argv += ["--tokenizer", args.tokenizer, "--dedupe", args.dedupe]
        environment = {name: v for name, v in os.environ.items() if name != "RAY_ADDRESS"}
        began = time.perf_counter()
        process = subprocess.Popen(argv, env=environment)
        samples = []
        while process.poll() is None:
            samples.append(sum_of_pss(process.pid))
            time.sleep(SAMPLE_EVERY_S)
        seconds = time.perf_counter() - began
        if process.returncode != 0:
            sys.exit(process.returncode)
        shards = read_manifest(out).shards
        tokens = sum(shard.tokens for shard in shards)
        found = {
            "text_bytes": sum(shard.text_bytes for shard in shards),
            "documents": sum(shard.documents for shard in shards),
            "tokens": tokens,
            "seconds": round(seconds, 1),
            "tokens_per_s": round(tokens / seconds),
            "max_pss_mb": round(max(samples) / 1e6),
            "max_pss_mb_by_quarter": [
                round(max(quarter) / 1e6) for quarter in np.array_split(samples, 4) if len(quarter)
            ],
        }
        print(json.dumps(found))


def write_text(directory: Path, num_bytes: int) -> None:
    """JSON lines of words of Python's own source, as frequent as there, some lines very long."""
    directory.mkdir()
    draw = np.random.default_rng(0)
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    files = sorted([*stdlib.glob("*.py"), *stdlib.glob("pydoc_data/*.py")])
    found = Counter(word for f in files for word in re.findall(r"[A-Za-z]+[.,]?", f.read_text()))
    words = sorted(found)
    frequency = np.array([found[word] for word in words]) / found.total()
    written = number = 0
    while written < num_bytes:
        with (directory / f"{number:05d}.jsonl").open("w") as file:
            size = 0
            while size < min(FILE_BYTES, num_bytes - written):
                lengths = np.minimum(draw.lognormal(6, 1.2, 1000).astype(int) + 1, 200_000)
                drawn = draw.choice(len(words), int(lengths.sum()), p=frequency)
                for of_document in np.split(drawn, np.cumsum(lengths)[:-1]):
                    text = " ".join([words[i] for i in of_document])
                    size += file.write(f'{{"text": "{text}"}}\n')
        written, number = written + size, number + 1


if __name__ == "__main__":
    main()
