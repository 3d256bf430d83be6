"""Console output without control sequences; consoles that fail. Secrets: tests/cluster/test_security.py."""

from __future__ import annotations

import errno
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from raytrain_gpt.redact import printable, show


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b]0;title\x07", r"\u001b[31mred\u001b]0;title\u0007"),
        ("good\rbad\x08\x7f\x9b", r"good\u000dbad\u0008\u007f\u009b"),
        ("a\u202eb\u2066c\u200f", r"a\u202eb\u2066c\u200f"),
        ("na\udcffme", r"na\udcffme"),
        ("two\nlines\r\nand\ta tab, 日本 e\u0301 👩\u200d🚀", None),
    ],
)
def test_what_a_terminal_obeys_is_made_visible(text: str, shown: str | None) -> None:
    assert printable(text) == (text if shown is None else shown)


def test_json_stays_the_same() -> None:
    content = {"name\x1b": "a\r\x7f\u202e\udcff\n"}
    assert json.loads(printable(json.dumps(content))) == content


class Broken(io.StringIO):
    """A console that fails as `/dev/full`, a pipe without a reader or a closed terminal does."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "full"),
        OSError(errno.EIO, "gone"),
        BrokenPipeError(),
        ValueError("closed"),
    ],
)
def test_a_console_that_fails_raises_nothing(error: Exception) -> None:
    show(Broken(error), "a line")
    show(None, "a line")


def test_a_console_that_cannot_encode_gets_the_rest() -> None:
    raw = io.BytesIO()
    console = io.TextIOWrapper(raw, "ascii")
    show(console, "caf\u00e9 \u2014 4\n")
    assert raw.getvalue() == b"caf\\xe9 \\u2014 4\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("console", "shown"), [(">&-", ""), ("> /dev/full", ""), ("2>&1 | head -n 1", "error")]
)
def test_a_command_ends_as_it_would_with_a_console(
    console: str, shown: str, tmp_path: Path
) -> None:
    command = f"{sys.executable} -m raytrain_gpt.cli runs list --storage_path {tmp_path}/none"
    script = f"set -o pipefail; {command} {console}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout[:5]) == (2, shown)
    assert "Traceback" not in done.stderr
