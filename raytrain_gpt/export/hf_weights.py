"""Convert a model's settings and tensors to and from Hugging Face's files; exports omit padded rows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from raytrain_gpt.checkpoint.catalog import IMPORT_FILE, Checkpoint
from raytrain_gpt.core.model import GPT, GPTShape
from raytrain_gpt.core.registry import new_model
from raytrain_gpt.data.documents import refuse_lfs_pointer
from raytrain_gpt.data.library_tokenizer import CONFIG
from raytrain_gpt.data.tokenizer import EOT
from raytrain_gpt.errors import CheckpointError, ConfigError, damage_as, failure_as
from raytrain_gpt.export import hf_gpt2
from raytrain_gpt.export.hf_llama import Llama, Qwen2, Qwen3
from raytrain_gpt.format import listed
from raytrain_gpt.parsing import parse_json

HF_CONFIG_FILE = "config.json"
_GENERATION_FILE = "generation_config.json"
ARCHITECTURES: dict[str, Any] = {"gpt2": hf_gpt2, "llama": Llama, "qwen2": Qwen2, "qwen3": Qwen3}
"""Architecture, the same as Hugging Face's `model_type` -> module or class that converts its files."""
HF_WEIGHTS_FILE = "model.safetensors"
_NOT_KEPT = {"architectures", "auto_map", "dtype", "model_type", "torch_dtype"}
"""Keys of an import's `config.json` that are not true of an export, or name code."""
_MAX_CONTEXT = 2**24
_EMBEDDING, _HEAD = "wte.weight", "lm_head.weight"
_WRAPPED = re.compile(r"(|.*?\.)(?:(?:transformer\.)?wte|(?:model\.)?embed_tokens)\.weight")
"""Embedding after a prefix that is not transformers', such as `_orig_mod.` of torch.compile."""
_NO_PICKLES = (
    "pickles are not read; convert them with transformers' save_pretrained or, those of other programs, with "
    "python -c 'import sys, torch, safetensors.torch as s; d = torch.load(sys.argv[1], weights_only=True); "
    'd = d.get("model", d); s.save_file({k: v.clone() for k, v in d.items()}, "model.safetensors")\' FILE'
)


def mapping_of(shape: GPTShape, *needed: str) -> Any:
    """Return the module or user's class that converts an architecture's files; may raise ConfigError."""
    mapping = ARCHITECTURES.get(shape.architecture) or shape.kind.resolve()
    if missing := [name for name in needed if not hasattr(mapping, name)]:
        raise ConfigError(
            f"architecture {shape.architecture} has no export mapping; add {', '.join(missing)} to its "
            "class, see docs/extending.md"
        )
    return mapping


Imported = Mapping[str, Any]
"""File name -> what imported weights came with beyond their shape, or None without such a file."""
NOT_IMPORTED: Imported = {}


def read_imported(checkpoint: Checkpoint, shape: GPTShape) -> tuple[GPTShape, Imported]:
    """Return the shape to export, with the context of an import, and what the import came with."""
    path = checkpoint.path / IMPORT_FILE
    if IMPORT_FILE not in checkpoint.file_names:
        return shape, NOT_IMPORTED
    with damage_as(CheckpointError, path):
        imported = dict(parse_json(path.read_bytes()))
        theirs = {k: v for k, v in imported[HF_CONFIG_FILE].items() if k not in _NOT_KEPT}
        context = max(shape.seq_len, int(theirs.get("max_position_embeddings", 0)))
        if context > _MAX_CONTEXT:
            raise ValueError(f"a context of {context} is above {_MAX_CONTEXT}")
    return replace(shape, seq_len=context), {**imported, HF_CONFIG_FILE: theirs}


def hf_config_files(
    shape: GPTShape,
    eot_token: int,
    dtype: str,
    imported: Imported = NOT_IMPORTED,
    bos_token: int | None = None,
) -> dict[str, str]:
    """Return name -> content of the files besides tensors; `dtype` is torch's name, such as `bfloat16`."""
    of_shape = mapping_of(shape, "config_of", "to_hf").config_of(shape)
    bos_token = eot_token if bos_token is None else bos_token
    ends = {"bos_token_id": bos_token, "eos_token_id": eot_token}
    own = {**of_shape, "use_cache": True, **ends}
    # Without a padding id, transformers uses eos and warns at every call.
    generation = {**ends, "pad_token_id": eot_token, "do_sample": True}
    tokenizer = {
        **CONFIG,
        "bos_token": EOT,
        "eos_token": EOT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.seq_len,
    }
    contents = {
        HF_CONFIG_FILE: {**own, **imported.get(HF_CONFIG_FILE, {}), "torch_dtype": dtype},
        _GENERATION_FILE: imported.get(_GENERATION_FILE, generation),
        "tokenizer_config.json": tokenizer,
    }
    return {name: json.dumps(one, indent=2) + "\n" for name, one in contents.items() if one}


def read_hf_config(directory: Path) -> GPTShape:
    """Read the shape of a directory; raises a CheckpointError unless it is that of a plain model."""
    path = directory / HF_CONFIG_FILE
    if not path.exists():
        raise CheckpointError(
            f"{directory} has no {HF_CONFIG_FILE}; give a Hugging Face directory, or a file of weights"
        )
    only = "only plain GPT-2, Llama, Mistral, Qwen2 and Qwen3 models can be imported"
    with damage_as(CheckpointError, path):
        refuse_lfs_pointer(path)
        content = parse_json(path.read_bytes())
        kind = content.get("model_type", "gpt2")
        if (theirs := {**ARCHITECTURES, "mistral": Llama}.get(kind)) is None:
            raise CheckpointError(f"{path} has model_type={kind!r}; {only}")
        for key, plain in theirs.plain_values(content).items():
            value = content.get(key, plain[0])
            if value not in plain:
                raise CheckpointError(
                    f"{path} has {key}={value!r}, a plain {theirs.NAME} has {plain[0]!r}; {only}"
                )
        shape: GPTShape = theirs.shape_of(content)
        if not 0 <= shape.dropout < 1:
            raise ValueError(f"a dropout of {shape.dropout} is not in [0, 1)")
        return shape


def imported_entries(directory: Path, shape: GPTShape) -> Imported:
    """Return what an export of a directory's weights will need; raises a CheckpointError for damage."""
    found: dict[str, Any] = dict.fromkeys((HF_CONFIG_FILE, _GENERATION_FILE))
    for path in (directory / name for name in found):
        if path.is_file():
            with damage_as(CheckpointError, path):
                found[path.name] = dict(parse_json(path.read_bytes()))
    ours = mapping_of(shape).config_of(shape) | {"max_position_embeddings": None}
    theirs = found[HF_CONFIG_FILE].items()
    return {**found, HF_CONFIG_FILE: {k: v for k, v in theirs if k not in ours or ours[k] != v}}


def hf_tensors(model: GPT, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a model's tensors for transformers; a tied head is only the embedding."""
    mapping = mapping_of(model.shape)
    pairs = [mapping.to_hf(*item) for item in unpadded(model)]
    if len(named := dict(pairs)) < len(pairs):
        raise ConfigError(f"to_hf of {model.shape.architecture} gives two tensors the same name")
    return {name: tensor.to("cpu", dtype).contiguous() for name, tensor in named.items()}


def unpadded(model: GPT) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of each parameter, without padded rows of embedding and head."""
    for name, parameter in model.named_parameters():
        is_padded = parameter is model.wte.weight or parameter is model.head_weight
        yield name, parameter.detach()[: model.shape.vocab_size if is_padded else None]


def find_hf_weights(path: Path) -> list[Path]:
    """Return the weights files of a directory, or the file itself, or raise a CheckpointError."""
    if not path.is_dir():
        if path.suffix != ".safetensors":
            raise CheckpointError(
                f"{path} is neither a Hugging Face directory nor a .safetensors file; {_NO_PICKLES}"
            )
        return [path]
    if (path / HF_WEIGHTS_FILE).is_file():
        return [path / HF_WEIGHTS_FILE]
    index = path / f"{HF_WEIGHTS_FILE}.index.json"
    if not index.is_file():
        raise CheckpointError(f"{path} has no {HF_WEIGHTS_FILE}; {_NO_PICKLES}")
    with damage_as(CheckpointError, index):
        refuse_lfs_pointer(index)
        names = sorted(set(parse_json(index.read_bytes())["weight_map"].values()))
        if any(Path(name).name != name for name in names):
            raise ValueError("it names a file outside the directory")
    return [path / name for name in names]


def read_hf_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a directory or file, without a prefix of all; may raise a CheckpointError."""
    tensors: dict[str, Tensor] = {}
    for file in find_hf_weights(path):
        with failure_as(CheckpointError, f"cannot read {file}", "", SafetensorError):
            refuse_lfs_pointer(file)
            tensors |= load_file(file)
    prefix = next((match[1] for match in map(_WRAPPED.fullmatch, tensors) if match), "")
    is_of_all = all(name.startswith(prefix) for name in tensors)
    return {name.removeprefix(prefix * is_of_all): tensor for name, tensor in tensors.items()}


def model_of(hf: Mapping[str, Tensor], where: str, shape: GPTShape) -> GPT:
    """Build the fp32 model with the tensors of a Hugging Face file.

    Padded rows of the head are copies of the lowest-probability token's row: rows of zeros would have logits
    of 0, far above those of a trained GPT-2.

    Args:
        hf: The tensors, optionally with a tied head; GPT-2's names may lack their prefix.
        where: Their source, for messages.

    Raises:
        CheckpointError: a tensor is missing, unknown, not finite, or has a wrong shape.
    """
    tensors = _our_tensors(hf, where, shape)
    rows = (shape.vocab_size, shape.embd_size)
    stored, names = tensors.get(_EMBEDDING), listed(sorted(hf)[:3])
    embedding = f"missing (it has {names}, …)" if stored is None else tuple(stored.shape)
    num_layers = len({match[1] for match in map(hf_gpt2.LAYER.match, tensors) if match})
    # Before a model of any size is allocated.
    if (num_layers, embedding) != (shape.num_layers, rows):
        raise CheckpointError(
            f"{where} has {num_layers} layers and {_EMBEDDING} {embedding}, but its config.json has "
            f"{shape.num_layers} and {rows}; use the files of one model"
        )
    with torch.device("meta"):
        wanted = {name: tuple(t.shape) for name, t in new_model(shape).state_dict().items()}
    wanted |= {name: rows for name in (_EMBEDDING, _HEAD) if name in wanted}
    has_biases = any(name.endswith(".bias") for name in tensors)
    if shape.architecture == "gpt2" and not has_biases:  # as in nanoGPT
        biases = [name for name in wanted if name.endswith(".bias")]
        tensors |= {name: torch.zeros(()).expand(wanted[name]) for name in biases}
    for name in sorted(wanted.keys() | tensors.keys()):
        actual = tuple(tensors[name].shape) if name in tensors else "missing"
        if actual != wanted.get(name, "unknown"):
            raise CheckpointError(
                f"{where} has {name} {actual}, but a {ARCHITECTURES[shape.architecture].NAME} of its sizes "
                f"has {wanted.get(name, 'no such tensor')}"
            )
    model = new_model(shape)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter[: len(tensors[name])].copy_(tensors[name])
            if not parameter.isfinite().all():
                raise CheckpointError(f"{where} has values in {name} that are not finite")
        _fill_padding(model)
    return model


def _our_tensors(hf: Mapping[str, Tensor], where: str, shape: GPTShape) -> dict[str, Tensor]:
    """Convert the tensors to our names and layout, without a tied head."""
    tensors = {}
    for name, tensor in hf.items():
        ours = ARCHITECTURES[shape.architecture].from_hf(name, tensor)
        if ours is None:
            continue
        if not tensor.is_floating_point():
            raise CheckpointError(
                f"{where} has {name} in {tensor.dtype}; only fp32, fp16 and bf16 are imported"
            )
        tensors[ours[0]] = ours[1]
    tensors = hf_gpt2.as_linear(tensors)
    head = tensors.pop(_HEAD, None) if shape.tied_embeddings else None
    if head is not None and not (_EMBEDDING in tensors and torch.equal(head, tensors[_EMBEDDING])):
        why = "but the architecture gpt2 has no other head; import a GPT-2 that is tied"
        if shape.architecture != "gpt2":
            why = f"although {HF_CONFIG_FILE} ties them; set tie_word_embeddings to false there"
        raise CheckpointError(f"{where} has a {_HEAD} that differs from its embedding, {why}")
    return tensors


@torch.no_grad()
def _fill_padding(model: GPT) -> None:
    size = model.shape.vocab_size
    some = torch.arange(0, size, max(1, size // 64)).unsqueeze(1)  # (N, 1), about 64 tokens
    logits = model.eval().logits(some)[:, -1, :size]  # (N, V)
    least = logits.log_softmax(-1).amax(0).argmin()
    for weight in (model.wte.weight, model.head_weight):
        weight[size:] = weight[least]
