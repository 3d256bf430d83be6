"""Export to a Hugging Face directory, and import from one.

Results are written to an `.unfinished-` directory next to the target, flushed to disk, and renamed.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from raytrain_gpt.checkpoint.catalog import HASHES_FILE, IMPORT_FILE, ROWS_FILE, Draft
from raytrain_gpt.checkpoint.checkpoint_state import CheckpointState
from raytrain_gpt.checkpoint.open import open_checkpoint
from raytrain_gpt.config.kinds import BUILT_IN, Registry
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.model import GPT, GPT2_VOCAB_SIZE, GPTShape
from raytrain_gpt.core.registry import count_model
from raytrain_gpt.core.state import MODEL_FILE
from raytrain_gpt.data.library_tokenizer import is_qwens
from raytrain_gpt.data.order import ORDER_VERSION
from raytrain_gpt.data.tokenizer import MAX_VOCAB_SIZE, TOKENIZER_FILE, Tokenizer, load_tokenizer
from raytrain_gpt.data.tokenizer_file import open_tokenizer
from raytrain_gpt.errors import CheckpointError, ConfigError, DataError, failure_as
from raytrain_gpt.export.hf_gpt2 import shape_of_tensors
from raytrain_gpt.export.hf_weights import (
    HF_CONFIG_FILE,
    HF_WEIGHTS_FILE,
    NOT_IMPORTED,
    Imported,
    find_hf_weights,
    hf_config_files,
    hf_tensors,
    imported_entries,
    model_of,
    read_hf_config,
    read_hf_weights,
    read_imported,
)
from raytrain_gpt.export.model_card import CARD_FILE, IMPORT_EVENT, model_card
from raytrain_gpt.format import Log, amount, count, listed
from raytrain_gpt.storage.location import Location, LocationLike, force_to_disk, is_url
from raytrain_gpt.trackers.mlflow_run import track_export

UNFINISHED = ".unfinished-"
DType = Literal["fp32", "bf16"]
_DTYPES: dict[DType, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
_GUESSED_TOKENIZERS = {GPT2_VOCAB_SIZE: "gpt2", 257: "bytes"}
"""Vocabulary size -> tokenizer to assume if the weights have none."""
_TOKENIZERS = re.compile(r"(?i).*(token|vocab|merges|tekken|spiece|\.(model|spm|bpe)$)|encoder\.")
"""Names of files of a tokenizer without `tokenizer.json`."""


def export_checkpoint(
    path: LocationLike,
    out: str | Path,
    dtype: DType,
    log: Log,
    average: int = 1,
    registry: Registry = BUILT_IN,
) -> Path:
    """Write a directory that transformers loads, with tokenizer and model card; return its path.

    Args:
        path: A checkpoint or a run.
        out: A local directory, new or empty.
        average, registry: As in `open_checkpoint`.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or the directory is not empty.
        ConfigError: `out` is a URL.
    """
    if is_url(str(out)):
        raise ConfigError(f"{out} is a URL; export to a local directory and copy it there")
    place = Location.of(out)
    _check_free(place)
    checkpoint, config, model, encoding, _ = open_checkpoint(path, "cpu", log, average, registry)
    torch_name = str(_DTYPES[dtype]).removeprefix("torch.")
    shape, imported = read_imported(checkpoint, model.shape)
    eot, bos = encoding.eot_token, encoding.encode_prompt("")[0]
    with shape.kind.errors_as_line():
        config_files = hf_config_files(shape, eot, torch_name, imported, bos)
        tensors = hf_tensors(model, _DTYPES[dtype])
    num_parameters = sum(tensor.numel() for tensor in tensors.values())
    texts = {
        **config_files,
        **encoding.files,
        CARD_FILE: model_card(checkpoint, config, encoding.name, shape, num_parameters, dtype),
    }
    with staging_dir(place) as staging:
        directory = staging / place.name
        directory.mkdir()
        save_file(tensors, directory / HF_WEIGHTS_FILE, metadata={"format": "pt"})
        for name, text in texts.items():
            (directory / name).write_text(text, "utf-8")
        # safetensors makes the file readable for its owner only, unlike the other files.
        (directory / HF_WEIGHTS_FILE).chmod((directory / CARD_FILE).stat().st_mode)
        for file in directory.iterdir():
            force_to_disk(file)
        directory.rename(place.path)
    log(f"exported {checkpoint.path}: {shape_line(shape)}, {dtype}, tokenizer {encoding.name}")
    if shape.architecture == "qwen2" and not is_qwens(encoding):
        log(
            "transformers' AutoTokenizer gives other ids: it splits text of every qwen2 as Qwen does; use "
            "PreTrainedTokenizerFast, as the README there"
        )
    track_export(checkpoint.path.parent.parent, place.path, log)
    return place.path


def shape_line(shape: GPTShape) -> str:
    return (
        f"{shape.architecture}, {amount(count_model(shape).num_parameters)} parameters, "
        f"{shape.num_layers} layers, {shape.num_heads} heads, {shape.embd_size} channels, "
        f"context {shape.seq_len}, vocabulary {shape.vocab_size}"
    )


def import_weights(
    source: str | Path,
    out: str | Path,
    log: Log,
    *,
    tokenizer: str | None = None,
    eot: str | None = None,
) -> tuple[Location, GPTShape]:
    """Create a checkpoint from weights in Hugging Face's format; return it and its shape.

    The embedding is padded to a multiple of 64 rows; see `hf_weights.model_of`.

    Args:
        source: A Hugging Face directory, or a file of weights, beside its config.json or of a GPT-2.
        out: Directory or URL of the checkpoint, new or empty.
        tokenizer: Name; if None that beside the weights, else gpt2 or bytes by vocabulary size.
        eot: As in `open_tokenizer`.

    Raises:
        CheckpointError: weights are missing, damaged or not those of a plain model, or `out` is not empty.
        ConfigError: a size is out of range.
        DataError: the tokenizer is unknown, damaged, or has another vocabulary size.
    """
    if is_url(str(source)):
        raise ConfigError(f"{source} is a URL; copy it to a local directory and import that")
    directory, place = Location.of(source).path, Location.of(out)
    if not directory.exists():
        raise CheckpointError(f"{directory} does not exist; give a Hugging Face directory or file")
    _check_free(place)
    find_hf_weights(directory)
    home = directory if directory.is_dir() else directory.parent
    has_config = directory.is_dir() or (home / HF_CONFIG_FILE).is_file()
    config_shape = read_hf_config(home) if has_config else None
    if config_shape is not None:
        _config(config_shape)  # refuses impossible sizes before a model is allocated
    tensors = read_hf_weights(directory)
    shape = config_shape or shape_of_tensors(tensors, str(directory))
    model = model_of(tensors, str(directory), shape)
    if config_shape is None:
        log(f"no config.json; assuming {shape.num_heads} heads, one per 64 channels")
    imported = NOT_IMPORTED if config_shape is None else imported_entries(home, shape)
    encoding = _tokenizer(directory, tokenizer, shape.vocab_size, log, eot)
    _write(model, encoding, place, directory.name, imported)
    log(f"imported {directory}: {shape_line(model.shape)}, tokenizer {encoding.name}")
    return place, model.shape


def _tokenizer(source: Path, name: str | None, rows: int, log: Log, eot: str | None) -> Tokenizer:
    directory = Location.of(source if source.is_dir() else source.parent)
    file = directory / TOKENIZER_FILE
    if name is not None or file.is_file():
        encoding = open_tokenizer(str(file) if name is None else name, eot)
    elif others := sorted(filter(_TOKENIZERS.match, directory.names())):
        raise DataError(
            f"{directory} has {listed(others)}, but no {TOKENIZER_FILE}; add it: python -c 'from "
            'transformers import AutoTokenizer as T; T.from_pretrained(".").save_pretrained(".")\' '
            "in that directory, or set --tokenizer"
        )
    elif (guess := _GUESSED_TOKENIZERS.get(rows)) is None:
        raise DataError(
            f"{source} has no tokenizer, and no default one has {rows} ids; set --tokenizer"
        )
    else:
        log(
            f"no tokenizer with the weights; assuming {guess} from its {rows} ids "
            "(override with --tokenizer)"
        )
        encoding = load_tokenizer(guess)
    extra = rows - encoding.n_vocab
    if extra < 0 or rows > MAX_VOCAB_SIZE or (name and extra > max(128, rows // 16)):
        raise DataError(
            f"tokenizer {encoding.name} has {encoding.n_vocab} ids, but the weights of {source} have "
            f"{rows}; set --tokenizer to the one they were trained with"
        )
    if extra:
        log(f"{count(extra, 'row')} of the embedding without a token")
        encoding = encoding.with_rows(rows)
    return encoding


def _write(
    model: GPT,
    encoding: Tokenizer,
    place: Location,
    source: str,
    imported: Imported = NOT_IMPORTED,
) -> None:
    """Write the checkpoint next to its target and rename it, or upload it with its hashes last."""
    texts = {
        **encoding.files,
        ROWS_FILE: json.dumps({"step": 0, "event": IMPORT_EVENT, "source": source}) + "\n",
        **({IMPORT_FILE: json.dumps(imported, indent=1) + "\n"} if imported else {}),
    }
    write_model = partial(save_file, model.state_dict(), metadata={"format": "pt"})
    with staging_dir(place) as directory:
        draft = Draft(Location.of(directory), 0, "import")
        entries = {MODEL_FILE: draft.add(MODEL_FILE, write_model)}
        checkpoint = draft.commit(_state(model.shape, encoding), entries, texts)
        if place.is_local:
            checkpoint.path.rename(place.path)
            return
        for name in sorted(checkpoint.names(), key=lambda name: name == HASHES_FILE):
            (place / name).upload(checkpoint.path / name)


def _config(shape: GPTShape) -> Config:
    """Return the configuration of imported weights, or raise a ConfigError."""
    sequences = max(1, min(4, 4096 // max(1, shape.seq_len)))  # of GPT-2: 0.8 GB of logits
    return Config().updated(
        {
            **shape.fields,
            "data_path": "",
            "micro_batch_sequences": sequences,
            "global_batch_tokens": sequences * shape.seq_len,
            "run_name": "imported",
            "precision": "fp32",  # makes `eval` comparable to other programs
        }
    )


def _state(shape: GPTShape, encoding: Tokenizer) -> CheckpointState:
    return CheckpointState(
        step=0,
        next_batch=0,
        order_hash="",
        val_loss=None,
        tokens_seen=0,
        config=_config(shape).model_dump(),
        manifest_hash="",
        vocab_hash=encoding.hash,
        vocab_size=shape.vocab_size,
        order_version=ORDER_VERSION,
        num_workers=1,
    )


def _check_free(place: Location) -> None:
    if place.is_file() or place.names():
        raise CheckpointError(f"{place} exists and is not empty; set --out to a new directory")


@contextlib.contextmanager
def staging_dir(place: Location) -> Iterator[Path]:
    """Create a temporary directory on the same disk as `place`, or anywhere for an object store."""
    parent = place.path.parent if place.is_local else None
    advice = "; free space, or set another --out"
    with failure_as(CheckpointError, f"cannot write {place}", advice, SafetensorError):
        place.parent.mkdir()
        with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=parent) as directory:
            yield Path(directory)
