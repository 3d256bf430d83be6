"""Hugging Face's `config.json`, written and read, and the other files of settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from raytrain_gpt.config import kinds
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.data.tokenizer import EOT
from raytrain_gpt.errors import CheckpointError, ConfigError, damage_as
from raytrain_gpt.export import hf_gpt2, hf_qwen3
from raytrain_gpt.parsing import parse_json

HF_CONFIG_FILE = "config.json"
ARCHITECTURES = {"gpt2": hf_gpt2, "qwen3": hf_qwen3}
"""Architecture, the same as Hugging Face's `model_type` -> module that converts its files."""


def mapping_of(architecture: str, *needed: str) -> Any:
    """Module that converts an architecture's files, or the class of the user's, see `extend.architecture`.

    Raises:
        ConfigError: it lacks one of the `needed` names.
    """
    mapping = ARCHITECTURES.get(architecture) or kinds.kind("architecture", architecture).resolve()
    if missing := [name for name in needed if not hasattr(mapping, name)]:
        raise ConfigError(
            f"architecture {architecture} has no export mapping; add {', '.join(missing)} to its class, see "
            "docs/extending.md"
        )
    return mapping


def hf_config_files(shape: GPTShape, eot_token: int, dtype: str) -> dict[str, str]:
    """Return name -> content of the files besides tensors; `dtype` is torch's name, such as `bfloat16`."""
    ends = {"bos_token_id": eot_token, "eos_token_id": eot_token}
    of_shape = mapping_of(shape.architecture, "config_of", "to_hf").config_of(shape)
    config = {**of_shape, "use_cache": True, "torch_dtype": dtype, **ends}
    # Without a padding id, transformers uses eos and warns at every call.
    generation = {**ends, "pad_token_id": eot_token, "do_sample": True}
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": EOT,
        "eos_token": EOT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.seq_len,
    }
    return {
        HF_CONFIG_FILE: json.dumps(config, indent=2) + "\n",
        "generation_config.json": json.dumps(generation, indent=2) + "\n",
        "tokenizer_config.json": json.dumps(tokenizer, indent=2) + "\n",
    }


def read_hf_config(directory: Path) -> GPTShape:
    """Read the shape from a `config.json`; raises a CheckpointError unless it is a plain GPT-2 or Qwen3."""
    path = directory / HF_CONFIG_FILE
    if not path.exists():
        raise CheckpointError(
            f"{directory} has no {HF_CONFIG_FILE}; give a Hugging Face directory, or a file of weights"
        )
    only = "only plain GPT-2 and Qwen3 models can be imported"
    with damage_as(CheckpointError, path):
        content = parse_json(path.read_bytes())
        kind = content.get("model_type", "gpt2")
        if kind not in ARCHITECTURES:
            raise CheckpointError(f"{path} has model_type={kind!r}; {only}")
        theirs = ARCHITECTURES[kind]
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
