"""Sources: every document is read once, for any kind of file and any split into pieces."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raytrain_gpt.config.call_options import PrepareOptions
from raytrain_gpt.data import documents, sources
from raytrain_gpt.data.documents import BadDocuments, read_documents, refuse_lfs_pointer
from raytrain_gpt.data.sources import find_pieces
from raytrain_gpt.errors import DataError
from tests.conftest import raises_line
from tests.data.shard_tools import TEXTS, made_text, write_jsonl, write_parquet

MANY = [f"document {i} 日本 " + "x" * (i * 37 % 90) for i in range(60)]


def read(
    *names: str, text_field: str = "text", separator: str | None = None
) -> list[tuple[str, int, str]]:
    """Return (file name, position, text) of all documents."""
    return [
        (piece.name, document.position, document.text)
        for piece in find_pieces(list(names), PrepareOptions(text_field=text_field), print)
        for document in read_documents(piece, text_field, separator=separator)
    ]


def texts(*names: str, text_field: str = "text") -> list[str]:
    return [text for _, _, text in read(*names, text_field=text_field)]


def test_a_txt_file_is_one_document(tmp_path: Path) -> None:
    content = "\ufeffone\r\ntwo\n\n<|endoftext|> 日本\n"
    (tmp_path / "a.txt").write_bytes(content.encode())
    assert read(str(tmp_path / "a.txt")) == [("a.txt", 0, content)]


def test_a_parquet_row_is_a_document(tmp_path: Path) -> None:
    wanted = [*TEXTS.values(), *MANY]
    source = write_parquet(tmp_path / "a.parquet", wanted, rows=7)
    assert read(source) == [("a.parquet", i, text) for i, text in enumerate(wanted)]


@pytest.mark.parametrize("piece_bytes", [7, 1000])
def test_pieces_of_json_lines_have_every_line_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", MANY)
    whole = read(source)
    monkeypatch.setattr(sources, "_JSONL_PIECE_BYTES", piece_bytes)
    num = -(-Path(source).stat().st_size // piece_bytes)
    assert len(find_pieces([source], PrepareOptions(), print)) == num
    assert read(source) == whole


@pytest.mark.parametrize("piece_bytes", [5, 2**23])
def test_json_lines_may_have_blank_lines_and_any_line_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(sources, "_JSONL_PIECE_BYTES", piece_bytes)
    (tmp_path / "a.jsonl").write_bytes(b'\n{"text": "a"}\r\n\n  \n{"text": "b"}\n{"text": "c"}')
    assert read(str(tmp_path / "a.jsonl")) == [
        ("a.jsonl", 1, "a"),
        ("a.jsonl", 20, "b"),
        ("a.jsonl", 34, "c"),
    ]


def zstd(content: bytes) -> bytes:
    return bytes(pa.compress(content, codec="zstd", asbytes=True))


COMPRESSED = {"a.jsonl.gz": gzip.compress, "a.jsonl.zst": zstd, "a.json.gz": gzip.compress}


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_json_lines_are_read_as_the_plain_ones(tmp_path: Path, name: str) -> None:
    plain = write_jsonl(tmp_path / "a.jsonl", [*TEXTS.values(), *MANY])
    half = Path(plain).read_bytes().index(b"\n", 2000) - 5
    content = Path(plain).read_bytes()
    # Concatenated compressed files are read as one file.
    (tmp_path / name).write_bytes(
        COMPRESSED[name](content[:half]) + COMPRESSED[name](content[half:])
    )
    assert read(str(tmp_path / name)) == [(name, at, text) for _, at, text in read(plain)]


@pytest.mark.parametrize("name", [*COMPRESSED, "a.txt.gz"])
@pytest.mark.parametrize("keep", [-1, 100])
def test_a_compressed_file_that_is_cut_off_is_refused(tmp_path: Path, name: str, keep: int) -> None:
    lines = b"".join(b'{"text": "%s"}\n' % made_text(900, seed=i).encode() for i in range(9))
    (tmp_path / name).write_bytes(COMPRESSED.get(name, gzip.compress)(lines)[:keep])
    with raises_line(DataError, name, "Truncated"):
        texts(str(tmp_path / name))


EOT = "<|endoftext|>"


@pytest.mark.parametrize(
    ("content", "separator", "wanted"),
    [
        (f"one\n{EOT}\n\ntwo\n\n2\n{EOT}\n", EOT, [(0, "one"), (19, "two\n\n2")]),
        (f"{EOT}\r\n  one \r\n{EOT}\r\ntwo", EOT, [(15, "  one "), (38, "two")]),
        (f"one{EOT}{EOT}\n \t\n{EOT}日本{EOT}two", EOT, [(0, "one"), (46, "日本"), (65, "two")]),
        ("\n one\n\n\n\n\ntwo\n\nmore\n", "\n\n\n", [(1, " one"), (10, "two\n\nmore")]),
        ("a.*b", ".*", [(0, "a"), (3, "b")]),
        ("\none <|end\n", EOT, [(1, "one <|end")]),
        ("a\r\nb\r\n\r\n\r\nc\n\nd", "\n\n", [(0, "a\r\nb"), (10, "c"), (13, "d")]),
        ("a\r\n--\r\nb\n--\n\nc", "\n--\n", [(0, "a"), (7, "b"), (13, "c")]),
    ],
)
def test_separators_are_between_documents(
    tmp_path: Path, content: str, separator: str, wanted: list[tuple[int, str]]
) -> None:
    (tmp_path / "a.txt").write_bytes(content.encode())
    found = read(str(tmp_path / "a.txt"), separator=separator)
    assert found == [("a.txt", *document) for document in wanted]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text("ab \n\r-é日", max_size=9), min_size=1, max_size=9),
    separator=st.sampled_from(["-", "--", "-a-", "\n\n", "日", "a\n", "b b b b b b"]),
    name=st.sampled_from(["a.txt", "a.txt.gz", "a.txt.zst"]),
    read_bytes=st.integers(1, 9),
)
def test_no_text_between_separators_is_lost_however_it_is_read(
    tmp_path: Path, texts: list[str], separator: str, name: str, read_bytes: int
) -> None:
    content = separator.join(["x", *texts]).encode()
    compress = {".gz": gzip.compress, ".zst": zstd}.get(Path(name).suffix, bytes)
    (tmp_path / name).write_bytes(compress(content))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "_READ_BYTES", read_bytes)
        found = read(str(tmp_path / name), separator=separator)
    parts = [part for part in content.split(separator.encode()) if part.strip()]
    assert [text.encode() for _, _, text in found] == [part.strip(b"\r\n") for part in parts]
    end = 0
    for _, position, text in found:
        between = content[end:position].replace(separator.encode(), b"")
        assert not between.strip()
        assert content[position:].startswith(text.encode())
        end = position + len(text.encode())


def test_of_separated_documents_only_the_one_that_is_not_utf8_is_bad(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("日\n--\n".encode() + b"b\xff\n--\nc")
    bad = BadDocuments(None)
    [piece] = find_pieces([str(tmp_path / "a.txt")], PrepareOptions(), print)
    found = [document.text for document in read_documents(piece, "text", bad, "--")]
    assert found == ["日", "c"]
    assert [(b["place"], b["why"]) for b in bad.kept] == [("byte 8", "not UTF-8")]


def test_files_are_read_in_sorted_order_and_sources_in_the_order_given(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/b.txt", "c.md", "a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [name for name, _, _ in read(str(tmp_path))] == ["a/b.txt", "a/z.txt", "a.txt", "b.txt"]
    assert texts(str(tmp_path / "*.txt")) == ["a.txt", "b.txt"]
    assert texts(str(tmp_path / "b.txt"), str(tmp_path / "a.txt")) == ["b.txt", "a.txt"]


def test_a_second_file_of_a_name_has_a_number_before_it(tmp_path: Path) -> None:
    for name in ("a/x.txt", "b/x.txt", "b/c/x.txt", "y.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    single = [str(tmp_path / name) for name in ("a/x.txt", "b/x.txt", "y.txt", "a/x.txt")]
    names = [name for name, _, _ in read(*single, str(tmp_path / "b"))]
    # A path listed twice is the same file. So is a file that a listed directory also contains, but its
    # name is then relative to that directory.
    assert names == ["x.txt", "1//x.txt", "y.txt", "x.txt", "c/x.txt", "1//x.txt"]


def test_links_are_followed(tmp_path: Path) -> None:
    data, outside = tmp_path / "data", tmp_path / "outside"
    for path in (data / "b/c/x.txt", data / "b/.hidden/y.txt", data / "z.txt", outside / "o.txt"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.name)
    (data / "a-blob").write_text("linked")
    links = {"../out": "../../outside", "x2.txt": "x.txt", "../y.txt": "../a-blob"}
    for name, to in links.items():
        (data / "b" / "c" / name).symlink_to(to)
    (data / "b" / "broken.txt").symlink_to("broken.txt")
    for name in ("../around", "../again"):
        (data / "b" / "c" / name).symlink_to(data)
    for name in ("p", "q", "r"):
        (outside / name).symlink_to(data)
    found = {
        "": ["b/c/x.txt", "b/out/o.txt", "b/y.txt", "z.txt"],
        "**/*.txt": ["b/c/x.txt", "b/out/o.txt", "b/y.txt", "z.txt"],
        "b/*/[wx].txt": ["c/x.txt"],
        "**/.h*/*.txt": ["b/.hidden/y.txt"],
    }
    for pattern, names in found.items():
        assert [name for name, _, _ in read(f"{data}/{pattern}")] == names, pattern


@pytest.mark.parametrize("name", ["nothing.txt", "nothing", "*.txt", "nothing/*.jsonl"])
def test_a_missing_source_is_named(tmp_path: Path, name: str) -> None:
    with raises_line(DataError, name, "does not exist"):
        find_pieces([str(tmp_path / name)], PrepareOptions(), print)


@pytest.mark.parametrize("name", ["a.md", "a.py", "noending", "a.txt.gz", "a.md.gz", "a.txt.zst"])
def test_a_named_file_is_text_whatever_its_ending(tmp_path: Path, name: str) -> None:
    content = "# one\n\ntwo 日本\n"
    compress = {".gz": gzip.compress, ".zst": zstd}.get(Path(name).suffix, bytes)
    (tmp_path / name).write_bytes(compress(content.encode()))
    assert read(str(tmp_path / name)) == [(name, 0, content)]
    assert texts(str(tmp_path / "*")) == [content]


def test_what_a_directory_is_left_without_is_counted(tmp_path: Path) -> None:
    for name in ("b.md", "c.MD", "d.rst", "noending"):
        (tmp_path / name).write_text(name)
    with raises_line(DataError, "has no .txt", "but 4 others", "--text_suffixes"):
        find_pieces([str(tmp_path)], PrepareOptions(), print)
    (tmp_path / "e.csv.gz").write_text("e")
    with raises_line(DataError, "e.csv.gz is a table; convert it"):
        find_pieces([str(tmp_path)], PrepareOptions(), print)
    (tmp_path / "a.txt").write_text("a")
    lines: list[str] = []
    found = find_pieces([str(tmp_path)], PrepareOptions(text_suffixes=".md, rst"), lines.append)
    assert [piece.name for piece in found] == ["a.txt", "b.md", "c.MD", "d.rst"]
    assert len(lines) == 1
    assert f"skipped 2 files of {tmp_path}, such as e.csv.gz;" in lines[0]
    lines.clear()
    find_pieces([str(tmp_path / "a.txt"), str(tmp_path / "*.md")], PrepareOptions(), lines.append)
    assert lines == []


def test_ids_beside_more_text_in_a_directory_are_skipped_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "model.bin").write_bytes(b"weights of something else")
    with raises_line(DataError, "odd number of bytes"):
        find_pieces([str(tmp_path)], PrepareOptions(), print)
    (tmp_path / "a.txt").write_text("some text " * 3)
    lines: list[str] = []
    found = find_pieces([str(tmp_path)], PrepareOptions(), lines.append)
    assert [piece.name for piece in found] == ["a.txt"]
    assert "skipped 1 file" in lines[0]
    assert "such as model.bin" in lines[0]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_an_empty_source_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with raises_line(DataError, "no text", name):
        find_pieces([str(tmp_path / name)], PrepareOptions(), print)
    with raises_line(DataError, "no text"):
        find_pieces([str(tmp_path)], PrepareOptions(), print)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"body": "b"}', "no field text; fields: body"),
        (b'{"text": "b"', "Expecting"),
        (b"b", "Expecting"),
        (b'["text"]', "list"),
        (b'{"text": 5}', "int, not a string"),
        (b'{"text": null}', "null, not a string"),
        (b'{"text": "\xff"}', "utf-8"),
    ],
)
def test_a_bad_json_line_is_refused_with_its_place(tmp_path: Path, line: bytes, why: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n' + line + b"\n")
    with raises_line(DataError, "a.jsonl at byte 14", why, "--max_bad_documents"):
        texts(str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (pa.array([1, 2]), "at row 0: field text is int, not a string"),
        (pa.array([["a"], ["b"]]), "not a string"),
        (pa.array(["a", None]), "at row 1: field text is null, not a string"),
        (pa.array([b"good", b"\xff"]).view(pa.string()), "at row 1: 'utf-8' codec"),
    ],
)
def test_parquet_rows_without_text_are_refused(
    tmp_path: Path, values: pa.Array, words: str
) -> None:
    pq.write_table(pa.table({"text": values}), tmp_path / "a.parquet")
    with raises_line(DataError, "a.parquet", words):
        texts(str(tmp_path / "a.parquet"))


@pytest.mark.parametrize("keep", [0, 300])
def test_truncated_parquet_is_refused(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, [made_text(500)], rows=1)
    path.write_bytes(path.read_bytes()[:keep])
    with raises_line(DataError, "a.parquet"):
        find_pieces([str(path)], PrepareOptions(), print)


@pytest.mark.parametrize("name", ["a.ndjson", "a.JSONL", "a.jl", "a.jsonl.TXT", "b.jsonlines.zst"])
def test_json_lines_have_many_names(tmp_path: Path, name: str) -> None:
    content = Path(write_jsonl(tmp_path / "source", MANY)).read_bytes()
    (tmp_path / name).write_bytes(zstd(content) if name.endswith("zst") else content)
    assert texts(str(tmp_path)) == texts(str(tmp_path / name)) == MANY


def test_text_whose_first_line_is_an_object_is_json_lines(tmp_path: Path) -> None:
    long = ["x" * 2 * documents._HEAD_BYTES, "b"]
    assert texts(write_jsonl(tmp_path / "part-00000", long)) == long
    with raises_line(DataError, "b.md at byte 0: no field text; fields: body"):
        texts(write_jsonl(tmp_path / "b.md", ["a"], "body"))
    for text in ('{\n  "text": "a"\n}\n', '{"quoted"} he said', "{% a %}"):
        (tmp_path / "c.txt").write_text(text)
        assert texts(str(tmp_path / "c.txt")) == [text]


REFUSED = {
    "a.TAR.GZ": "an archive; unpack",
    "a.csv": "a table; convert it",
    "a.TSV.gz": "a table; convert it",
    "a.jsonl.xz": "compressed; decompress",
    "a.bin.gz": "compressed; decompress",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_text_by_its_name_is_refused_with_advice(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("some words\n" * 9)
    for source in (tmp_path, tmp_path / "*", tmp_path / name):
        with raises_line(DataError, f"{name} is {REFUSED[name]}"):
            find_pieces([str(source)], PrepareOptions(), print)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"a.md".ljust(257, b"\0") + b"ustar", "is an archive"),
        ("a", b"WARC/1.0", "is an archive"),
        # No size, a window of 2^28, a last raw block of 5 bytes.
        ("a.zst", b"\x28\xb5\x2f\xfd\0\x90\x29\0\0story", "zstd -d --long=31"),
    ],
)
def test_what_is_no_text_by_its_first_bytes_is_refused(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with raises_line(DataError, f"/{name}", words):
        texts(str(tmp_path / name))


@pytest.mark.parametrize("encoding", ["UTF-16LE", "UTF-16BE", "UTF-32LE", "UTF-32BE"])
def test_another_encoding_without_a_mark_is_named(tmp_path: Path, encoding: str) -> None:
    for text in ("Grüße aus Köln\n", "一日一善。\n", "{}\n", "Привет, мир\n" * 999):
        (tmp_path / "a.txt").write_bytes(text.encode(encoding))
        with raises_line(DataError, f"a.txt is likely {encoding}", f"iconv -f {encoding} -t UTF-8"):
            texts(str(tmp_path / "a.txt"))
        (tmp_path / "a.txt").write_text(f"\0\0{text}")
        assert texts(str(tmp_path / "a.txt")) == [f"\0\0{text}"]


@pytest.mark.parametrize("pattern", ["", "*", "**/*.txt"])
@pytest.mark.parametrize("name", ["b.txt", "deeper"])
def test_what_a_broken_link_pointed_to_is_missed(tmp_path: Path, pattern: str, name: str) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / ".#a.txt").symlink_to("me@host:1")
    (tmp_path / name).symlink_to("not-there")
    with raises_line(DataError, f"{name}: its link to not-there is broken"):
        read(f"{tmp_path}/{pattern}")


def test_a_directory_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scandir = os.scandir

    def scan(path: str) -> object:
        if Path(path).name in (".Trash", "locked"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / ".Trash").mkdir()
    assert texts(str(tmp_path)) == texts(f"{tmp_path}/**") == ["a"]
    (tmp_path / "locked").mkdir()
    for pattern in ("", "**/*.txt"):
        with raises_line(DataError, f"{tmp_path}/locked: Permission denied"):
            texts(f"{tmp_path}/{pattern}")


def test_hidden_names_are_skipped_and_counted(tmp_path: Path) -> None:
    names = ("a.txt", ".b.txt", "_c.txt", "x/.old/d.txt", "_temporary/0/e.txt", "x/f.txt")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    for pattern in ("", "**/*.txt"):
        lines: list[str] = []
        found = find_pieces([f"{tmp_path}/{pattern}"], PrepareOptions(), lines.append)
        assert [piece.name for piece in found] == ["a.txt", "x/f.txt"]
        assert "skipped 4 files" in lines[0]
        assert "4 in names that begin with . or _" in lines[0]
    for named in ("_c.txt", ".b*", "_temporary", "_*/**"):
        assert len(read(f"{tmp_path}/{named}")) == 1, named


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0f" * 32 + "\nsize 5123\n"


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl.gz", "a.parquet", "a.bin", "a.npy", "a.csv"])
def test_a_pointer_of_git_lfs_is_refused_under_any_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(LFS)
    with raises_line(DataError, f"{name} is a Git LFS pointer; run git lfs pull"):
        find_pieces([str(tmp_path / name)], PrepareOptions(), print)
    (tmp_path / name).write_text(f"What is this?\n{LFS}")
    refuse_lfs_pointer(tmp_path / name)
