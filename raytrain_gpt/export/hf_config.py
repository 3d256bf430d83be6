"""Hugging Face's `config.json` of a GPT-2, written and read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.errors import CheckpointError, damage_as
from raytrain_gpt.parsing import parse_json

HF_CONFIG_FILE = "config.json"

_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
_PLAIN: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of one function
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "layer_norm_epsilon": (1e-5,),
}
"""Key -> values of a GPT-2 as this package has it, the default of transformers first."""


def hf_config_files(shape: GPTShape, eot_token: int, dtype: str) -> dict[str, str]:
    """Name and content of the files that `AutoModelForCausalLM` needs besides the tensors.

    `dtype` is torch's name of the tensors' type: `float32` or `bfloat16`.
    """
    ends = {"bos_token_id": eot_token, "eos_token_id": eot_token}
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": shape.vocab_size,
        "n_positions": shape.seq_len,
        "n_ctx": shape.seq_len,
        "n_embd": shape.embd_size,
        "n_layer": shape.num_layers,
        "n_head": shape.num_heads,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        **dict.fromkeys(_DROPOUTS, shape.dropout),
        "scale_attn_weights": True,
        "tie_word_embeddings": True,
        "use_cache": True,
        "torch_dtype": dtype,
        **ends,
    }
    # Without a padding id, transformers uses eos and warns at every call.
    generation = {**ends, "pad_token_id": eot_token, "do_sample": True}
    return {
        HF_CONFIG_FILE: json.dumps(config, indent=2) + "\n",
        "generation_config.json": json.dumps(generation, indent=2) + "\n",
    }


def read_hf_config(directory: Path) -> GPTShape:
    """The model shape in a Hugging Face directory; dropout is 0 unless its three probabilities agree.

    Raises:
        CheckpointError: `config.json` is missing or damaged, or not that of a plain GPT-2.
    """
    path = directory / HF_CONFIG_FILE
    if not path.exists():
        raise CheckpointError(
            f"{directory} has no {HF_CONFIG_FILE}; give a Hugging Face directory, or a file of weights"
        )
    with damage_as(CheckpointError, path):
        content = parse_json(path.read_bytes())
        mlp_sizes = (None, 4 * int(content.get("n_embd", 0)))
        for key, plain in {**_PLAIN, "n_inner": mlp_sizes}.items():
            value = content.get(key, plain[0])
            if value not in plain:
                raise CheckpointError(
                    f"{path} has {key}={value!r}, a plain GPT-2 has {plain[0]!r}; only plain GPT-2 models "
                    "can be imported"
                )
        dropouts = {float(content.get(name, 0.1)) for name in _DROPOUTS}  # transformers' default
        dropout = dropouts.pop() if len(dropouts) == 1 else 0.0
        if not 0 <= dropout < 1:
            raise ValueError(f"a dropout of {dropout} is not in [0, 1)")
        return GPTShape(
            num_layers=int(content["n_layer"]),
            num_heads=int(content["n_head"]),
            embd_size=int(content["n_embd"]),
            seq_len=int(content["n_positions"]),
            vocab_size=int(content["vocab_size"]),
            dropout=dropout,
        )
