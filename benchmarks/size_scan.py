"""Losses of several sizes at one compute, against the size that a scaling study recommends for it.

    python benchmarks/size_scan.py runs/quickstart-scale --compute 2e13 [--factors 0.5 1 2] [--at_once 1]

Every size trains in local mode with the study's recipe and its rule of the peak rate. A factor multiplies the
recommended parameters and divides the tokens.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness import flags, report, run_rows

from raytrain_gpt.config.load import load_config_file
from raytrain_gpt.scaling.law import Law
from raytrain_gpt.scaling.law_file import LAW_FILE, LawFile, read_result
from raytrain_gpt.scaling.plan import size_near
from raytrain_gpt.storage.location import Location
from raytrain_gpt.sweep.campaign import BASE_FILE
from raytrain_gpt.train.preflight import expected_vocab_size


def main() -> None:
    parser = flags(__doc__, compute=0.0, factors=[0.25, 0.5, 1.0, 2.0, 4.0], at_once=1)
    parser.add_argument("study", type=Path)
    args = parser.parse_args()
    law = read_result(LawFile, Location.of(args.study / LAW_FILE))
    base = load_config_file(args.study / BASE_FILE)
    vocab_size, batch = expected_vocab_size(base), base.train.global_batch_tokens
    best, _ = Law.optimal(law, args.compute)

    def trained(factor: float) -> dict[str, Any]:
        size = size_near(base, vocab_size, factor * best)
        steps = round(args.compute / 6 / size.parameters / batch)
        rare = {"eval_every_steps": steps, "checkpoint_every_steps": steps}
        here = {"storage_path": str(args.study), "run_name": f"scan-{size.parameters:.0f}"}
        rate = law.rule.rate(size.parameters)
        config = base.updated(
            {**size.fields, **rare, **here, "peak_lr": rate, "max_steps": steps, "num_workers": 0}
        )
        (row,) = [row for row in run_rows(config) if "val/loss" in row]
        predicted = law.predict(size.parameters, steps * batch)
        seen = {"parameters": size.parameters, "tokens": steps * batch, "loss": row["val/loss"]}
        print(seen, f"predicted {predicted:.4f}", flush=True)
        return {**seen, "factor": factor, "predicted": round(predicted, 4)}

    with ThreadPoolExecutor(args.at_once) as threads:
        rows = list(threads.map(trained, sorted(args.factors)))
    recommended = next(row["loss"] for row in rows if row["factor"] == 1)
    lowest = min(row["loss"] for row in rows)
    report(compute=args.compute, rows=rows, above_best=round(recommended - lowest, 4))


if __name__ == "__main__":
    main()
