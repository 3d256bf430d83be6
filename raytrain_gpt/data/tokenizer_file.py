"""Find and read tokenizers: by name, or a `tokenizer.json` of a dataset, checkpoint or another program."""

from __future__ import annotations

import base64
import hashlib
from functools import lru_cache
from typing import Any

from raytrain_gpt.data.documents import refuse_lfs_pointer
from raytrain_gpt.data.library_tokenizer import (
    CONFIG_FILE,
    GPT2,
    TEMPLATE_FILE,
    UNSPLIT,
    FileTokenizer,
    Unsupported,
    merged_ids,
    steps_of,
)
from raytrain_gpt.data.tokenizer import (
    BYTES,
    EOT,
    GPT2_PATTERN,
    OWN_KEY,
    TOKENIZER_FILE,
    Tiktoken,
    Tokenizer,
    load_tokenizer,
    make_tiktoken,
    token_ranks,
    tokenizer_names,
)
from raytrain_gpt.errors import DataError, damage_as
from raytrain_gpt.parsing import parse_json
from raytrain_gpt.storage.location import Location, LocationLike

_MAX_BYTES = 2**26
"""Limit of a file, twice the largest of known models."""
_GPT2_RANKS_SHA256 = "b580654d2e5d585af6dcee97b9cdd3a14a00503812dd6b9d4ea23a20da8bf49f"
"""Hash of GPT-2's tokens in order of rank: one line of hex per token."""


def open_tokenizer(name: str, eot: str | None = None) -> Tokenizer:
    """Load a tokenizer by name, or from a `tokenizer.json` or a directory with one.

    Args:
        eot: Token that ends documents; by default the one that the files name.

    Raises:
        DataError: as `load_tokenizer` and `read_tokenizer_file`.
    """
    place = Location.of(name)
    file = place if place.is_file() else place / TOKENIZER_FILE
    is_named = name in tokenizer_names() or not file.is_file()
    found = load_tokenizer(name) if is_named else read_tokenizer_file(file, eot)
    if isinstance(found, Tiktoken):
        check_eot(name, eot)
    return found


def check_eot(name: str, eot: str | None) -> None:
    """Raise a DataError if a tokenizer of tiktoken is to end documents with another token than its own."""
    if eot not in (None, EOT):
        raise DataError(f"tokenizer {name} ends documents with {EOT}, not {eot}; remove --eot")


def read_tokenizer(directory: LocationLike) -> Tokenizer:
    """Read a dataset's or checkpoint's tokenizer; raises a DataError if it is missing or damaged."""
    return read_tokenizer_file(Location.of(directory) / TOKENIZER_FILE)


def read_tokenizer_file(path: Location, eot: str | None = None) -> Tokenizer:
    """Read a `tokenizer.json` of ours, of any version, or of another program, with the files beside it.

    Raises a DataError if the file is damaged or of a kind that is not supported.
    """
    advice = (
        "; use another --tokenizer or checkpoint, or repeat the command that prepared the dataset"
    )
    try:
        with damage_as(DataError, f"tokenizer {path}", advice):
            refuse_lfs_pointer(path)
            if (num_bytes := path.size_bytes()) > _MAX_BYTES:
                raise Unsupported(f"it has {num_bytes} bytes, above {_MAX_BYTES}")
            text = path.read_text()
            content = parse_json(text)
            if "ranks" in content:
                return _of_first_format(content)
            if found := _tiktoken_of(content, text):
                return found
            beside = {name: path.parent / name for name in (CONFIG_FILE, TEMPLATE_FILE)}
            texts = {}
            for name, file in beside.items():
                if file.is_file():
                    with damage_as(DataError, file, advice):
                        texts[name] = file.read_text()
            return _file_tokenizer(((TOKENIZER_FILE, text), *texts.items()), eot)
    except RecursionError:
        raise DataError(f"tokenizer {path} is damaged (it nests too deeply){advice}") from None
    except Unsupported as error:
        raise DataError(
            f"tokenizer {path} is not supported ({error}); set --tokenizer to one with the same ids"
        ) from None


@lru_cache(maxsize=1)
def _file_tokenizer(texts: tuple[tuple[str, str], ...], eot: str | None) -> FileTokenizer:
    """Load a tokenizer, cached: it takes as long as tokenizing a few megabytes."""
    return FileTokenizer(dict(texts), eot)


def _of_first_format(content: dict[str, Any]) -> Tiktoken:
    """Convert the content of a file of our first format: name, pattern, tokens with their ids."""
    ranks = {base64.b64decode(token): rank for token, rank in content["ranks"]}
    if len(ranks) < len(content["ranks"]):
        raise ValueError("it has a token twice")
    return make_tiktoken(content["name"], content["pattern"], ranks, content["special_tokens"])


def _tiktoken_of(content: dict[str, Any], text: str) -> Tiktoken | None:
    """Return the tokenizer of a file that we wrote, or of GPT-2's and that of `bytes`, else None."""
    model, added = content["model"], content.get("added_tokens", [])
    if "merges" not in model:
        return None
    special = {str(token["content"]): int(token["id"]) for token in added}
    vocabulary = {text: i for text, i in model["vocab"].items() if text not in special}
    if (own := model.get(OWN_KEY)) is not None:
        ranks = token_ranks({text: int(i) for text, i in vocabulary.items()})
        return make_tiktoken(own["name"], own["pattern"], ranks, special, text)
    steps = steps_of(content.get("pre_tokenizer"))
    is_like_ours = [*special] == [EOT] and content.get("normalizer") is None
    if not is_like_ours or not BYTES.keys() >= {*"".join(vocabulary)}:
        return None
    ranks, merged = token_ranks(vocabulary), merged_ids(model)
    by_bytes = load_tokenizer("bytes")
    if steps == [UNSPLIT] and not merged and special[EOT] == 256:
        return by_bytes if ranks == by_bytes.encoding._mergeable_ranks else None
    if steps == GPT2.steps and merged == [*range(256, special[EOT])]:
        lines = "".join(f"{token.hex()}\n" for token in ranks)
        if hashlib.sha256(lines.encode()).hexdigest() == _GPT2_RANKS_SHA256:
            return make_tiktoken("gpt2", GPT2_PATTERN, ranks, special)
    return None
