"""Bits per byte of models with different tokenizers, trained with equal FLOPs on the same text.

    python benchmarks/vocabularies.py stdlib --compute 5e12 [--names bytes gpt2 bpe:512 bpe:2048 bpe:8192]

Models have equal blocks; the vocabulary changes embeddings, head and FLOPs per token, and so the steps. A
batch is a number of tokens.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from harness import flags, report, run_rows

from raytrain_gpt.config.call_options import PrepareOptions
from raytrain_gpt.config.load import load_preset
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.registry import count_model
from raytrain_gpt.ingest.prepare import prepare

NAMES = ["bytes", "gpt2", "bpe:512", "bpe:2048", "bpe:8192"]


def main() -> None:
    parser = flags(__doc__, compute=5e12, names=NAMES, val_fraction=0.05, preset="quickstart")
    parser.add_argument("source", help="text, as for prepare")
    args = parser.parse_args()
    base = load_preset(args.preset)
    rows = []
    with tempfile.TemporaryDirectory() as work:
        for number, name in enumerate(args.names):
            data = Path(work, f"data-{number}")
            options = PrepareOptions(val_fraction=args.val_fraction)
            manifest = prepare([args.source], data, name, options, log=print, in_process=True)
            counts = count_model(GPTShape.of(base, manifest.vocab_size))
            batch_tokens = base.train.global_batch_tokens
            steps = round(args.compute / counts.flops_per_token / batch_tokens)
            once = {"max_steps": steps, "eval_every_steps": steps, "checkpoint_every_steps": steps}
            config = base.updated(
                {
                    **once,
                    "num_workers": 0,
                    "min_workers": None,
                    "num_samples": 0,
                    "data_path": str(data),
                    "storage_path": work,
                    "run_name": f"run-{number}",
                }
            )
            (last,) = [row for row in run_rows(config) if "val/loss" in row]
            train = manifest.split_shards("train")
            bytes_per_token = sum(s.text_bytes for s in train) / manifest.split_tokens("train")
            seen = {
                "tokenizer": name,
                "ids": manifest.vocab_size,
                "bytes_per_token": round(bytes_per_token, 3),
                "parameters": counts.num_parameters,
                "steps": steps,
                "epochs": round(steps * batch_tokens / manifest.split_tokens("train"), 2),
                "bits_per_byte": round(last["val/bits_per_byte"], 4),
            }
            print(seen, flush=True)
            rows.append(seen)
    report(source=args.source, compute=args.compute, rows=rows)


if __name__ == "__main__":
    main()
