"""What may change when a run goes on, and what may not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from raytrain_gpt.checkpoint.catalog import Checkpoint, CheckpointState
from raytrain_gpt.config.schema import FIELDS, SAFE_ON_RESUME, Config
from raytrain_gpt.data.order import ORDER_VERSION
from raytrain_gpt.data.shards import Manifest, read_manifest
from raytrain_gpt.errors import CheckpointError
from raytrain_gpt.storage.location import Location
from raytrain_gpt.train.resume import check_changes

Made = tuple[Config, Manifest, Checkpoint]


@pytest.fixture
def made(make_config: Callable[..., Config]) -> Made:
    """A configuration, its data and a checkpoint of both."""
    config = make_config(run_name="drift", num_workers=2)
    manifest = read_manifest(Location.of(config.data.data_path))
    state = CheckpointState(
        step=20,
        next_batch=20,
        order_hash="00",
        val_loss=None,
        tokens_seen=0,
        config=config.model_dump(),
        manifest_hash=manifest.hash,
        vocab_hash=manifest.vocab_hash,
        vocab_size=manifest.vocab_size,
        order_version=ORDER_VERSION,
        num_workers=2,
    )
    return config, manifest, Checkpoint(Location.of("/runs/drift/checkpoints/step=20"), state, 0)


@pytest.mark.parametrize(
    ("leaf", "value"),
    [
        ("seq_len", 16),
        ("seed", 1),
        ("num_layers", 3),
        ("peak_lr", 2e-3),
        ("global_batch_tokens", 24 * 32),
        ("precision", "bf16"),
        ("dropout", 0.1),
        ("document_mask", True),
        ("grad_clip", 2.0),
    ],
)
def test_changed_maths_is_refused_with_the_key_and_both_values(
    made: Made, leaf: str, value: Any, raises_line: Callable[..., Any]
) -> None:
    config, manifest, checkpoint = made
    assert leaf not in SAFE_ON_RESUME
    before = config.field_values()[leaf]
    with raises_line(CheckpointError, f"{leaf} {before} -> {value}", "another run_name", "drift"):
        check_changes(config.updated({leaf: value}), manifest, checkpoint, pytest.fail)


def test_changed_data_and_tokenizer_are_refused(
    made: Made, raises_line: Callable[..., Any]
) -> None:
    config, manifest, checkpoint = made
    other = replace(checkpoint, state=replace(checkpoint.state, manifest_hash="ab" * 32))
    with raises_line(CheckpointError, "data (manifest hash) abababababab ->"):
        check_changes(config, manifest, other, pytest.fail)
    other = replace(checkpoint, state=replace(checkpoint.state, vocab_hash="cd" * 32))
    with raises_line(CheckpointError, "tokenizer (vocabulary hash) cdcdcdcdcdcd ->"):
        check_changes(config, manifest, other, pytest.fail)


def test_all_that_is_wrong_is_said_at_once(made: Made, raises_line: Callable[..., Any]) -> None:
    config, manifest, checkpoint = made
    changed = config.updated({"seed": 1, "seq_len": 16, "max_steps": 60})
    with raises_line(CheckpointError, "seed 1337 -> 1", "seq_len 32 -> 16"):
        check_changes(changed, manifest, checkpoint, pytest.fail)


def test_harmless_changes_are_accepted_and_logged(made: Made) -> None:
    config, manifest, checkpoint = made
    changes = {
        "log_every_steps": 1,
        "max_steps": 60,
        "num_workers": 1,
        "spike_patience": 3,
        "hang_timeout_s": None,
        "keep_checkpoints": 2,
    }
    lines: list[str] = []
    check_changes(config.updated(changes), manifest, checkpoint, lines.append)
    for name, value in changes.items():
        assert f"changed since then: {name} {config.field_values()[name]} -> {value}" in lines
    assert len(lines) == 1 + len(changes)


def test_a_leaf_that_the_checkpoints_version_did_not_have_counts_as_its_default(
    made: Made,
) -> None:
    config, manifest, checkpoint = made
    old = {k: dict(v) for k, v in checkpoint.state.config.items() if k != "spikes"}
    del old["optim"]["grad_clip"]
    assert FIELDS["grad_clip"][1].default == config.optim.grad_clip
    before = replace(checkpoint, state=replace(checkpoint.state, config=old))
    lines: list[str] = []
    check_changes(config, manifest, before, lines.append)
    assert len(lines) == 1
