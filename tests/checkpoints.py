"""Checkpoints of small models, written as in a run, but without training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.config.code import Code
from raytrain_gpt.config.kinds import Registry
from raytrain_gpt.config.schema import Config, parse_config
from raytrain_gpt.core.gpt2 import GPT2
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.state import MODEL_FILE
from raytrain_gpt.data.tokenizer import load_tokenizer
from raytrain_gpt.storage.location import Location
from tests.training import STATE

SEQ_LEN = 128
RUN_NAME = "small"


def small_config(seq_len: int, code: Code | None = None) -> Config:
    """Return a configuration of a small model with two layers."""
    model = {"num_layers": 2, "num_heads": 2, "embd_size": 32, "seq_len": seq_len}
    run = {"global_batch_tokens": 4 * seq_len, "micro_batch_sequences": 4, "run_name": RUN_NAME}
    return parse_config({}, "defaults", Registry(code)).updated({**model, **run})


def write_checkpoint(
    run_dir: Path,
    step: int,
    val_loss: float,
    seq_len: int = SEQ_LEN,
    manifest_hash: str = "m",
    code: Code | None = None,
    **fields: object,
) -> Path:
    """Write a checkpoint with weights seeded by its step; return its directory.

    Args:
        fields: Changed fields of the configuration.
    """
    config, tokenizer = small_config(seq_len, code).updated(fields), load_tokenizer("bytes")
    model = GPT2(GPTShape.of(config, tokenizer.n_vocab))
    model.init_weights(step)
    with torch.no_grad():
        model.wte.weight.mul_(20)  # else all tokens, eot included, are equally likely
    draft = Catalog(Location.of(run_dir)).draft(step, "001")
    entries = {
        MODEL_FILE: draft.add(MODEL_FILE, lambda path: save_file(dict(model.state_dict()), path))
    }
    state = replace(
        STATE,
        step=step,
        next_batch=step,
        val_loss=val_loss,
        tokens_seen=step * config.train.global_batch_tokens,
        config=config.model_dump(mode="json"),
        manifest_hash=manifest_hash,
        vocab_hash=tokenizer.hash,
    )
    texts = {**tokenizer.files}
    return draft.commit(state, entries, texts).path
