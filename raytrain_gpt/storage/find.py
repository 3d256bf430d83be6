"""Places that commands name: a name is a run of the storage, a path is written as a path."""

from __future__ import annotations

import re
from pathlib import Path

from raytrain_gpt.errors import CheckpointError
from raytrain_gpt.format import Log, listed, shell
from raytrain_gpt.redact import say
from raytrain_gpt.storage.location import COMMAND_RETRY_S, Location, LocationLike, is_url

_PATH = re.compile(r"/|~|\.\.?(/|$)")


def find(name: str | Path, storage: LocationLike, log: Log = say) -> Location:
    """Return the place of a run, sweep, checkpoint or export: `storage / name`, else the path from here.

    A URL, a `Path`, and what starts with `/`, `./`, `../` or `~` is not looked up in the storage. Logs a line
    if a name is in both places; raises a CheckpointError if it is in neither.
    """
    storage = Location.of(storage, retry_for_s=COMMAND_RETRY_S)
    here = Location.of(name, retry_for_s=storage.retry_for_s)
    if isinstance(name, Path) or is_url(name) or _PATH.match(name):
        return here
    there = storage / str(Path(name))
    if there.exists():
        if here.exists() and not (there.is_local and there.path.samefile(here.path)):
            log(f"{name} is run {there}; for {here} write {shell(f'./{name}')}")
        return there
    if here.exists():
        return here
    names = (one for one in storage.names() if not (storage / one).is_file())
    raise CheckpointError(
        f"no run {name} in {storage}, which has {listed(names)}, and no {here}; set --storage_path to "
        "where it is, or give its path"
    )
