"""Paths and URLs that commands name, and those of the configuration with the run's storage settings."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from raytrain_gpt.config.code import Code
from raytrain_gpt.config.kinds import Registry
from raytrain_gpt.config.schema import Config, parse_config
from raytrain_gpt.config.sections import EvalSection, TrackingSection
from raytrain_gpt.data.mixture import BatchOrder, Mixture, parse_data_path, read_mixture
from raytrain_gpt.data.shards import MANIFEST_FILE
from raytrain_gpt.errors import CheckpointError, ConfigError, DataError
from raytrain_gpt.format import Log, listed, shell
from raytrain_gpt.redact import say
from raytrain_gpt.storage.location import COMMAND_RETRY_S, Location, LocationLike, is_url

_PATH = re.compile(r"/|~|\.\.?(/|$)")


def location(config: Config, path: str) -> Location:
    endpoint = config.run.s3_endpoint if path.startswith("s3://") else None
    return Location.of(path, retry_for_s=config.run.retry_for_s, endpoint=endpoint)


@contextlib.contextmanager
def file_on_disk(file: str | Path | Location, what: str = "configuration") -> Iterator[Path]:
    """Yield a file's local path, downloading a URL; may raise ConfigError, StorageError."""
    if not is_url(str(file)):
        yield Path(str(file))
        return
    source = file if isinstance(file, Location) else Location.of(str(file))
    with tempfile.TemporaryDirectory(prefix="raytrain-gpt-") as directory:
        copy = Path(directory, source.name)
        try:
            source.download(copy)
        except FileNotFoundError:
            raise ConfigError(f"cannot read {what} {source}: no such file; check the URL") from None
        yield copy


def read_code(files: Sequence[str | Path], may_differ: bool = False) -> Code | None:
    """Read the code in files or at URLs, if any, without executing it; may raise ConfigError."""
    with contextlib.ExitStack() as downloads:
        paths = [downloads.enter_context(file_on_disk(file, "code")) for file in files]
        return Code.read(*paths, may_differ=may_differ) if paths or may_differ else None


def data_is_there(config: Config) -> bool:
    """Whether all datasets of `data_path` exist; raises a ConfigError if one of several has no weight."""
    data = [location(config, path) for path, _ in parse_data_path(config.data.data_path)]
    return all((directory / MANIFEST_FILE).is_file() for directory in data)


def read_data(config: Config, data_path: str | None = None) -> Mixture:
    """Read the prepared datasets of a `data_path`; see `read_mixture`."""
    weighted = parse_data_path(config.data.data_path if data_path is None else data_path)
    return read_mixture([(location(config, path), weight) for path, weight in weighted])


def make_order(config: Config, data: Mixture) -> BatchOrder:
    """Make the training order of a run; see `Mixture.order`."""
    return data.order(config.batch_sequences, config.data.seq_len, config.train.seed)


def recorded(tree: Mapping[str, Mapping[str, Any]], where: str, registry: Registry) -> Config:
    """Parse a stored configuration without what only its reader may choose.

    These are retries, the endpoint (which gets credentials), and settings of evaluations and trackers.
    """
    kept = {"eval": EvalSection.model_fields, "tracking": TrackingSection.model_fields}
    tree = {
        title: {name: value for name, value in section.items() if name in kept.get(title, section)}
        for title, section in tree.items()
    }
    ours = {"s3_endpoint": None, "retry_for_s": COMMAND_RETRY_S}
    return parse_config(tree, where, registry).updated(ours)


def recorded_data(config: Config, holder: Location) -> Mixture:
    """Read the datasets that a checkpoint or run directory names.

    Their author is unknown, so URLs outside the bucket of `holder` are refused with a DataError.
    """
    datasets = []
    for path, weight in parse_data_path(config.data.data_path):
        if is_url(path) and not path.startswith(f"{holder.bucket}/"):
            raise DataError(
                f"{holder} names the dataset {path} in another store, which only you may choose; "
                f"if you trust it, add --data {shell(config.data.data_path)}"
            )
        data = Location.of(path, retry_for_s=COMMAND_RETRY_S, endpoint=holder.endpoint)
        datasets.append((data, weight))
    return read_mixture(datasets)


def run_location(config: Config) -> Location:
    return location(config, config.run.storage_path) / config.run.run_name


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


def find_in(config: Config, name: str, log: Log = lambda line: None) -> Location:
    """Find the place of a name or path in the run's storage; see `find`."""
    return location(config, find(name, location(config, config.run.storage_path), log).url)
