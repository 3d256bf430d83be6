"""Output of `data show` (what is in a dataset) and `data stats` (its counts and document lengths)."""

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
    """Print what is in a dataset; returns the same facts for JSON."""
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
    for name, split_facts in splits.items():
        say(
            f"  {name:5} {amount(split_facts['tokens'])} tokens in "
            f"{count(split_facts['documents'], 'document')}, "
            f"{count(split_facts['shards'], 'shard')}, {size(split_facts['file_bytes'])}"
        )
    left_out = {name: manifest.source.get(name, 0) for name in ("bad_documents", "duplicates")}
    if left_out["bad_documents"]:
        say(f"  skipped: {left_out['bad_documents']} unreadable, see {directory / BAD_FILE}")
    if left_out["duplicates"]:
        say(f"  skipped: {count(left_out['duplicates'], 'duplicate')}")
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
        "left_out": left_out,
        "sample": sample,
    }


def dataset_stats(
    directory: Location, manifest: Manifest, picture: Location, say: Log
) -> dict[str, Any]:
    """Count a dataset, print the counts and write the plot `picture`; returns the same facts for JSON.

    Raises:
        DataError: a shard is damaged, or the picture cannot be written.
    """
    started = shown = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown >= PROGRESS_EVERY_S and done < total:
            shown = now
            eta = (total - done) * (now - started) / done
            say(
                f"stats {done / total:4.0%} | {amount(done / (now - started))} tok/s | "
                f"eta {duration(eta)}"
            )

    stats = count_dataset(directory, manifest, progress)
    edges = histogram_edges(max(int(one.lengths[-1]) for one in stats.values()))
    found = facts(stats, read_tokenizer(directory), edges)
    say(f"dataset {directory} | tokenizer {manifest.tokenizer}, {manifest.vocab_size} ids")
    for split, one in found.items():
        _say_split(split, one, say)
    with failure_as(DataError, f"cannot write {picture}", "; choose another --png"):
        picture.write_bytes(lengths_picture(stats, edges))
    say(f"picture {picture}")
    return {
        "path": str(directory),
        "tokenizer": manifest.tokenizer,
        "manifest_hash": manifest.hash,
        "splits": found,
        "picture": str(picture),
    }


def _say_split(split: str, found: dict[str, Any], say: Log) -> None:
    lengths, vocabulary = found["document_tokens"], found["vocabulary"]
    say(
        f"  {split:5} {amount(found['tokens'])} tokens in {count(found['documents'], 'document')}, "
        f"{found['bytes_per_token']:.2f} bytes/token"
    )
    quantiles = ", ".join(f"{name} {value}" for name, value in lengths.items() if name != "mean")
    say(f"        tokens per document: mean {lengths['mean']:.1f}, {quantiles}")
    unseen = found["tokens_not_in_train"]
    say(
        f"        {vocabulary['ids']} of {vocabulary['vocab_size']} ids occur "
        f"({vocabulary['coverage']:.1%}), {vocabulary['entropy_bits']:.2f} bits/token"
        + (f", {unseen} tokens have ids that do not occur in train" if unseen else "")
    )
    most = vocabulary["most_frequent"][:_SHOWN_IDS]
    say("        most frequent: " + ", ".join(f"{m['text']!r} {m['fraction']:.1%}" for m in most))


def lengths_picture(stats: dict[Split, SplitStats], edges: np.ndarray[Any, Any]) -> bytes:
    """A PNG with the shares of documents and of tokens by document length, on a log scale.

    The val split is drawn if it has enough documents to have a shape. `edges` are those of
    `histogram_edges`, int64 (bins + 1,).
    """
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
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * 100:g} %"))
    axes.set_xlabel("tokens per document, with its end token")
    axes.set_ylabel("share per bin")
    axes.set_title(
        f"half of the {_short(train.num_documents)} train documents have at most "
        f"{_short(train.quantile(0.5))} tokens, 1 % have more than {_short(train.quantile(0.99))}",
        fontsize=10,
        color=_INK,
    )
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=150)
    return drawn.getvalue()


def _short(value: float) -> str:
    return amount(value).replace(".0", "")
