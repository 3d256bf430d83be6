"""`hashes.json`: size and SHA-256 of every file of a checkpoint, written last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, TypeAdapter

from raytrain_gpt.errors import CheckpointError, damage_as
from raytrain_gpt.parsing import parse_json
from raytrain_gpt.storage.location import Location

HASHES_FILE = "hashes.json"
# Files are downloaded to these names.
_FileName = Annotated[str, Field(pattern=r"^\w[\w.-]{0,99}$")]


@dataclass(frozen=True)
class FileEntry:
    """Size and SHA-256 (hex) of a file of a checkpoint."""

    size_bytes: Annotated[int, Field(ge=0, lt=2**53, alias="bytes")]
    sha256: str


_HASHES = TypeAdapter(dict[_FileName, FileEntry])


def read_hashes(directory: Location) -> dict[str, FileEntry]:
    """The entries of a checkpoint by file name.

    Raises:
        CheckpointError: the file is damaged or cannot be read.
    """
    with damage_as(CheckpointError, directory / HASHES_FILE):
        return _HASHES.validate_python(parse_json((directory / HASHES_FILE).read_bytes()))
