"""A picture of where the time goes: a bar of kinds of work for every case that gpu.py has measured.

    python benchmarks/gpu_picture.py gpu-124m.json gpu-350m.json gpu-run.json --out where-time-goes.png

On a GPU a bar is the time of its kernels, on a CPU that of the training thread. Needs matplotlib, no GPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from raytrain_gpt.sweep import drawing
from raytrain_gpt.tracking.step_time import KINDS, StepTimeBreakdown

LOOKS = {
    "matmul": {"color": "#0b67b2"},
    "attention": {"color": "#c44601"},
    "elementwise": {"color": "#0a7f5e"},
    "loss": {"color": "#9b4a97"},
    "optimizer": {"color": "#806000"},
    "communication": {"color": "#b4bcc4", "hatch": "//"},
    "data_wait": {"color": "#b4bcc4", "hatch": ".."},
    "rest": {"color": "#e3e7eb"},
}
NARROW = 0.04
"""Of the longest bar: what is narrower gets no number."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="of gpu.py")
    parser.add_argument("--out", type=Path, default=Path("where-time-goes.png"))
    args = parser.parse_args()
    bars = [bar for file in args.files for bar in bars_of(json.loads(file.read_text()))]
    if not bars:
        parser.error(f"{', '.join(map(str, args.files))}: no case has a profile")
    args.out.write_bytes(picture(bars))
    print(args.out)


def bars_of(found: dict[str, Any]) -> list[tuple[str, StepTimeBreakdown]]:
    """A label and what the time went to, of every case that was measured."""
    bars = []
    settings = ["document mask"] * found["document_mask"] + ["fsdp"] * (found["parallel"] == "fsdp")
    if (mode := found["activation_checkpointing"]) != "none":
        settings.append(f"{mode} checkpointing")
    model = ", ".join([found["model"], f"{found['micro_batch_sequences']} sequences", *settings])
    for case in found["cases"]:
        if case.get("profile"):
            mfu = "" if case["mfu"] is None else f", MFU {case['mfu']:.1%}"
            speed = f"{case['tokens_per_s']:,} tokens/s{mfu}"
            label = f"{model}\n{case['mode']} {case['way']}: {speed}"
            bars.append((label, StepTimeBreakdown(**case["profile"])))
    return bars


def picture(bars: list[tuple[str, StepTimeBreakdown]]) -> bytes:
    """The PNG: milliseconds of a profiled step, by kind."""
    figure, axes = drawing.new_figure(11, 1.6 + 0.7 * len(bars))
    longest_s = max(use.total_s / use.num_steps for _, use in bars)
    for place, (_, use) in enumerate(bars):
        left = 0.0
        for kind, look in LOOKS.items():
            width = use.per_step_ms(use.kinds_s[kind])
            text = f"{width:.1f}" if width > NARROW * 1000 * longest_s else ""
            label = KINDS[kind] if place == 0 else None
            patches = axes.barh(place, width, left=left, label=label, edgecolor="white", **look)
            ink = drawing.INK if kind in ("communication", "data_wait", "rest") else "white"
            axes.bar_label(patches, [text], label_type="center", color=ink, fontsize=8)
            left += width
    axes.set_yticks(range(len(bars)), [label for label, _ in bars])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("milliseconds of a profiled step")
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    return drawing.png(figure)


if __name__ == "__main__":
    main()
