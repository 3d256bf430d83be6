"""The cluster in RAY_ADDRESS, read without importing Ray."""

from __future__ import annotations

import os

from raytrain_gpt.errors import ConfigError


def named_cluster() -> str | None:
    """Return the cluster that RAY_ADDRESS names, or None."""
    address = os.environ.get("RAY_ADDRESS")
    return None if address in ("", "local") else address


def check_no_cluster_named() -> None:
    """Raise ConfigError in local mode if RAY_ADDRESS names a cluster, as in a submitted job."""
    if address := named_cluster():
        raise ConfigError(
            f"num_workers=0 trains in this process without Ray, but RAY_ADDRESS={address} names a cluster; "
            "set num_workers to 1 or more to train there, or unset RAY_ADDRESS"
        )
