"""Run the commands of README and getting-started, in order, in a clone of the last commit.

    python -m tests.readme [--short]

All blocks run in one shell. Commands that both pages contain run once. `stand_ins` replaces resources that
tests lack (network, GPUs, a shared directory); the original and the replaced command are printed.
`--short` uses the existing environment and trains without Ray, for fewer steps. It skips commands covered by
separate tests: servers, clusters, sweeps, further presets.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import secrets
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.hub import HubServer

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/getting-started.md")
PRINTED = (
    "preset quickstart",
    "step 250/250",
)
"""First words of indented blocks that show output; all other blocks are commands."""
CLONE = 'git clone "$REPOSITORY" raytrain-gpt && cd raytrain-gpt'
RUN_SHOWN = "python shown.py"
SERVERS = {
    "mlflow ui": "http://127.0.0.1:5000",
    "ray start": "http://127.0.0.1:8265",
}
"""Commands that run until the end of their block -> URL that they serve."""
SMALL = (
    "--num_layers 2 --num_heads 2 --embd_size 64 --seq_len 64 --global_batch_tokens 512 "
    "--micro_batch_sequences 8 --max_steps 3 --eval_tokens 1024 --use_gpu false --num_workers 1 "
    "--cpus_per_worker 1 --precision fp32 --compile false"
)
"""Flags that run a GPU preset on a CPU in seconds."""
HAVE_OTHER_TESTS = (
    r"^(mlflow |pip |hf |curl |python |ray |export |\(umask|raytrain-gpt (import|doctor|tune|"
    r"train --preset (?!quickstart))).*"
)
SMALL_GPT2 = """from transformers import GPT2Config, GPT2LMHeadModel
GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=64)).save_pretrained("gpt2-hf")"""
SHELL = r"""
set -e -m
trap 'kill $(jobs -p) 2> /dev/null || true' EXIT
curl() { command curl -sS --fail-with-body "$@"; }
run() {
  printf '\n$ %s\n' "$1"; [ "$1" = "$2" ] || echo "# here: $2"
  SECONDS=0; eval "$2"; echo "# $SECONDS s"
}
free() { ! command curl -s -o /dev/null "$1" || { echo "something else answers at $1"; exit 1; }; }
until_it_answers() { command curl -s -o /dev/null --retry 120 --retry-connrefused --retry-delay 1 "$1"; }
stop() { kill -- -"$!"; wait "$!" || true; }
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--short", action="store_true")
    short = parser.parse_args().short
    texts = [
        subprocess.check_output(["git", "show", f"HEAD:{page}"], cwd=ROOT, text=True)
        for page in PAGES
    ]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        hub = HubServer("HuggingFaceFW/fineweb-edu")
        try:
            replaced = stand_ins(directory, hub, short)
            all_of_them = [[CLONE], *all_blocks(texts)]
            script = SHELL + "".join(shell_lines(block, replaced) for block in all_of_them)
            environment = {
                **os.environ,
                "REPOSITORY": str(ROOT),
                "HF_ENDPOINT": hub.url,
                "RAY_AUTH_TOKEN": secrets.token_hex(32),
            }
            if data := os.environ.get("RAYTRAIN_GPT_TEST_DATA"):
                environment["TIKTOKEN_CACHE_DIR"] = str(Path(data, "tiktoken"))
            if short:
                environment["PYTHONPATH"] = str(directory / "raytrain-gpt")
            done = subprocess.run(["bash", "-c", script], cwd=directory, env=environment)
        finally:
            hub.close()
    sys.exit(done.returncode)


def stand_ins(directory: Path, hub: HubServer, short: bool) -> list[tuple[str, str]]:
    """Return (pattern, replacement) for resources that tests lack, and make the files that replace them."""
    data = os.environ.get("RAYTRAIN_GPT_TEST_DATA")
    text = "".join(
        f"Once upon a time there were {n} stories of {n * n} kings.\n\n" for n in range(20_000)
    )
    if data:
        text = (Path(data) / "text" / "tinyshakespeare.txt").read_text("utf-8")
    (directory / "book.txt").write_text(text)
    parquet = io.BytesIO()
    pq.write_table(pa.table({"text": text.split("\n\n")}), parquet)
    hub.files["sample/10BT/000_00000.parquet"] = parquet.getvalue()
    clone = directory / "raytrain-gpt"
    replaced = [(HAVE_OTHER_TESTS, ": not with --short")] * short
    replaced += [
        (r"^make test$", ": .ci/run does"),
        (r"book\.txt", str(directory / "book.txt")),
        (r"--val_tokens 100000000", "--val_tokens 20000"),
        (r"/nfs/", f"{clone}/"),
        (r"^ray start --head", r"\g<0> --num-cpus 4 --block"),
        (r"(train|train\.py|doctor) --preset gpt2-124m(?! --dry)", rf"\g<0> {SMALL}"),
        (r"^ray job submit .*", r"\g<0> --run_name job"),
        (r"train --preset (shakespeare\S*)", r"\g<0> --max_steps 20"),
    ]
    if data:
        examples = (Path(data) / "hellaswag_val_1000.jsonl").read_text("utf-8").splitlines(True)
        (directory / "hellaswag.jsonl").write_text("".join(examples[:40]))
        replaced += [
            (r"--hellaswag download", f"--hellaswag {directory}/hellaswag.jsonl"),
            (r"^hf download .*", f"python -c {shlex.quote(SMALL_GPT2)}"),
        ]
    else:
        replaced += [
            (r"--tokenizer gpt2", "--tokenizer bytes"),
            (r".*--hellaswag download|^hf download.*|.*import gpt2-hf.*", ": needs test data"),
        ]
    if short:
        environment = "mkdir .venv && ln -s {0} .venv/bin && touch .venv/.installed"
        replaced += [
            (r"(--max_steps |book@)(\d+)\d\d\b", r"\1\2"),
            (r"--checkpoint_every_steps 50", r"\g<0> --max_steps 60"),
            (r"^git clone .*", r"\g<0> && " + environment.format(Path(sys.executable).parent)),
            (r"^make demo", ".venv/bin/raytrain-gpt train --max_steps 10"),
            (r"train --code \S+", r"\g<0> --max_steps 10"),
            (r"^\S*raytrain-gpt train (?!.*--dry_run).*", r"\g<0> --num_workers 0"),
        ]
    return replaced


def all_blocks(texts: list[str]) -> list[list[str]]:
    """Return the blocks of all pages, with each command and file only at its first occurrence."""
    result: list[list[str]] = []
    for text in texts:
        earlier = {command for block in result for command in block} - {RUN_SHOWN}
        for block in blocks(text):
            if RUN_SHOWN in block:
                new = [] if block[0] in earlier else block
            else:
                new = [command for command in block if command not in earlier]
            result += [new] * bool(new)
    return result


def blocks(text: str) -> list[list[str]]:
    """Return the commands of each block.

    YAML that starts with `# NAME` is written to that file; Python with imports is run.
    """
    found = []
    for fenced, indented in re.findall(r"^```((?s:.*?))^```|((?:^ {4}.*\n)+)", text, re.MULTILINE):
        if fenced:
            language, _, content = fenced.partition("\n")
            if language == "python" and "import " in content:
                found.append([f"cat > shown.py <<'END'\n{content}END", RUN_SHOWN])
            elif language == "yaml" and content.startswith("# "):
                found.append([f"cat > {content.split()[1]} <<'END'\n{content}END"])
            continue
        lines = re.sub(r"\\\n\s*", "", indented.replace("\n    ", "\n")[4:]).splitlines()
        if not lines[0].startswith(PRINTED):
            found.append([re.sub(r"\s+# .*", "", line) for line in lines])
    return found


def shell_lines(block: list[str], replaced: list[tuple[str, str]]) -> str:
    lines, servers = [], 0
    for command in block:
        here = command
        for pattern, instead in replaced:
            here = re.sub(pattern, instead, here)
        url = next((at for start, at in SERVERS.items() if here.startswith(start)), None)
        if url:
            here, servers = f"free {url}; {here} & until_it_answers {url}", servers + 1
        lines.append(f"run {shlex.quote(command)} {shlex.quote(here)}\n")
    assert servers <= 1, f"the block of {block[0]} starts several servers"
    return "".join(lines) + "stop\n" * servers


if __name__ == "__main__":
    main()
