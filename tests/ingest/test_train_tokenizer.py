"""`prepare --tokenizer bpe:N`: a tokenizer of the text itself, the same on any machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import regex  # type: ignore[import-untyped]
from tokenizers import Tokenizer

from raytrain_gpt.config.call_options import PrepareOptions
from raytrain_gpt.data.prepare_plan import make_plan
from raytrain_gpt.data.shards import read_manifest
from raytrain_gpt.data.tokenizer import GPT2_PATTERN, TOKENIZER_FILE, Tiktoken, merges_of
from raytrain_gpt.data.tokenizer_file import open_tokenizer, read_tokenizer
from raytrain_gpt.errors import DataError
from raytrain_gpt.ingest.prepare import prepare
from raytrain_gpt.ingest.train_tokenizer import _pieces, sample, train_bpe
from tests.conftest import RunCli, raises_line
from tests.data.shard_tools import TEXTS, documents, made_text, prepare_here, write_jsonl

SCRIPTS = "Да здравствует слово. 統一碼と日本語。 שלום עולם. Ένα δύο τρία. "
MIXED = [
    made_text(60_000),
    Path(__file__).read_text(),
    SCRIPTS * 40,
    *TEXTS.values(),
    "".join(map(chr, range(1, 0x250))),
    "x" * 5_000 + "-" * 300,
]


@pytest.fixture(scope="module")
def encoding() -> Tiktoken:
    return train_bpe(MIXED, 600)


def test_ids_are_those_of_tokenizers_and_every_id_is_made(encoding: Tiktoken) -> None:
    theirs = Tokenizer.from_str(encoding.files[TOKENIZER_FILE])
    assert encoding.n_vocab == 600
    assert encoding.eot_token == 599
    assert len(merges_of(encoding.encoding._mergeable_ranks)) == 600 - 257
    for text in [
        *MIXED,
        "  def f(x):\n\n    return x\n",
        "naïve ²½ \u00a0\u2028 we'LL",
        "\ufeff\x00",
    ]:
        ids = encoding.encode_ordinary(text)
        assert theirs.encode(text, add_special_tokens=False).ids == ids or "<|end" in text
        assert encoding.decode(ids) == text
    longest = max(map(len, encoding.encoding._mergeable_ranks))
    assert longest <= 64, "no token is as long as a rule"


@pytest.mark.parametrize("word", ["ACGT", "=-", " \n", "१२३"])
def test_words_for_training_are_cut(word: str) -> None:
    ordinary = f"def f(x):\n    return {'x' * 200}\n" * 200
    text = f"{ordinary}{word * 20_000}{ordinary}"
    cut = list(_pieces([text], threading.Event()))
    assert "".join(cut) == text
    words = [found[0] for one in cut for found in regex.finditer(GPT2_PATTERN, one)]
    assert max(map(len, words)) <= 3 * 256
    assert [*_pieces([ordinary], threading.Event())] == [ordinary], "ordinary words stay whole"


@pytest.mark.slow
def test_any_number_of_threads_trains_the_same_tokenizer() -> None:
    code = (
        "import argparse, inspect, typing\n"
        "from raytrain_gpt.ingest.train_tokenizer import train_bpe\n"
        "texts = [open(module.__file__).read() for module in (argparse, inspect, typing)]\n"
        "print(train_bpe(texts, 2000).hash)"
    )
    hashes = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for threads in ("1", "4")
    }
    assert len(hashes) == 1


def test_the_sample_is_bounded_and_leaves_out_validation(tmp_path: Path) -> None:
    texts = [f"document {i} " * 40 for i in range(200)]
    sources = [write_jsonl(tmp_path / f"{n}.jsonl", texts[n::4]) for n in range(4)]
    options = PrepareOptions(val_fraction=0.2)
    plan = make_plan(sources, None, options, print)
    whole = list(sample(plan, options))
    manifest = prepare_here(sources, tmp_path / "data", "bytes", val_fraction=0.2)
    held_out = [text.decode() for text in documents(tmp_path / "data", manifest, "val")]
    assert sorted([*whole, *held_out]) == sorted(texts)
    some = list(sample(plan, options, max_bytes=10_000))
    assert sum(map(len, some)) == 10_000
    assert some == list(sample(plan, options, max_bytes=10_000))


@pytest.mark.parametrize("seed", range(2))
def test_a_copy_of_a_validation_document_does_not_train(tmp_path: Path, seed: int) -> None:
    """With `dedupe`, the first of equal documents counts, which may be for validation."""
    texts = [f"seed {seed} document {i} " * 20 for i in range(150)]
    sources = [write_jsonl(tmp_path / f"{n}.jsonl", [*texts[n::3], *texts[:60]]) for n in range(3)]
    options = PrepareOptions(val_fraction=0.3, dedupe="exact")
    sampled = list(sample(make_plan(sources, None, options, print), options))
    manifest = prepare_here(sources, tmp_path / "data", "bytes", val_fraction=0.3, dedupe="exact")
    held_out = {text.decode() for text in documents(tmp_path / "data", manifest, "val")}
    assert not held_out & {*sampled}
    assert len(sampled) == 150 - len(held_out)


def test_a_dataset_has_its_own_tokenizer_and_trains_it_once(tmp_path: Path) -> None:
    text, val = tmp_path / "train.txt", tmp_path / "val.txt"
    text.write_text("to be or not to be, that is the question\n" * 300)
    val.write_text("zyxwvu zyxwvu\n" * 300)
    lines: list[str] = []

    def prepared() -> None:
        sources = [str(text), str(val)]
        prepare(sources, tmp_path / "data", "bpe:270", PrepareOptions(), log=lines.append)

    prepared()
    manifest = read_manifest(tmp_path / "data")
    encoding = read_tokenizer(tmp_path / "data")
    assert (manifest.tokenizer, manifest.vocab_size, manifest.dtype) == ("bpe:270", 270, "uint16")
    assert manifest.vocab_hash == encoding.hash
    assert not any(b"zy" in token for token in encoding.encoding._mergeable_ranks)
    assert any(
        line.startswith("trained bpe:270 on 12.3 kB of 1 training document") for line in lines
    )
    lines.clear()
    prepared()
    assert lines[-1] == f"{tmp_path / 'data'} is already prepared"
    assert not any("trained" in line for line in lines)


def test_a_second_dataset_takes_the_tokenizer_of_a_file(
    encoding: Tiktoken, tmp_path: Path, run_cli: RunCli
) -> None:
    (tmp_path / TOKENIZER_FILE).write_text(encoding.files[TOKENIZER_FILE])
    for name in (TOKENIZER_FILE, "."):
        assert open_tokenizer(str(tmp_path / name)).hash == encoding.hash
    Tokenizer.from_str(encoding.files[TOKENIZER_FILE]).save(str(tmp_path / "saved.json"))
    nameless = open_tokenizer(str(tmp_path / "saved.json"))
    assert nameless.name == "imported"
    assert [*map(nameless.token_bytes, range(600))] == [*map(encoding.token_bytes, range(600))]
    (tmp_path / "book.txt").write_text("to be\n" * 100)
    out = tmp_path / "data"
    flags = ["--out", str(out), "--tokenizer", str(tmp_path)]
    run_cli.succeeds("prepare", tmp_path / "book.txt", *flags)
    assert read_manifest(out).vocab_hash == encoding.hash


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bpe:", ("bpe:", "from 258", "as in bpe:8192")),
        ("bpe:257", ("bpe:257", "from 258")),
        ("bpe:-3", ("from 258",)),
        ("bpe:" + "9" * 5000, ("from 258",)),
        ("bpe:1000001", ("to 1000000",)),
        ("bpe:4096", ("is enough for", "add text")),
        ("gpt3", ("unknown tokenizer gpt3", "bpe:VOCAB_SIZE", "tokenizer.json")),
    ],
)
def test_names_that_cannot_be(name: str, words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("to be or not to be\n" * 100)
    with raises_line(DataError, *words):
        prepare([str(tmp_path / "book.txt")], tmp_path / "data", name, PrepareOptions(), log=print)
    assert not (tmp_path / "data").exists()


def test_text_is_needed_and_its_tokens_are_not_known_before(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("to be or not to be\n" * 100)
    with raises_line(DataError, "val_tokens=10", "--val_fraction"):
        options = PrepareOptions(val_tokens=10)
        prepare([str(tmp_path / "book.txt")], tmp_path / "data", "bpe:300", options, log=print)
    (tmp_path / "ids.bin").write_bytes(bytes(range(200)) * 10)
    with raises_line(DataError, "ids.bin contains token ids", "--tokenizer"):
        prepare(
            [str(tmp_path / "ids.bin")], tmp_path / "data", "bpe:300", PrepareOptions(), log=print
        )


@pytest.mark.slow
def test_ctrl_c_ends_training() -> None:
    code = (
        "import random\n"
        "from raytrain_gpt.ingest.train_tokenizer import train_bpe\n"
        "def texts():\n"
        "    yield ''.join(random.choices('abcdefghijklmnopqrstuvwxyz', k=3_000_000))\n"
        "    print('read', flush=True)\n"
        "train_bpe(texts(), 30_000)\n"  # takes half a minute
        "print('trained', flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "read\n"
        process.send_signal(signal.SIGINT)
        shown, errors = process.communicate()
    assert (shown, errors.splitlines()[-1]) == ("", "KeyboardInterrupt")
