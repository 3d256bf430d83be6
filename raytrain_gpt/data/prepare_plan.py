"""The plan of a preparation: chunks of sources, tasks and the split rule.

It depends only on the sources and options, not on the number of workers. A task is about one shard of text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice

from raytrain_gpt.config.call_options import PrepareOptions
from raytrain_gpt.data.documents import BadDocuments, Document, SourcePiece, read_documents
from raytrain_gpt.data.duplicates import only_first
from raytrain_gpt.data.imports import read_ids
from raytrain_gpt.data.shards import ROW_GROUP_TOKENS
from raytrain_gpt.data.sources import find_pieces
from raytrain_gpt.data.split import ReadDocuments, SplitRule, id_rule, is_named_val, text_rule
from raytrain_gpt.data.tokenizer import Tokenizer
from raytrain_gpt.errors import DataError
from raytrain_gpt.format import Log, listed

MIN_TASKS = 64
"""Approximate number of shards of a small corpus, so that all CPUs have work."""
MIN_TASK_BYTES = 2**22
_TEXT_BYTES_PER_TOKEN = 4
"""Estimate for vocabularies with merges; only affects the text per shard."""


@dataclass(frozen=True)
class Plan:
    """Everything that determines the bytes of the shards.

    Attributes:
        tasks: Index range [first, stop) in `pieces` of every task.
        dedupe: Drop documents with the same text as an earlier one.
        document_separator: Text between the documents of a text file, or None for one document per file.
        num_skipped: Number of files that are not read.
    """

    pieces: tuple[SourcePiece, ...]
    tasks: tuple[tuple[int, int], ...]
    text_field: str
    split: SplitRule
    vocab_hash: str
    row_group_tokens: int
    dedupe: bool
    document_separator: str | None = None
    num_skipped: int = 0

    @property
    def hash(self) -> str:
        content = asdict(self)
        del content["num_skipped"]
        # Without what earlier versions lacked, so that their datasets keep their hash.
        if self.document_separator is None:
            del content["document_separator"]
        for piece in content["pieces"]:  # access settings do not change the content
            piece["path"] = piece.pop("location")["url"]
            if piece["num_documents"] is None:
                del piece["num_documents"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def commits(self) -> dict[str, list[str]]:
        """Manifest entry with OWNER/NAME@COMMIT of datasets on the hub, or empty without any."""
        urls = (piece.location.url for piece in self.pieces)
        paths = (url.split("/") for url in urls if url.startswith("hf://"))
        commits = sorted({f"{owner}/{name}" for _, _, _, owner, name, *_ in paths})
        return {"hub_commits": commits} if commits else {}


def make_plan(
    sources: list[str],
    tokenizer: Tokenizer | None,
    options: PrepareOptions,
    log: Log,
    row_group_tokens: int = ROW_GROUP_TOKENS,
) -> Plan:
    """Make the plan of a preparation; `max_bad_documents` does not change it.

    Args:
        tokenizer: The tokenizer, or None to train one; then the plan has no `vocab_hash` yet.

    Raises:
        DataError: a source is missing or empty, a split would be empty, or there is no text to train on.
    """
    skipped, val = list[str](), [] if options.val is None else [options.val]
    num_val = len(find_pieces(val, options, lambda _: None)) if val else 0
    # Together, so that repeated names are numbered.
    both = find_pieces([*sources, *val], options, log, skipped)
    val_pieces = both[len(both) - num_val :]
    val_files = {_file(piece) for piece in val_pieces}
    pieces = [p for p in both[: len(both) - num_val] if _file(p) not in val_files]
    if not pieces:
        raise DataError(
            f"all files of the sources are also in --val {options.val}; add text to train on"
        )
    pieces = _first_documents(pieces, options) + val_pieces
    dedupe = options.dedupe == "exact"
    read = reader(options)
    is_import = pieces[0].ids is not None
    if tokenizer is None and is_import:
        raise DataError(
            f"{pieces[0].location} contains token ids, but a new tokenizer needs text; set --tokenizer to "
            "the one that made them"
        )
    if tokenizer is None and options.val_tokens is not None:
        raise DataError(
            f"val_tokens={options.val_tokens} counts tokens of a tokenizer that is not trained yet; use "
            "--val_fraction or --val"
        )
    if is_import and dedupe:
        raise DataError(
            f"{pieces[0].location} contains token ids, but dedupe compares text; remove --dedupe"
        )
    if num_val:
        rule = SplitRule(cut_piece=len(pieces) - num_val)
    elif is_import:
        assert tokenizer is not None
        rule = id_rule(pieces, partial(read_ids, tokenizer=tokenizer), tokenizer.eot_token, options)
    else:
        rule = text_rule(pieces, read, tokenizer, options, log)
    if rule.by_name:
        named = sorted({piece.location.name for piece in pieces if is_named_val(piece.name)})
        log(f"validation split by file names: {listed(named)} (override with --val_fraction)")
    is_bytes = tokenizer is not None and tokenizer.n_vocab <= 257 and not is_import
    bytes_per_token = 1 if is_bytes else _TEXT_BYTES_PER_TOKEN
    total = sum(piece.text_bytes for piece in pieces)
    task_bytes = min(
        options.shard_tokens * bytes_per_token, max(MIN_TASK_BYTES, total // MIN_TASKS)
    )
    return Plan(
        pieces=tuple(pieces),
        tasks=tuple(_group(pieces, task_bytes)),
        text_field=options.text_field,
        split=rule,
        vocab_hash="" if tokenizer is None else tokenizer.hash,
        row_group_tokens=row_group_tokens,
        dedupe=dedupe,
        document_separator=options.document_separator,
        num_skipped=len(skipped),
    )


def _file(piece: SourcePiece) -> object:
    """Return the identity of a file: its path without links, or its URL."""
    return piece.location.path.resolve() if piece.location.is_local else piece.location


def _first_documents(pieces: list[SourcePiece], options: PrepareOptions) -> list[SourcePiece]:
    """Keep the chunks of the first `max_documents`; the last one may be cut."""
    left, kept = options.max_documents, list[SourcePiece]()
    if left is None:
        return pieces
    read = reader(options.model_copy(update={"dedupe": "none"}))  # duplicates are dropped later
    for piece in pieces:
        if piece.ids is not None:
            raise DataError(
                f"{piece.location} contains token ids, but max_documents={left} counts texts; remove it"
            )
        found = sum(1 for _ in islice(read(piece), left))
        kept.append(replace(piece, num_documents=found))
        left -= found
        if left == 0:
            break
    return kept


def reader(options: PrepareOptions) -> ReadDocuments:
    """Return a function that reads a chunk's documents ahead of the tasks, as `dedupe` says."""

    def read_all(piece: SourcePiece) -> Iterator[Document]:
        # Only tasks count against the limit: some documents are read twice here.
        bad = BadDocuments(None if options.max_bad_documents else 0)
        return read_documents(piece, options.text_field, bad, options.document_separator)

    return only_first(read_all) if options.dedupe == "exact" else read_all


def _group(pieces: list[SourcePiece], task_bytes: int) -> list[tuple[int, int]]:
    tasks, first, size = [], 0, 0
    for i, piece in enumerate(pieces):
        size += piece.text_bytes
        if size >= task_bytes or i == len(pieces) - 1:
            tasks.append((first, i + 1))
            first, size = i + 1, 0
    return tasks
