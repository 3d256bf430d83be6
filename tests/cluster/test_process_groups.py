"""Process groups that only ranks can join, attacked by user `nobody` in a network namespace."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import raytrain_gpt
from raytrain_gpt.cluster.process_groups import strangers
from raytrain_gpt.cluster.tcp_sockets import parse_table
from tests.cluster.attacked_ranks import NOBODY

pytestmark = pytest.mark.slow

WITHIN_S = 200
GATHERED = {"gathered": ["secret of rank 0", "secret of rank 1"]}
HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode"


def played(scenario: str) -> dict[str, Any]:
    """Run a scenario and return the results of its ranks and its stranger."""
    if os.getuid():
        pytest.skip("needs root: network namespaces, and processes of other users")
    argv = ["unshare", "--net", sys.executable, "-m", "tests.cluster.attacked_ranks", scenario]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=WITHIN_S)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("scenario", ["default", "further", "userns"])
def test_a_stranger_who_connects_is_refused_by_all_ranks_and_gets_nothing(scenario: str) -> None:
    found = played(scenario)
    refusal = (
        f"ConnectionError: a process of uid {NOBODY}, which is not a rank of this run, "
        "connected to rank 0"
    )
    assert [rank["error"].partition(" during")[0] for rank in found["ranks"]] == [refusal] * 2
    seen = found["stranger"]
    assert seen["ports"] == 1
    assert (seen["received"], seen["opened"]) == (0, [])
    assert seen["uid"] == (0 if scenario == "userns" else NOBODY)


@pytest.mark.parametrize(("scenario", "runs"), [("alone", 1), ("beside", 2)])
def test_ranks_of_one_host_meet_without_a_store_that_others_reach(scenario: str, runs: int) -> None:
    found = played(scenario)
    assert found["ranks"] == [GATHERED] * 2 * runs
    groups = 2
    assert found["addresses"] == ["127.0.0.1"] * groups * 2 * runs
    assert found["stores"] == 0


def test_ranks_of_several_hosts_meet_by_a_store_at_the_address_of_the_cluster() -> None:
    found = played("hosts")
    assert found["ranks"] == [GATHERED] * 2
    assert found["addresses"] == ["127.0.0.1"] * 5
    assert found["stores"] == 1


def row(local: str, remote: str, state: str, uid: int, inode: int) -> str:
    return f" 0: {local} {remote} {state} 00000000:00000000 00:00000000 00000000 {uid} 0 {inode} 1 0 100"


LISTENER, OTHER = "0100007F:8000", "0100007F:9000"


@pytest.mark.parametrize(
    ("other_end", "all_here", "found"),
    [
        (row(OTHER, LISTENER, "01", 1000, 2), True, []),
        (row(OTHER, LISTENER, "01", 1000, 9), True, ["a process of uid 1000"]),
        (row(OTHER, LISTENER, "01", 1000, 9), False, ["a process of uid 1000"]),
        (row(OTHER, LISTENER, "06", 0, 0), True, ["a process of uid 0"]),
        ("", True, ["a process that has ended"]),
        ("", False, []),
    ],
    ids=["a rank", "a stranger", "a stranger here", "closed", "gone", "on a different host"],
)
@pytest.mark.parametrize("mapped", [False, True], ids=["tcp", "tcp6"])
def test_the_other_end_of_a_connection_is_a_rank_s_socket(
    other_end: str, all_here: bool, found: list[str], mapped: bool
) -> None:
    rows = [
        row(LISTENER, "00000000:0000", "0A", 0, 1),
        row(LISTENER, OTHER, "01", 0, 3),
        row("0100007F:7000", "0100007F:7001", "01", 5, 7),
        other_end,
    ]
    text = "\n".join([HEADER, *filter(None, rows)])
    if mapped:
        text = re.sub(r"(\w{8}:\w{4}) ", r"0000000000000000FFFF0000\1 ", text)
    of_ranks = {"1", "2", "3"}
    assert strangers(parse_table(text), {LISTENER}, of_ranks, all_here=all_here) == found


@pytest.mark.fault("pickle from a stranger's process group", "never unpickled")
def test_no_pickle_travels_between_ranks() -> None:
    """torch's object collectives would run code from the sender."""
    package = Path(raytrain_gpt.__file__).parent
    sources = {path: path.read_text("utf-8") for path in package.rglob("*.py")}
    assert len(sources) > 100
    with_objects = re.compile(r"\b\w+_object(_list)?\(")
    assert with_objects.search("dist.all_gather_object(values, value)")
    assert not [path.name for path, text in sources.items() if with_objects.search(text)]
