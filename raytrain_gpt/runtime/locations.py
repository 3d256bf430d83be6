"""From the configuration to locations: every path or URL with the run's storage settings."""

from __future__ import annotations

from raytrain_gpt.config import Config
from raytrain_gpt.data.storage import Location


def location(config: Config, path: str) -> Location:
    """A path or URL of the configuration."""
    return Location.of(path, retry_for_s=config.run.retry_for_s, endpoint=config.run.s3_endpoint)


def data_location(config: Config) -> Location:
    """The dataset."""
    return location(config, config.data.data_path)


def run_location(config: Config) -> Location:
    """The run's directory."""
    return location(config, config.run.storage_path) / config.run.run_name
