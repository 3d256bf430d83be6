"""Output of `data show` (contents) and `data stats` (token counts and document lengths)."""

from __future__ import annotations

import io
import time
from typing import Any

import numpy as np

from raytrain_gpt.data.bad_documents import BAD_FILE
from raytrain_gpt.data.shards import SPLITS, Manifest, Split, read_row_group
from raytrain_gpt.data.stats import SplitStats, count_dataset, facts, histogram_edges
from raytrain_gpt.data.tokenizer import first_text, read_tokenizer
from raytrain_gpt.errors import DataError, failure_as
from raytrain_gpt.format import Log, amount, count, duration, size
from raytrain_gpt.storage.location import Location

PICTURE_FILE = "document_lengths.png"
PROGRESS_EVERY_S = 2.0
_SHOWN_IDS = 8
_MIN_DRAWN_DOCUMENTS = 100
_INK, _DOCUMENTS, _TOKENS = "#1b1f24", "#0b67b2", "#c44601"
SAMPLE_TOKENS = 60


def describe_dataset(directory: Location, manifest: Manifest, say: Log) -> dict[str, Any]:
    """Print the contents of a dataset, and return them as JSON types."""
    splits: dict[str, Any] = {}
    for split in SPLITS:
        shards = manifest.split_shards(split)
        splits[split] = {
            "shards": len(shards),
            "tokens": manifest.split_tokens(split),
            "documents": sum(shard.documents for shard in shards),
            "text_bytes": sum(shard.text_bytes for shard in shards),
            "file_bytes": sum(shard.file_bytes for shard in shards),
        }
    say(
        f"dataset {directory} | tokenizer {manifest.tokenizer}, {manifest.vocab_size} ids, {manifest.dtype}"
    )
    for name, one in splits.items():
        say(
            f"  {name:5} {amount(one['tokens'])} tokens in {count(one['documents'], 'document')}, "
            f"{one['text_bytes'] / max(1, one['tokens']):.2f} bytes/token, {count(one['shards'], 'shard')}, "
            f"{size(one['file_bytes'])}"
        )
    skipped = {name: manifest.source.get(name, 0) for name in ("bad_documents", "duplicates")}
    if skipped["bad_documents"]:
        say(f"  skipped: {skipped['bad_documents']} unreadable, see {directory / BAD_FILE}")
    if skipped["duplicates"]:
        say(f"  skipped: {count(skipped['duplicates'], 'duplicate')}")
    first = manifest.split_shards("train")[0]
    tokens = read_row_group(directory, manifest, first, 0)[: SAMPLE_TOKENS * 2].tolist()
    sample = first_text(read_tokenizer(directory), tokens, SAMPLE_TOKENS)
    say(f"  starts with {sample!r}")
    return {
        "path": str(directory),
        "tokenizer": manifest.tokenizer,
        "vocab_size": manifest.vocab_size,
        "dtype": manifest.dtype,
        "manifest_hash": manifest.hash,
        "splits": splits,
        "left_out": skipped,
        "sample": sample,
    }


def dataset_stats(
    directory: Location, manifest: Manifest, picture: Location, say: Log
) -> dict[str, Any]:
    """Print and plot the counts of a dataset; returns them as JSON types, or raises a DataError."""
    started = shown = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown >= PROGRESS_EVERY_S and done < total:
            shown = now
            say(
                f"stats {done / total:4.0%} | {amount(done / (now - started))} tok/s | "
                f"eta {duration((total - done) * (now - started) / done)}"
            )

    stats = count_dataset(directory, manifest, progress)
    edges = histogram_edges(max(int(one.lengths[-1]) for one in stats.values()))
    split_facts = facts(stats, read_tokenizer(directory), edges)
    say(f"dataset {directory} | tokenizer {manifest.tokenizer}, {manifest.vocab_size} ids")
    for split, one in split_facts.items():
        _say_split(split, one, say)
    with failure_as(DataError, f"cannot write {picture}", "; choose another --png"):
        picture.write_bytes(lengths_picture(stats, edges))
    say(f"picture {picture}")
    return {
        "path": str(directory),
        "tokenizer": manifest.tokenizer,
        "manifest_hash": manifest.hash,
        "splits": split_facts,
        "picture": str(picture),
    }


def _say_split(split: str, facts: dict[str, Any], say: Log) -> None:
    lengths, vocabulary = facts["document_tokens"], facts["vocabulary"]
    say(
        f"  {split:5} {amount(facts['tokens'])} tokens in {count(facts['documents'], 'document')}, "
        f"{facts['bytes_per_token']:.2f} bytes/token"
    )
    quantiles = ", ".join(f"{name} {value}" for name, value in lengths.items() if name != "mean")
    say(f"        tokens per document: mean {lengths['mean']:.1f}, {quantiles}")
    unseen = facts["tokens_not_in_train"]
    say(
        f"        {vocabulary['ids']} of {vocabulary['vocab_size']} ids occur "
        f"({vocabulary['coverage']:.1%}), {vocabulary['entropy_bits']:.2f} bits/token"
        + (f", {unseen} tokens have ids absent from train" if unseen else "")
    )
    most = vocabulary["most_frequent"][:_SHOWN_IDS]
    say("        most frequent: " + ", ".join(f"{m['text']!r} {m['fraction']:.1%}" for m in most))


def lengths_picture(stats: dict[Split, SplitStats], edges: np.ndarray[Any, Any]) -> bytes:
    """Plot fractions of documents and tokens by length, as a PNG; `edges` as in `histogram_edges`."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(8.5, 4.8), layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    train, val = stats["train"], stats["val"]
    documents, tokens = (counts / counts.sum() for counts in train.histogram(edges))
    axes.stairs(documents, edges, fill=True, color=_DOCUMENTS, alpha=0.35, label="train documents")
    axes.stairs(tokens, edges, color=_TOKENS, linewidth=1.8, label="train tokens")
    if val.num_documents >= _MIN_DRAWN_DOCUMENTS:
        of_val = val.histogram(edges)[0] / val.num_documents
        look: dict[str, Any] = {"color": _INK, "linewidth": 1.2, "linestyle": (0, (4, 2))}
        axes.stairs(of_val, edges, label="val documents", **look)
    axes.set_xscale("log")
    axes.set_xlim(1, float(edges[-1]))
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * 100:g}%"))
    axes.set_xlabel("tokens per document, end token included")
    axes.set_ylabel("fraction per bin")
    axes.set_title(
        f"half of the {_short(train.num_documents)} train documents have at most "
        f"{_short(train.quantile(0.5))} tokens, 1% have more than {_short(train.quantile(0.99))}",
        fontsize=10,
        color=_INK,
    )
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=150)
    return drawn.getvalue()


def _short(value: float) -> str:
    return amount(value).replace(".0", "")
