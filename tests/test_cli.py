"""The command line as a program."""

from __future__ import annotations

import os
import subprocess

from tests.runs import command


def test_a_reader_that_has_enough_is_not_told_of_a_broken_pipe() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            command("train", "--dry_run"), stdout=writing, stderr=subprocess.PIPE, timeout=120
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")
