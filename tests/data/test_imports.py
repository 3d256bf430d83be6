"""Imports: externally tokenized ids arrive unchanged, each once, and damaged files are refused."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrain_gpt.config.call_options import PrepareOptions
from raytrain_gpt.data import imports, sources
from raytrain_gpt.data.imports import read_ids
from raytrain_gpt.data.shards import MANIFEST_FILE
from raytrain_gpt.data.sources import find_pieces
from raytrain_gpt.data.tokenizer import make_tiktoken
from raytrain_gpt.data.verify import check_shard
from raytrain_gpt.errors import DataError
from tests.conftest import raises_line
from tests.data.shard_tools import all_tokens, documents, prepare_here

EOT = 256
"""End-of-text id of the tokenizer `bytes`."""


def drawn(num_ids: int, seed: int = 0, document_ids: int = 40) -> list[int]:
    """Draw ids of bytes; about every `document_ids`-th is EOT, which closes a document."""
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, 256, num_ids)
    ids[generator.random(num_ids) < 1 / document_ids] = EOT
    return ids.tolist()


def write_nanogpt(path: Path, ids: Sequence[int]) -> str:
    path.write_bytes(struct.pack(f"<{len(ids)}H", *ids))
    return str(path)


def write_llmc(path: Path, ids: Sequence[int]) -> str:
    header = struct.pack("<256i", 20240520, 1, len(ids), *[0] * 253)
    path.write_bytes(header + struct.pack(f"<{len(ids)}H", *ids))
    return str(path)


def write_llmc_llama3(path: Path, ids: Sequence[int]) -> str:
    header = struct.pack("<256i", 20240801, 7, len(ids), *[0] * 253)
    path.write_bytes(header + struct.pack(f"<{len(ids)}I", *ids))
    return str(path)


def write_npy(path: Path, ids: Sequence[int]) -> str:
    np.save(path, np.array(ids, np.uint16))
    return str(path)


def write_big_endian_npy(path: Path, ids: Sequence[int]) -> str:
    np.save(path, np.array(ids, ">i8"))
    return str(path)


def write_lists(
    path: Path, ids: Sequence[int], column: str = "input_ids", kind: pa.DataType | None = None
) -> str:
    rows = [ids[i : i + 64] for i in range(0, len(ids), 64)]
    if kind is not None and pa.types.is_fixed_size_list(kind):
        assert len(ids) % 64 == 0
    table = pa.table(
        {
            "id": [str(i) for i in range(len(rows))],
            column: pa.array(rows, kind or pa.list_(pa.int32())),
        }
    )
    pq.write_table(table, path, row_group_size=5)
    return str(path)


def write_fixed_lists(path: Path, ids: Sequence[int]) -> str:
    return write_lists(path, ids, kind=pa.list_(pa.int64(), 64))


FORMATS = {
    "nanogpt.bin": write_nanogpt,
    "llmc.bin": write_llmc,
    "llama3.bin": write_llmc_llama3,
    "build-nanogpt.npy": write_npy,
    "big-endian.npy": write_big_endian_npy,
    "input_ids.parquet": write_lists,
    "fixed.parquet": write_fixed_lists,
}
Write = Callable[[Path, Sequence[int]], str]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink limits so that few ids make several tasks, each of several pieces and chunks."""
    monkeypatch.setattr(sources, "_ID_PIECE_TOKENS", 512)
    monkeypatch.setattr(imports, "_CHUNK_IDS", 200)
    monkeypatch.setattr(imports, "_CHUNK_ROWS", 2)
    monkeypatch.setattr("raytrain_gpt.data.prepare_plan.MIN_TASK_BYTES", 6000)
    monkeypatch.setattr("raytrain_gpt.data.prepare_plan.MIN_TASKS", 1000)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_arrives_token_by_token(tmp_path: Path, name: str) -> None:
    ids = drawn(6400, document_ids=4000)
    source = FORMATS[name](tmp_path / name, ids)
    out = tmp_path / "out"
    # With fewer than 100 documents, the end is held out, so train followed by val equals the source.
    manifest = prepare_here([source], out, "bytes", val_fraction=0.1, row_group_tokens=10**6)
    shards = [shard for shard in manifest.shards if shard.split == "train"]
    assert len(shards) > 2
    train, val = all_tokens(out, manifest, "train"), all_tokens(out, manifest, "val")
    assert [*train, *val] == ids
    assert len(val) == 640
    assert sum(shard.documents for shard in shards) == ids[: len(train)].count(EOT)
    for shard in manifest.shards:
        check_shard(out, manifest, shard, content=True)


@pytest.mark.usefixtures("small_parts")
def test_documents_are_dealt_whole_and_in_order(tmp_path: Path) -> None:
    ids = [EOT, *drawn(30_000)[:-1], EOT]
    source = write_npy(tmp_path / "a.npy", ids)
    manifest = prepare_here([source], tmp_path / "out", "bytes", val_fraction=0.05)
    val = documents(tmp_path / "out", manifest, "val")
    wanted = bytes_of_documents(ids)
    assert len(wanted) > 500
    assert 0.01 * len(wanted) < len(val) < 0.1 * len(wanted)
    at = 0
    for document in val:
        at = wanted.index(document, at) + 1
    assert sorted(val + documents(tmp_path / "out", manifest, "train")) == sorted(wanted)
    assert sum(shard.documents for shard in manifest.shards) == len(wanted)


def bytes_of_documents(ids: Sequence[int]) -> list[bytes]:
    ends = np.flatnonzero(np.array(ids) == EOT) + 1
    return [bytes(part[:-1].tolist()) for part in np.split(np.array(ids), ends)[:-1]]


@pytest.mark.parametrize(
    ("train", "val"),
    [
        ("train.bin", "val.bin"),
        ("edufineweb_train_000001.npy", "edufineweb_val_000000.npy"),
        ("train-00000-of-00001.parquet", "validation-00000-of-00001.parquet"),
    ],
)
def test_files_keep_the_split_they_are_named_for(tmp_path: Path, train: str, val: str) -> None:
    write = {".bin": write_nanogpt, ".npy": write_npy, ".parquet": write_lists}[Path(train).suffix]
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / train, drawn(640, seed=1))
    write(tmp_path / "in" / val, drawn(320, seed=2))
    manifest = prepare_here([str(tmp_path / "in")], tmp_path / "out", "bytes")
    assert all_tokens(tmp_path / "out", manifest, "train").tolist() == drawn(640, seed=1)
    assert all_tokens(tmp_path / "out", manifest, "val").tolist() == drawn(320, seed=2)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("val_tokens", [1, 1000])
def test_val_tokens_are_the_first_ids_up_to_a_documents_end(
    tmp_path: Path, val_tokens: int
) -> None:
    ids = drawn(6400)
    source = write_llmc(tmp_path / "a.bin", ids)
    manifest = prepare_here([source], tmp_path / "out", "bytes", val_tokens=val_tokens)
    end = val_tokens - 1 + ids[val_tokens - 1 :].index(EOT) + 1
    val = all_tokens(tmp_path / "out", manifest, "val").tolist()
    # A document that extends past a chunk of 200 ids is cut at `val_tokens`.
    assert val in (ids[:end], ids[:val_tokens])
    assert val + all_tokens(tmp_path / "out", manifest, "train").tolist() == ids


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("empty_first", [True, False])
def test_empty_rows_count_for_nothing_in_the_split(tmp_path: Path, empty_first: bool) -> None:
    """Parquet counts an empty list as a value; only 100 of the 1,100 values here are ids."""
    rows: list[list[int]] = [[i] for i in range(100)]
    rows = [*[[]] * 1000, *rows] if empty_first else [*rows, *[[]] * 1000]
    table = pa.table({"tokens": pa.array(rows, pa.list_(pa.int32()))})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=50)
    source = str(tmp_path / "a.parquet")
    manifest = prepare_here([source], tmp_path / "out", "bytes", val_fraction=0.1)
    assert (manifest.split_tokens("train"), manifest.split_tokens("val")) == (90, 10)


def test_the_column_is_chosen_by_text_field_then_by_name(tmp_path: Path) -> None:
    table = pa.table({"text": ["a"], "input_ids": [[1, 2]], "tokens": [[3, 4]], "mine": [[5, 6]]})
    pq.write_table(table, tmp_path / "a.parquet")
    pq.write_table(table.drop_columns("text"), tmp_path / "b.parquet")
    pq.write_table(table.drop_columns(["text", "input_ids"]), tmp_path / "c.parquet")
    columns = [
        find_pieces([str(tmp_path / name)], PrepareOptions(text_field=field), print)[0].ids
        for name, field in [
            ("a.parquet", "text"),
            ("b.parquet", "text"),
            ("c.parquet", "text"),
            ("a.parquet", "mine"),
        ]
    ]
    assert columns == [None, "input_ids", "tokens", "mine"]


def test_text_and_ids_are_not_mixed(tmp_path: Path) -> None:
    write_nanogpt(tmp_path / "train.bin", drawn(100))
    (tmp_path / "input.txt").write_text("text")
    with raises_line(DataError, "input.txt contains text", "train.bin token ids", "glob"):
        find_pieces(
            [str(tmp_path / "input.txt"), str(tmp_path / "train.bin")], PrepareOptions(), print
        )


# --- damaged files


def with_int(at: int, number: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:at] + struct.pack("<i", number) + content[at + 4 :]


DAMAGES: dict[str, tuple[Write, Callable[[bytes], bytes], tuple[str, ...]]] = {
    "odd size": (write_nanogpt, lambda c: c[:-1], ("a.bin has an odd number of bytes, 1279", "uint16")),
    "another count": (write_llmc, with_int(8, 641), ("a.bin has 2304 bytes", "641 ids in its header")),
    "cut off": (write_llmc, lambda c: c[:-2], ("a.bin has 2302 bytes", "640 ids")),
    "cut off in the header": (write_llmc, lambda c: c[:1000], ("a.bin has 1000 bytes", "640 ids")),
    "cut off ids": (write_npy, lambda c: c[:-1], ("a.npy has 1407 bytes", "640 ids")),
    "cut off shape": (write_npy, lambda c: c[:50], ("a.npy is not a .npy file",)),
    "deep header": (write_npy, lambda c: c[:10] + b"(" * 117 + b"\n", ("not a .npy file",)),
    "no array": (write_npy, lambda _: b"ids", ("a.npy is not a .npy file",)),
    "cut off parquet": (write_lists, lambda c: c[:-9], ("a.parquet is not a parquet file",)),
    "no content": (write_nanogpt, lambda _: b"", ("no text in", "a.bin")),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_with_its_place(tmp_path: Path, damage: str) -> None:
    write, spoil, words = DAMAGES[damage]
    path = tmp_path / {write_npy: "a.npy", write_lists: "a.parquet"}.get(write, "a.bin")
    write(path, drawn(640))
    path.write_bytes(spoil(path.read_bytes()))
    with raises_line(DataError, *words):
        prepare_here([str(path)], tmp_path / "out", "bytes")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((3, 4), np.uint16), "uint16 of shape (3, 4), not a 1-D array"),
        (np.zeros(4, np.float32), "float32 of shape (4,), not a 1-D array of integers"),
        (np.array([[1], "a"], object), "object of shape (2,)"),
    ],
)
def test_an_array_of_another_kind_is_refused(tmp_path: Path, array: np.ndarray, words: str) -> None:
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with raises_line(DataError, "a.npy", words):
        find_pieces([str(tmp_path / "a.npy")], PrepareOptions(), print)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("nanogpt.bin", "1200 of nanogpt.bin"),
        ("llmc.bin", "2224 of llmc.bin"),
        ("build-nanogpt.npy", "1328 of build-nanogpt.npy"),
        ("input_ids.parquet", "280 of input_ids.parquet:1"),
    ],
)
def test_an_id_beyond_the_vocabulary_is_refused_with_its_place(
    tmp_path: Path, name: str, place: str
) -> None:
    ids = drawn(640)
    ids[600] = 257
    source = FORMATS[name](tmp_path / name, ids)
    with raises_line(DataError, name, f"id 257 at {place}", "0 to 256", "--tokenizer"):
        prepare_here([source], tmp_path / "out", "bytes")
    assert not (tmp_path / "out" / MANIFEST_FILE).exists()


@pytest.mark.parametrize("kind", ["<i4", ">i4", "<i8"])
def test_halves_of_wider_ids_are_refused(tmp_path: Path, kind: str) -> None:
    ids = np.array(drawn(100), kind)
    ids.tofile(tmp_path / "a.BIN")
    np.save(tmp_path / "a.npy", ids.view("<u2"))
    for name in ("a.BIN", "a.npy"):
        with raises_line(DataError, f"{name} is read as uint16", "every second one", "numpy.save("):
            prepare_here([str(tmp_path / name)], tmp_path / "out", "bytes")


def test_a_large_vocabulary_does_not_fit_in_16_bits(tmp_path: Path) -> None:
    piece = find_pieces([write_nanogpt(tmp_path / "a.bin", [3, 4, 5])], PrepareOptions(), print)[0]
    ranks = {bytes([i]): i for i in range(256)}
    large = make_tiktoken("large", r"(?s).", ranks, {"<|endoftext|>": 2**16})
    with raises_line(DataError, "a.bin is read as uint16", "large has 65537 ids", "'uint32'"):
        next(read_ids(piece, large))


def test_a_negative_id_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([1, 2, -1], np.int16))
    with raises_line(DataError, "a.npy", "id -1 at 132 of a.npy"):
        prepare_here([str(tmp_path / "a.npy")], tmp_path / "out", "bytes")


@pytest.mark.parametrize("rows", [[[1], None, [2]], [[1], [None], [2]]])
def test_a_null_among_lists_is_refused(tmp_path: Path, rows: list) -> None:
    kind = pa.list_(pa.int32())
    pq.write_table(pa.table({"tokens": pa.array(rows, kind)}), tmp_path / "a.parquet")
    with raises_line(DataError, "a.parquet row group 0 from row 0", "null"):
        prepare_here([str(tmp_path / "a.parquet")], tmp_path / "out", "bytes")
