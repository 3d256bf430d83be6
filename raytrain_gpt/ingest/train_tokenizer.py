"""Train a tokenizer on the training documents of a preparation: `prepare --tokenizer bpe:VOCAB_SIZE`.

Byte-level BPE with GPT-2's pattern, which Hugging Face, llama.cpp and tiktoken all read. `tokenizers` counts
words and merges pairs; ties go to the pair with the lowest ids, so the same text gives the same ids anywhere.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from itertools import chain

import regex  # type: ignore[import-untyped]
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from raytrain_gpt.config.call_options import PrepareOptions
from raytrain_gpt.data.prepare_plan import Plan, reader
from raytrain_gpt.data.split import document_hash
from raytrain_gpt.data.tokenizer import EOT, GPT2_PATTERN, Tiktoken, make_tiktoken, token_ranks
from raytrain_gpt.errors import DataError
from raytrain_gpt.format import Log, count, duration, size

_PREFIX = "bpe:"
_MAX_VOCAB_SIZE = 1_000_000
_SAMPLE_BYTES = 100_000_000
"""Bytes of text to train on, which takes seconds and bounds memory; more hardly changes 8,192 ids."""
_LEAST_PIECE_BYTES = 2**23
_MOST_TOKEN_BYTES = 64
"""Maximum bytes of a token; otherwise a line of a hundred dashes would become one."""
_TEXT_CHARACTERS = 2**16
"""Maximum length of a text, which is cut there, since `tokenizers` holds many bytes per character."""
_WORD_CHARACTERS = 2**8
"""Words are cut after two to three times this length: every merge in a word reads all of it."""
_WORD = regex.compile(GPT2_PATTERN)


def new_vocab_size(name: str) -> int | None:
    """Return the size in `bpe:VOCAB_SIZE`, or None for any other name; raises a DataError."""
    if not name.startswith(_PREFIX):
        return None
    digits = name.removeprefix(_PREFIX)
    if not (re.fullmatch("[0-9]{1,7}", digits) and 257 < int(digits) <= _MAX_VOCAB_SIZE):
        raise DataError(
            f"tokenizer {name} needs a vocabulary size from 258 to {_MAX_VOCAB_SIZE}, as in bpe:8192"
        )
    return int(digits)


def train_on_plan(plan: Plan, vocab_size: int, options: PrepareOptions, log: Log) -> Tiktoken:
    """Train on _SAMPLE_BYTES of a plan's training documents.

    Raises a DataError if their text is too little for `vocab_size`, or cannot be read.
    """
    started, num_documents, num_bytes = time.monotonic(), 0, 0

    def texts() -> Iterator[str]:
        nonlocal num_documents, num_bytes
        for text in sample(plan, options):
            num_documents, num_bytes = num_documents + 1, num_bytes + len(text.encode())
            yield text

    trained = train_bpe(texts(), vocab_size)
    log(
        f"trained {trained.name} on {size(num_bytes)} of {count(num_documents, 'training document')} "
        f"in {duration(time.monotonic() - started)}"
    )
    return trained


def sample(plan: Plan, options: PrepareOptions, max_bytes: int = _SAMPLE_BYTES) -> Iterator[str]:
    """Yield the text of training documents, up to `max_bytes` of UTF-8 in all.

    Chunks of the sources are read in the order of a hash, each up to its share, or _LEAST_PIECE_BYTES. With
    `dedupe` they are read from the start: only then is it known which of several duplicates is the first.
    """
    read, each = reader(options), max(_LEAST_PIECE_BYTES, max_bytes // len(plan.pieces))
    order: Sequence[int] = range(len(plan.pieces))
    if plan.dedupe:
        each = max_bytes
    else:
        order = sorted(
            order, key=lambda i: document_hash(plan.pieces[i].name, plan.pieces[i].start)
        )
    left = max_bytes
    for i in order:
        left_here, piece = min(each, left), plan.pieces[i]
        parts = (plan.split.parts(i, piece.name, document) for document in read(piece))
        for text in (text for split, text in chain.from_iterable(parts) if split == "train"):
            content = text.encode("utf-8", "replace")[:left_here]
            left_here, left = left_here - len(content), left - len(content)
            yield content.decode(errors="ignore")
            if left_here <= 0:
                break
        if left <= 0:
            return


def _pieces(texts: Iterable[str], stopped: threading.Event) -> Iterator[str]:
    """Cut texts to _TEXT_CHARACTERS, and a word at the end of each _WORD_CHARACTERS that it fills."""
    for text in texts:
        start = 0
        for stop in range(_WORD_CHARACTERS, len(text) + 1, _WORD_CHARACTERS):
            if stopped.is_set():
                raise KeyboardInterrupt
            word = _WORD.match(text, stop - _WORD_CHARACTERS, stop)
            if word.end() == stop or stop - start >= _TEXT_CHARACTERS:
                yield text[start:stop]
                start = stop
        yield text[start:]


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tiktoken:
    """Train a byte-level BPE: 256 bytes, merges in the order of their ids, `<|endoftext|>` as the last id.

    Raises:
        DataError: the texts have too few pairs for `vocab_size`.
    """
    # Otherwise it warns when a cluster starts.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=2,
        initial_alphabet=ByteLevel.alphabet(),
        max_token_length=_MOST_TOKEN_BYTES,
        show_progress=False,
    )
    result, stopped = Future[None](), threading.Event()

    def train() -> None:
        try:
            tokenizer.train_from_iterator(_pieces(texts, stopped), trainer)
            result.set_result(None)
        except BaseException as error:
            result.set_exception(error)

    try:
        # Python handles Ctrl+C only in the main thread, and not while `tokenizers` runs there.
        threading.Thread(target=train, daemon=True).start()
        result.result()
    except BaseException:
        stopped.set()
        # If the thread still read texts when Python exits, the process would abort.
        wait([result], 1)
        raise
    ranks = token_ranks(tokenizer.get_vocab())
    if len(ranks) < vocab_size - 1:
        raise DataError(
            f"the training text is enough for {len(ranks) + 1} ids, not for {_PREFIX}{vocab_size}; use "
            f"{_PREFIX}{len(ranks) + 1}, or add text"
        )
    return make_tiktoken(f"{_PREFIX}{vocab_size}", GPT2_PATTERN, ranks, {EOT: len(ranks)})
