"""Locations of the configuration: its paths and URLs with the run's storage settings."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from raytrain_gpt.config.schema import Config
from raytrain_gpt.data.mixture import Mixture, parse_data_path, read_mixture
from raytrain_gpt.data.shards import MANIFEST_FILE
from raytrain_gpt.errors import ConfigError, DataError
from raytrain_gpt.format import shell
from raytrain_gpt.storage.location import COMMAND_RETRY_S, Location, is_url


def location(config: Config, path: str) -> Location:
    """The location of a path or URL in the configuration."""
    endpoint = config.run.s3_endpoint if path.startswith("s3://") else None
    return Location.of(path, retry_for_s=config.run.retry_for_s, endpoint=endpoint)


@contextlib.contextmanager
def config_on_disk(file: str | Path | None) -> Iterator[Path | None]:
    """A local path of a configuration file; a file behind a URL is downloaded and removed afterwards.

    Raises:
        ConfigError: the store has no such file.
        StorageError: the store is unreachable.
    """
    if file is None or not is_url(str(file)):
        yield None if file is None else Path(file)
        return
    source = Location.of(str(file))
    with tempfile.TemporaryDirectory(prefix="raytrain-gpt-") as directory:
        copy = Path(directory, source.name)
        try:
            source.download(copy)
        except FileNotFoundError:
            raise ConfigError(
                f"cannot read configuration {source}: no such file; give an existing one"
            ) from None
        yield copy


def data_locations(config: Config) -> list[Location]:
    """The datasets of the configuration's `data_path`.

    Raises:
        ConfigError: one of several datasets has no weight.
    """
    return [location(config, path) for path, _ in parse_data_path(config.data.data_path)]


def data_is_there(config: Config) -> bool:
    """Whether every dataset has been prepared."""
    return all((data / MANIFEST_FILE).is_file() for data in data_locations(config))


def data_of(config: Config, data_path: str | None = None) -> Mixture:
    """The prepared datasets of a `data_path`; None: the configuration's. Raises as `read_mixture`."""
    parts = parse_data_path(config.data.data_path if data_path is None else data_path)
    return read_mixture([(location(config, path), weight) for path, weight in parts])


def recorded(config: Config) -> Config:
    """Drop the endpoint and the retries of a configuration that a checkpoint or run directory holds.

    Anyone may have written it, and the endpoint receives the credentials of this process.
    """
    return config.updated({"s3_endpoint": None, "retry_for_s": COMMAND_RETRY_S})


def recorded_data(config: Config, holder: Location) -> Mixture:
    """Read the datasets that a checkpoint or run directory names.

    Its author chose them, so a URL is read only from the bucket that `holder` was opened from.

    Raises:
        DataError: a dataset is in a different store, or as `read_mixture`.
    """
    parts = []
    for path, weight in parse_data_path(config.data.data_path):
        if is_url(path) and not path.startswith(f"{holder.bucket}/"):
            raise DataError(
                f"{holder} names the dataset {path} in a different store, which only you may choose; "
                f"if you trust it, add --data {shell(config.data.data_path)}"
            )
        place = Location.of(path, retry_for_s=COMMAND_RETRY_S, endpoint=holder.endpoint)
        parts.append((place, weight))
    return read_mixture(parts)


def run_location(config: Config) -> Location:
    """The run's directory."""
    return location(config, config.run.storage_path) / config.run.run_name
