"""The `ray job submit` of docs/clusters.md, for tests that run it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

_PAGE = Path(__file__).parent.parent / "docs" / "clusters.md"
_LINE = r"^ {4}ray job submit --address http://127\.0\.0\.1:8265 (.*) -- +python train\.py --preset"


def job_options() -> list[str]:
    """Return the words between the address and the program."""
    (found,) = re.findall(_LINE, _PAGE.read_text("utf-8").replace("\\\n", ""), re.MULTILINE)
    return shlex.split(found)
