"""A real model of the hub: in, three steps, out, and at each place the logits and ids of transformers.

    hf download HuggingFaceTB/SmolLM2-135M --local-dir smollm2-hf
    python benchmarks/hub_model.py smollm2-hf book.txt

Needs the memory of two fp32 copies of the model, and 16 bytes per parameter for the steps. It prints the
largest difference of logits after the import and after the export of the trained model, and whether
`AutoTokenizer` gives the ids that were prepared; it exits with 1 if one is above 1e-4 of the largest logit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from raytrain_gpt.checkpoint.open import open_checkpoint
from raytrain_gpt.data.shards import read_manifest, read_row_group

TOKENS = 256
STEPS = (
    "--max_steps 3 --warmup_steps 1 --seq_len 64 --micro_batch_sequences 2 --global_batch_tokens 256 "
    "--num_workers 0 --precision fp32 --eval_tokens 1024 --num_samples 0"
)


def command(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "raytrain_gpt.cli", *map(str, words)], check=True)


@torch.no_grad()
def difference(hf: Path, checkpoint: Path, ids: torch.Tensor) -> float:
    """Return the largest difference of logits over the largest logit."""
    theirs = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32).eval()
    expected = theirs(ids).logits
    del theirs
    model = open_checkpoint(checkpoint, "cpu")[2].eval()
    ids = ids[:, : model.shape.seq_len]
    expected = expected[:, : ids.shape[1]]
    gap = model.logits(ids)[..., : expected.shape[-1]] - expected
    return float(gap.abs().max() / expected.abs().max())


def check(hf: Path, text: Path, place: Path) -> dict[str, Any]:
    command("import", hf, "--out", place / "in")
    command(
        "prepare", text, "--out", place / "data", "--tokenizer", place / "in", "--val_fraction", 0.1
    )
    manifest = read_manifest(place / "data")
    prepared = read_row_group(place / "data", manifest, manifest.split_shards("train")[0], 0)
    ids = torch.from_numpy(prepared[:TOKENS].astype("int64"))[None]
    begin = AutoTokenizer.from_pretrained(hf)(text.read_text()[:2000])["input_ids"][:TOKENS]
    found = {"ids": begin[:-1] == prepared[: len(begin) - 1].tolist()}
    found["import"] = difference(hf, place / "in", ids)
    command("train", "--init_from", place / "in", "--data_path", place / "data", "--run_name", "run",
            "--storage_path", place, *STEPS.split())  # fmt: skip
    command("export", place / "run", "--out", place / "out")
    found["export"] = difference(place / "out", place / "run", ids)
    again = AutoTokenizer.from_pretrained(place / "out")(text.read_text()[:2000])["input_ids"]
    return {**found, "ids again": again[:TOKENS] == begin}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="directory of a model in Hugging Face's format")
    parser.add_argument("text", type=Path, help="file of text without special tokens")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        found = check(options.model, options.text, Path(place))
    print(json.dumps(found))
    is_same = found["ids"] and found["ids again"] and max(found["import"], found["export"]) < 1e-4
    raise SystemExit(0 if is_same else 1)


if __name__ == "__main__":
    main()
