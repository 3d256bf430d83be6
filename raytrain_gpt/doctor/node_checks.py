"""What the facts of all nodes mean for a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from raytrain_gpt.cluster.shared_storage import RAY_FILES_BYTES
from raytrain_gpt.doctor.check import Check, failed, passed
from raytrain_gpt.doctor.node_probe import NodeFacts
from raytrain_gpt.format import size

MAX_CLOCK_SKEW_S = 1.0
"""With NTP clocks differ by milliseconds, so a second means that it does not run. Rows of a run are in the
order of their times, and a lease counts as given up 60 s after its holder's last time."""


def judge_answers(nodes: Sequence[NodeFacts]) -> Check:
    """Whether every node runs this package at all."""
    silent = [f"{node.name} ({node.error})" for node in nodes if node.error]
    if silent:
        return failed(
            "nodes",
            f"{len(silent)} of {len(nodes)} nodes did not answer: {', '.join(silent)}; install this "
            "package and its dependencies there, or take the node away",
        )
    return passed("nodes", f"{len(nodes)} answer: {', '.join(node.name for node in nodes)}")


def judge_versions(nodes: Sequence[NodeFacts], driver: Mapping[str, str]) -> Check:
    """Whether Python, Ray, torch and this package are the same everywhere.

    Args:
        nodes: Those that answered.
        driver: Versions of this process.
    """
    everywhere = {"the driver": driver, **{n.name: n.versions or {} for n in nodes}}
    differences = []
    for what in driver:
        found: dict[str, list[str]] = {}
        for place, versions in everywhere.items():
            found.setdefault(versions.get(what, "missing"), []).append(place)
        if len(found) > 1:
            places = [f"{version} on {', '.join(where)}" for version, where in found.items()]
            differences.append(f"{what} {' but '.join(places)}")
    if differences:
        return failed(
            "versions", f"{'; '.join(differences)}; install the same version on every node"
        )
    return passed("versions", ", ".join(f"{what} {version}" for what, version in driver.items()))


def judge_clocks(nodes: Sequence[NodeFacts]) -> Check:
    """Whether all clocks, the driver's too, show the same time within `MAX_CLOCK_SKEW_S`."""
    # A clock is somewhere within its uncertainty: only what is surely apart is wrong.
    lowest = min([0.0, *(n.clock_offset_s + n.clock_uncertainty_s for n in nodes)])
    highest = max([0.0, *(n.clock_offset_s - n.clock_uncertainty_s for n in nodes)])
    each = ", ".join(
        f"{n.name} {n.clock_offset_s:+.3f} ± {n.clock_uncertainty_s:.3f} s" for n in nodes
    )
    if highest - lowest > MAX_CLOCK_SKEW_S:
        return failed(
            "clocks",
            f"they differ by {highest - lowest:.1f} s, more than {MAX_CLOCK_SKEW_S:g} s; against the "
            f"driver's: {each}; run NTP (chrony, systemd-timesyncd) on every node",
        )
    return passed("clocks", f"against the driver's: {each}")


def judge_storage(nodes: Sequence[NodeFacts], storage: str, driver_error: str) -> Check:
    """Whether all nodes write where the driver does.

    Args:
        nodes: Those that answered.
        storage: `storage_path`.
        driver_error: Why the driver itself cannot write there.
    """
    remedy = "use a directory that all nodes mount and may write, or s3://"
    if driver_error:
        wrong = f"the driver cannot write storage_path {storage}: {driver_error}"
        return failed("storage", f"{wrong}; {remedy}")
    wrong = _named(nodes, lambda node: node.storage_error)
    if wrong:
        wrong = f"storage_path {storage} is not shared by all nodes: {wrong}"
        return failed("storage", f"{wrong}; {remedy}")
    return passed("storage", f"{storage} is written and read by {len(nodes)} nodes")


def judge_data(nodes: Sequence[NodeFacts], data: str, seen: str) -> Check:
    """Whether all nodes read the same dataset.

    Args:
        nodes: Those that answered.
        data: `data_path`.
        seen: What the driver sees there.
    """
    wrong = _named(nodes, lambda node: node.data_error)
    if wrong:
        return failed(
            "data",
            f"data_path {data} cannot be read on all nodes: {wrong}; use a directory that all nodes "
            "mount, or s3://",
        )
    return passed("data", f"{data} is read by {len(nodes)} nodes: {seen}")


def judge_ray_disk(nodes: Sequence[NodeFacts]) -> Check:
    """Whether Ray has room for its own files on every node: a full disk there hangs a run."""
    full = [
        f"{n.name} has {size(n.ray_dir_free_bytes)} free in {n.ray_dir}"
        for n in nodes
        if n.ray_dir_free_bytes < RAY_FILES_BYTES
    ]
    if full:
        return failed(
            "ray_disk",
            f"{', '.join(full)}; Ray needs {size(RAY_FILES_BYTES)} for its own files: make room "
            "there, or start Ray with another --temp-dir",
        )
    least = min(nodes, key=lambda node: node.ray_dir_free_bytes)
    return passed("ray_disk", f"at least {size(least.ray_dir_free_bytes)} free ({least.name})")


def _named(nodes: Sequence[NodeFacts], error: Callable[[NodeFacts], str]) -> str:
    return ", ".join(f"{node.name}: {error(node)}" for node in nodes if error(node))
