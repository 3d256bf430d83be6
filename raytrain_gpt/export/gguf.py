"""Export to one GGUF file for llama.cpp and programs built on it.

llama.cpp's package `gguf` implements the format and maps transformers' names to llama.cpp's. `Linear` stores
(out, in) like llama.cpp, and a file without a head has a tied one.
Source: ggml, "GGUF", and llama.cpp's `llama-vocab.cpp`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType
from gguf.constants import MODEL_ARCH_NAMES
from gguf.tensor_mapping import get_tensor_name_map
from tokenizers import Tokenizer as LibraryTokenizer

from raytrain_gpt.checkpoint.open import open_checkpoint
from raytrain_gpt.config.kinds import BUILT_IN, Registry
from raytrain_gpt.core.model import GPT
from raytrain_gpt.data.library_tokenizer import (
    CONFIG_FILE,
    GPT2,
    TEMPLATE_FILE,
    numbers_of_parts,
    split_of,
)
from raytrain_gpt.data.tokenizer import EOT, TOKENIZER_FILE, Tokenizer
from raytrain_gpt.errors import CheckpointError, ConfigError, DataError
from raytrain_gpt.export.hf_weights import HF_CONFIG_FILE, mapping_of, read_imported, unpadded
from raytrain_gpt.export.huggingface import DType, shape_line, staging_dir
from raytrain_gpt.format import Log
from raytrain_gpt.storage.location import Location, LocationLike, force_to_disk, is_url

_SUFFIX = ".gguf"


def export_gguf(
    path: LocationLike,
    out: str | Path,
    dtype: DType,
    log: Log,
    average: int = 1,
    registry: Registry = BUILT_IN,
) -> Path:
    """Write a file that llama.cpp loads, including the tokenizer; return its path.

    Args:
        path: A checkpoint or a run.
        out: A new local file with suffix .gguf, or a directory for RUN_NAME.gguf.
        dtype: Type of the matrices; vectors and learned positions are fp32, as llama.cpp expects.
        average, registry: As in `open_checkpoint`.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or the file exists.
        ConfigError: `out` is a URL.
        DataError: llama.cpp would tokenize texts differently.
    """
    if is_url(str(out)):
        raise ConfigError(f"{out} is a URL; export to a local file and copy it there")
    place = Location.of(out)
    is_directory = str(out).endswith("/") or place.path.is_dir() or not place.name.endswith(_SUFFIX)
    if not is_directory:
        _check_new(place)
    checkpoint, config, model, encoding, _ = open_checkpoint(path, "cpu", log, average, registry)
    if is_directory:
        place /= f"{config.run.run_name}{_SUFFIX}"
        _check_new(place)
    mapping = mapping_of(model.shape, "to_hf", "add_gguf_sizes")
    name = getattr(mapping, "GGUF_NAME", model.shape.architecture)
    if name not in MODEL_ARCH_NAMES.values():
        raise ConfigError(
            f"llama.cpp has no architecture {name}; set GGUF_NAME, or use --format hf"
        )
    writer = GGUFWriter(None, name)
    writer.add_name(config.run.run_name)
    _add_tokenizer(writer, encoding)
    shape, imported = read_imported(checkpoint, model.shape)
    for key, own, add in (
        ("bos_token_id", encoding.encode_prompt("")[0], writer.add_bos_token_id),
        ("eos_token_id", encoding.eot_token, writer.add_eos_token_id),
        ("pad_token_id", None, writer.add_pad_token_id),
    ):
        one = imported.get(HF_CONFIG_FILE, {}).get(key)
        one = one[0] if isinstance(one, list) and one else one
        is_usable = type(one) is int and 0 <= one < encoding.n_vocab
        if key == "bos_token_id" and len(encoding.before):  # llama.cpp begins every text with it
            is_usable = False
        if (one := one if is_usable else own) is not None:
            add(one)
    with shape.kind.errors_as_line():
        writer.add_context_length(shape.seq_len)
        writer.add_embedding_length(shape.embd_size)
        writer.add_block_count(shape.num_layers)
        writer.add_head_count(shape.num_heads)
        mapping.add_gguf_sizes(writer, shape)
        _add_tensors(writer, model, mapping, dtype)
    with staging_dir(place) as directory:
        file = directory / place.name
        writer.write_header_to_file(file)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        force_to_disk(file)
        file.rename(place.path)
    log(f"exported {checkpoint.path}: {shape_line(shape)}, {dtype}, tokenizer {encoding.name}")
    return place.path


def _check_new(file: Location) -> None:
    if os.path.lexists(file.path):
        raise CheckpointError(f"{file} exists; set --out to a new file")


def _add_tokenizer(writer: GGUFWriter, tokenizer: Tokenizer) -> None:
    """Add the tokenizer as byte-level BPE, which llama.cpp splits into words by the name of its family.

    llama.cpp refuses a vocabulary without merges such as `bytes`, so add one that never applies, since words
    are split into single bytes first.
    """
    files = tokenizer.files
    content, config = (json.loads(files.get(n, "{}")) for n in (TOKENIZER_FILE, CONFIG_FILE))
    model, split, begin = content["model"], split_of(content), tokenizer.before.tolist()
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    if not merges:
        split = GPT2
    # llama.cpp matches words that merges do not produce in this family only.
    matches = split is not None and split.llama_cpp == "llama-bpe"
    is_other = bool(model.get("ignore_merges")) != matches and not _merges_make_all(content)
    if split is None or is_other or len(begin) > 1:
        raise DataError(
            f"tokenizer {tokenizer.name} is not BPE like that of GPT-2, SmolLM2, Llama 3 or Qwen2, the only "
            "kinds llama.cpp tokenizes identically; use --format hf"
        )
    if content.get("normalizer"):
        raise DataError(
            f"tokenizer {tokenizer.name} normalizes text, which llama.cpp does not; use --format hf, and "
            "llama.cpp's convert_hf_to_gguf.py if all your text is normalized"
        )
    tokens = [f"[UNUSED_{i}]" for i in range(tokenizer.n_vocab)]
    types = [TokenType.UNUSED] * tokenizer.n_vocab
    for text, i in model["vocab"].items():
        tokens[i], types[i] = text, TokenType.NORMAL
    for added in content["added_tokens"]:
        kind = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
        tokens[added["id"]], types[added["id"]] = added["content"], kind
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split.llama_cpp)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges or [f"{EOT} {EOT}"])
    writer.add_add_bos_token(bool(begin))
    template = files.get(TEMPLATE_FILE, config.get("chat_template"))
    if isinstance(template, str):
        writer.add_chat_template(template)


def _merges_make_all(content: dict[str, Any]) -> bool:
    """Whether merging the bytes of each word of a tokenizer.json makes it."""
    added = {token["content"] for token in content["added_tokens"]}
    library = LibraryTokenizer.from_str(json.dumps(content))
    return numbers_of_parts(library, content["model"]["vocab"].keys() - added) == {1}


def _add_tensors(writer: GGUFWriter, model: GPT, mapping: Any, dtype: DType) -> None:
    is_bf16 = dtype == "bf16"
    writer.add_file_type(LlamaFileType.MOSTLY_BF16 if is_bf16 else LlamaFileType.ALL_F32)
    shape, architectures = model.shape, {name: one for one, name in MODEL_ARCH_NAMES.items()}
    names = get_tensor_name_map(architectures[writer.arch], shape.num_layers)
    to_gguf = getattr(mapping, "to_gguf", lambda name, tensor, shape: tensor)
    for name, tensor in unpadded(model):
        in_hf = mapping.to_hf(name, tensor)[0]
        in_gguf = names.get_name(in_hf, try_suffixes=(".weight", ".bias"))
        if in_gguf is None:
            raise ConfigError(f"llama.cpp's {writer.arch} has no {in_hf}; use --format hf")
        tensor = to_gguf(name, tensor, shape)
        if is_bf16 and tensor.dim() == 2 and name != "wpe.weight":
            values = tensor.to(torch.bfloat16).view(torch.uint8).numpy()
            writer.add_tensor(in_gguf, values, raw_dtype=GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(in_gguf, tensor.float().numpy())
