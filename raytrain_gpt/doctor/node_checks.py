"""What the facts of all nodes mean for a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raytrain_gpt.cluster.shared_storage import ON_ALL_NODES, RAY_FILES_BYTES
from raytrain_gpt.doctor.check import Failed, checks
from raytrain_gpt.doctor.node_probe import NodeFacts
from raytrain_gpt.format import size

MAX_CLOCK_SKEW_S = 1.0
"""With NTP clocks differ by milliseconds, so a second means that it does not run. Rows of a run are in the
order of their times, and a lease counts as given up 60 s after its holder's last time."""


@checks("nodes")
def judge_answers(nodes: Sequence[NodeFacts]) -> str:
    """Whether every node runs this package at all."""
    silent = [f"{node.name} ({node.error})" for node in nodes if node.error]
    if silent:
        raise Failed(
            f"{len(silent)} of {len(nodes)} nodes did not answer: {', '.join(silent)}; install this "
            "package and its dependencies there, or take the node away"
        )
    return f"{len(nodes)} answer: {', '.join(node.name for node in nodes)}"


@checks("versions")
def judge_versions(nodes: Sequence[NodeFacts], driver: Mapping[str, str]) -> str:
    """Whether Python, Ray, torch and this package are the same on all nodes and the driver."""
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
        raise Failed(f"{'; '.join(differences)}; install the same version on every node")
    return ", ".join(f"{what} {version}" for what, version in driver.items())


@checks("clocks")
def judge_clocks(nodes: Sequence[NodeFacts]) -> str:
    """Whether all clocks, the driver's too, show the same time within `MAX_CLOCK_SKEW_S`."""
    # A clock is somewhere within its uncertainty: only what is surely apart is wrong.
    lowest = min([0.0, *(n.clock_offset_s + n.clock_uncertainty_s for n in nodes)])
    highest = max([0.0, *(n.clock_offset_s - n.clock_uncertainty_s for n in nodes)])
    each = ", ".join(
        f"{n.name} {n.clock_offset_s:+.3f} ± {n.clock_uncertainty_s:.3f} s" for n in nodes
    )
    if highest - lowest > MAX_CLOCK_SKEW_S:
        raise Failed(
            f"they differ by {highest - lowest:.1f} s, more than {MAX_CLOCK_SKEW_S:g} s; against the "
            f"driver's: {each}; run NTP (chrony, systemd-timesyncd) on every node"
        )
    return f"against the driver's: {each}"


@checks("storage")
def judge_storage(nodes: Sequence[NodeFacts], storage: str, driver_error: str) -> str:
    """Whether all nodes write where the driver does, and the driver itself can (`driver_error`)."""
    if driver_error:
        raise Failed(driver_error)
    wrong = ", ".join(f"{n.name}: {n.storage_error}" for n in nodes if n.storage_error)
    if wrong:
        raise Failed(f"storage_path {storage} is not shared by all nodes: {wrong}; {ON_ALL_NODES}")
    return f"{storage} is written and read by {len(nodes)} nodes"


@checks("data")
def judge_data(nodes: Sequence[NodeFacts], data_path: str, seen: str) -> str:
    """Whether all nodes read the dataset that the driver has `seen`."""
    wrong = ", ".join(f"{n.name}: {n.data_error}" for n in nodes if n.data_error)
    if wrong:
        raise Failed(f"data_path {data_path} cannot be read on all nodes: {wrong}; {ON_ALL_NODES}")
    return f"{data_path} is read by {len(nodes)} nodes: {seen}"


@checks("ray_disk")
def judge_ray_disk(nodes: Sequence[NodeFacts]) -> str:
    """Whether Ray has room for its own files on every node: a full disk there hangs a run."""
    full = [
        f"{n.name} has {size(n.ray_dir_free_bytes)} free in {n.ray_dir}"
        for n in nodes
        if n.ray_dir_free_bytes < RAY_FILES_BYTES
    ]
    if full:
        raise Failed(
            f"{', '.join(full)}; Ray needs {size(RAY_FILES_BYTES)} for its own files: make room there, "
            "or start Ray with another --temp-dir"
        )
    least = min(nodes, key=lambda node: node.ray_dir_free_bytes)
    return f"at least {size(least.ray_dir_free_bytes)} free ({least.name})"
