"""Which cluster RAY_ADDRESS asks for, told without importing Ray."""

from __future__ import annotations

import os

from raytrain_gpt.errors import ConfigError


def named_cluster() -> str | None:
    """The cluster that RAY_ADDRESS names; None: none."""
    named = os.environ.get("RAY_ADDRESS")
    return None if named in ("", "local") else named


def check_no_cluster_named() -> None:
    """Check that no cluster is asked for, in local mode.

    Raises:
        ConfigError: RAY_ADDRESS names one, as in a submitted job.
    """
    if address := named_cluster():
        raise ConfigError(
            f"num_workers=0 trains in this process without Ray, but RAY_ADDRESS={address} names a cluster; "
            "set num_workers to 1 or more to train there, or unset RAY_ADDRESS"
        )
