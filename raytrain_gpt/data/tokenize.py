"""From documents to shards: a plan made from the sources alone, and one task per shard of it.

1. `make_plan` lists the sources' pieces, groups them into tasks of about one shard of text each, and
   decides how documents are split. None of this depends on the number of workers.
2. `run_task` reads its pieces, tokenizes and writes at most one shard of each split. What it did
   stands in a small file of its own, so that a task that was done is never done again.
3. `finish` collects these files into the manifest, which is written last.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from dataclasses import asdict, dataclass
from typing import Any

import tiktoken

from raytrain_gpt.data.shards import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    ROW_GROUP_TOKENS,
    SPLITS,
    Manifest,
    Shard,
    ShardWriter,
    Split,
    read_manifest,
    write_manifest,
)
from raytrain_gpt.data.sources import Document, Piece, find_pieces, read_documents
from raytrain_gpt.data.storage import Location, Place
from raytrain_gpt.data.tokenizer import (
    TOKENIZER_FILE,
    encode_document,
    load_tokenizer,
    read_tokenizer,
    token_dtype,
    tokenizer_json,
    vocab_hash,
)
from raytrain_gpt.errors import DataError

SHARD_TOKENS = 100_000_000
MIN_TASKS = 64
"""A corpus of fewer full shards is cut into about this many smaller ones, so that all CPUs have work."""
MIN_TASK_BYTES = 2**22
TEXT_BYTES_PER_TOKEN = 4
"""Of vocabularies with merges, about; only decides how much text becomes one shard."""
TAIL_SPLIT_DOCUMENTS = 100
"""With fewer documents than this, the end of the text validates instead of whole documents."""
_EXACT_VAL_DOCUMENTS = 20
_DONE_DIR = "unfinished"


@dataclass(frozen=True)
class SplitRule:
    """Which split a document, or the part of it before and after a cut, belongs to.

    Attributes:
        hash_below: Validation is every document whose 64-bit hash is below this.
        cut_piece: Or the text is cut in the document of this piece …
        cut_position: … at this position …
        cut_offset: … before this byte of its UTF-8; 0: between documents.
        head_is_val: The part before the cut validates (`val_tokens`), not the one behind it.
    """

    hash_below: int = 0
    cut_piece: int | None = None
    cut_position: int = 0
    cut_offset: int = 0
    head_is_val: bool = False

    def parts(self, piece: int, name: str, document: Document) -> list[tuple[Split, str]]:
        """(split, text) of a document; two of them where it is cut."""
        if self.cut_piece is None:
            is_val = document_hash(name, document.position) < self.hash_below
            return [("val" if is_val else "train", document.text)]
        head: Split = "val" if self.head_is_val else "train"
        tail: Split = "train" if self.head_is_val else "val"
        here, cut = (piece, document.position), (self.cut_piece, self.cut_position)
        if here != cut or self.cut_offset == 0:
            return [(head if here < cut else tail, document.text)]
        text = document.text.encode("utf-8", "replace")
        before, behind = text[: self.cut_offset], text[self.cut_offset :]
        return [(head, before.decode()), (tail, behind.decode())]


@dataclass(frozen=True)
class Plan:
    """All that decides what the shards hold, byte for byte."""

    pieces: tuple[Piece, ...]
    tasks: tuple[tuple[int, int], ...]
    """Pieces [first, stop) of every task."""
    text_field: str
    split: SplitRule
    vocab_hash: str
    row_group_tokens: int

    @property
    def hash(self) -> str:
        """Changes when anything that decides the shards does."""
        content = asdict(self)
        for piece in content["pieces"]:  # how a file is reached does not change what it holds
            del piece["endpoint"], piece["retry_for_s"]
        text = json.dumps(content, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def document_hash(name: str, position: int) -> int:
    """64-bit hash that decides a document's split."""
    return int.from_bytes(
        hashlib.blake2b(f"{name}:{position}".encode(), digest_size=8).digest(), "big"
    )


def make_plan(
    sources: list[str],
    encoding: tiktoken.Encoding,
    *,
    text_field: str = "text",
    val_fraction: float = 0.01,
    val_tokens: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    row_group_tokens: int = ROW_GROUP_TOKENS,
) -> Plan:
    """The plan of a preparation.

    Raises:
        DataError: a source is missing or empty, or a split would be.
    """
    if shard_tokens < 1:
        raise DataError(f"shard_tokens={shard_tokens} is below 1; usual: {SHARD_TOKENS}")
    if not 0 < val_fraction < 1:
        raise DataError(f"val_fraction={val_fraction:g} is not between 0 and 1; usual: 0.01")
    pieces = find_pieces(sources, text_field)
    if val_tokens is not None:
        rule = _head_rule(pieces, text_field, encoding, val_tokens)
    else:
        rule = _fraction_rule(pieces, text_field, val_fraction)
    bytes_per_token = 1 if encoding.max_token_value <= 256 else TEXT_BYTES_PER_TOKEN
    total = sum(piece.text_bytes for piece in pieces)
    task_bytes = min(shard_tokens * bytes_per_token, max(MIN_TASK_BYTES, total // MIN_TASKS))
    return Plan(
        pieces=tuple(pieces),
        tasks=tuple(_group(pieces, task_bytes)),
        text_field=text_field,
        split=rule,
        vocab_hash=vocab_hash(encoding),
        row_group_tokens=row_group_tokens,
    )


def _group(pieces: list[Piece], task_bytes: int) -> list[tuple[int, int]]:
    tasks, first, size = [], 0, 0
    for i, piece in enumerate(pieces):
        size += piece.text_bytes
        if size >= task_bytes or i == len(pieces) - 1:
            tasks.append((first, i + 1))
            first, size = i + 1, 0
    return tasks


def _fraction_rule(pieces: list[Piece], text_field: str, fraction: float) -> SplitRule:
    """Few documents are counted and dealt exactly; many follow their hash."""
    enough = max(TAIL_SPLIT_DOCUMENTS, int(_EXACT_VAL_DOCUMENTS / fraction))
    hashes = []
    for piece in pieces:
        for document in read_documents(piece, text_field):
            hashes.append(document_hash(piece.name, document.position))
            if len(hashes) > enough:
                return SplitRule(hash_below=int(fraction * 2**64))
    if len(hashes) >= TAIL_SPLIT_DOCUMENTS:
        num_val = max(1, round(fraction * len(hashes)))
        return SplitRule(hash_below=heapq.nsmallest(num_val, hashes)[-1] + 1)
    return _tail_rule(pieces, text_field, fraction)


def _tail_rule(pieces: list[Piece], text_field: str, fraction: float) -> SplitRule:
    """Cut at the line end nearest before the last fraction of all text."""
    sizes = [
        (i, document.position, len(document.text.encode("utf-8", "replace")))
        for i, piece in enumerate(pieces)
        for document in read_documents(piece, text_field)
    ]
    total = sum(size for _, _, size in sizes)
    if total < 2:
        raise DataError(
            f"the sources hold {total} bytes of text, too little for two splits; add text"
        )
    left = min(total - 1, max(1, int(total * (1 - fraction))))
    at, position, _ = sizes[0]
    for at, position, size in sizes:  # noqa: B007, the document where the loop ends is cut
        if left < size:
            break
        left -= size
    for document in read_documents(pieces[at], text_field):
        if document.position == position:
            text = document.text.encode("utf-8", "replace")
    is_first = (at, position) == next((i, p) for i, p, size in sizes if size)
    offset = text.rfind(b"\n", 0, left) + 1
    if offset == 0 and is_first:
        offset = text.find(b"\n", left) + 1
    if offset in (0, len(text)) and is_first:
        head = text[:left].decode(errors="ignore") or text.decode()[0]
        offset = len(head.encode())
        if offset == total:
            raise DataError("the sources hold one character, too little for two splits; add text")
    return SplitRule(cut_piece=at, cut_position=position, cut_offset=offset)


def _head_rule(
    pieces: list[Piece], text_field: str, encoding: tiktoken.Encoding, val_tokens: int
) -> SplitRule:
    """The first documents, until they have `val_tokens` tokens, validate."""
    if val_tokens < 1:
        raise DataError(
            f"val_tokens={val_tokens} is below 1; set it to what validation should read"
        )
    tokens = 0
    for i, piece in enumerate(pieces):
        for document in read_documents(piece, text_field):
            if tokens >= val_tokens:
                return SplitRule(cut_piece=i, cut_position=document.position, head_is_val=True)
            tokens += len(encode_document(encoding, document.text))
    raise DataError(
        f"val_tokens={val_tokens} leaves no document to train on (the sources have {tokens} tokens); "
        "set a smaller val_tokens, or use val_fraction"
    )


def run_task(directory: Place, plan: Plan, task: int) -> dict[str, Any]:
    """Write the shards of one task, or find that they were written before.

    Returns:
        `text_bytes` read, `tokens` written, and manifest entries `shards`.

    Raises:
        DataError: a document cannot be read.
    """
    directory = Location.of(directory)
    done = directory / _DONE_DIR / f"{task:05d}.json"
    if done.exists():
        result: dict[str, Any] = json.loads(done.read_text())
        return result
    encoding = read_tokenizer(directory)
    dtype = token_dtype(encoding.max_token_value + 1)
    writers: dict[Split, ShardWriter] = {}
    try:
        for i in range(*plan.tasks[task]):
            for document in read_documents(plan.pieces[i], plan.text_field):
                for split, text in plan.split.parts(i, plan.pieces[i].name, document):
                    if split not in writers:
                        path = directory / f"{split}-{task:05d}.parquet"
                        writers[split] = ShardWriter(path, dtype, plan.row_group_tokens)
                    tokens = encode_document(encoding, text)
                    writers[split].add(tokens, len(text.encode("utf-8", "replace")))
        shards = [writers[split].close(split) for split in SPLITS if split in writers]
    except BaseException:
        for writer in writers.values():
            writer.discard()
        raise
    result = {
        "text_bytes": sum(shard.text_bytes for shard in shards),
        "tokens": sum(shard.tokens for shard in shards),
        "shards": [shard.model_dump() for shard in shards],
    }
    done.write_text(json.dumps(result))
    return result


def start(directory: Place, plan: Plan, encoding: tiktoken.Encoding) -> Manifest | None:
    """Make the directory ready for the tasks.

    What an interrupted preparation of the same plan finished stays; what another one left goes.

    Returns:
        The manifest, when this very dataset is already there whole.

    Raises:
        DataError: another dataset, or something else, is in the directory.
    """
    directory = Location.of(directory)
    if (directory / MANIFEST_FILE).exists():
        manifest = read_manifest(directory)
        if manifest.source.get("plan_hash") == plan.hash:
            return manifest
        raise DataError(
            f"{directory} already holds another dataset; choose another --out or remove that one"
        )
    plan_file = directory / _DONE_DIR / "plan"
    others = [name for name in directory.names() if not name.startswith(".")]
    if others and not plan_file.exists():
        raise DataError(f"{directory} is not empty and no dataset; choose another --out")
    if plan_file.exists() and plan_file.read_text() != plan.hash:
        directory.remove()
    plan_file.write_text(plan.hash)
    (directory / TOKENIZER_FILE).write_text(tokenizer_json(encoding))
    return None


def finish(
    directory: Place, plan: Plan, results: list[dict[str, Any]], source: dict[str, Any]
) -> Manifest:
    """Write the manifest: from now on the directory is a dataset.

    Raises:
        DataError: a split is empty.
    """
    directory = Location.of(directory)
    encoding = read_tokenizer(directory)
    vocab_size = encoding.max_token_value + 1
    shards = [Shard.model_validate(shard) for result in results for shard in result["shards"]]
    for split in SPLITS:
        if not any(shard.split == split for shard in shards):
            raise DataError(
                f"the {split} split of {directory} would be empty; change val_fraction or add text"
            )
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        tokenizer=encoding.name,
        vocab_hash=plan.vocab_hash,
        vocab_size=vocab_size,
        eot_token=encoding.eot_token,
        dtype="uint16" if vocab_size <= 2**16 else "uint32",
        row_group_tokens=plan.row_group_tokens,
        shards=tuple(sorted(shards, key=lambda shard: (SPLITS.index(shard.split), shard.path))),
        source={**source, "plan_hash": plan.hash},
    )
    write_manifest(directory, manifest)
    (directory / _DONE_DIR).remove()
    return manifest


def prepare_here(sources: list[str], directory: Place, tokenizer: str, **options: Any) -> Manifest:
    """Prepare a dataset in this process, without Ray: for small data and for tests."""
    encoding = load_tokenizer(tokenizer)
    plan = make_plan(sources, encoding, **options)
    manifest = start(directory, plan, encoding)
    if manifest is None:
        results = [run_task(directory, plan, task) for task in range(len(plan.tasks))]
        manifest = finish(directory, plan, results, {"sources": sources})
    return manifest
