"""Damaged and hostile datasets: read as they are, refused with a one-line error, or prepared again."""

from __future__ import annotations

import hashlib
import json
import shutil
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain_gpt.data.mixture import check_val_split, read_mixture
from raytrain_gpt.data.shards import MANIFEST_FILE, read_manifest
from raytrain_gpt.data.tokenizer_file import TOKENIZER_FILE, read_tokenizer
from raytrain_gpt.data.verify import check_shards, check_tokenizer, describe_dataset
from raytrain_gpt.storage.location import Location
from tests.data.shard_tools import write_dataset
from tests.fuzz import Damage, bounded_work, damage_file, damages, works_or_says_why

pytestmark = pytest.mark.slow

FILES = (MANIFEST_FILE, MANIFEST_FILE, TOKENIZER_FILE, "train-00000.parquet")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data") / "whole"
    write_dataset(directory, train=[100, 33])
    return directory


def restate_hash(manifest: Path) -> None:
    """Recompute a manifest's hash from its content, as an attacker would."""
    try:
        content = json.loads(manifest.read_bytes())
        kept = {k: v for k, v in content.items() if k not in ("source", "manifest_hash")}
    except (ValueError, AttributeError, RecursionError):
        return
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"))
    content["manifest_hash"] = hashlib.sha256(text.encode()).hexdigest()
    manifest.write_text(json.dumps(content))


@given(name=st.sampled_from(FILES), damage=damages(), hostile=st.booleans())
@bounded_work()
def test_a_damaged_dataset_is_read_or_refused(
    whole: Path, name: str, damage: Damage, hostile: bool
) -> None:
    directory = whole.parent / "damaged"
    shutil.copytree(whole, directory, dirs_exist_ok=True)
    damage_file(directory / name, (whole / name).read_bytes(), damage)
    if hostile:
        restate_hash(directory / MANIFEST_FILE)
    place = Location.of(directory)

    def train() -> None:
        mixture = read_mixture([(place, Fraction(1))])
        check_val_split(mixture, 8)
        mixture.order(2, 8, 1)
        for split in ("train", "val"):
            mixture.read(split, 8, np.arange(sum(mixture.num_sequences(split, 8))))

    def verify() -> None:
        manifest = read_manifest(place)
        check_tokenizer(place, manifest)
        check_shards(place, manifest, content=True)

    works_or_says_why(train)
    works_or_says_why(verify)
    works_or_says_why(lambda: read_tokenizer(place).encode_document("Hello, é 日本"))
    works_or_says_why(lambda: describe_dataset(place, read_manifest(place), lambda line: None))
