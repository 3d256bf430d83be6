"""Cluster resources counted from Ray's list of nodes; the tests of runs cover real connections."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray

import raytrain_gpt
from raytrain_gpt.cluster.capacity import Node, largest_world_size
from raytrain_gpt.cluster.connection import check_hides_nothing, cluster_resources
from raytrain_gpt.errors import ClusterError, ConfigError
from tests.cluster.test_capacity import config
from tests.conftest import raises_line


def test_dead_and_draining_nodes_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def node(name: str, alive: bool = True, **resources: float) -> dict[str, object]:
        return {"NodeID": name, "Alive": alive, "Resources": resources}

    nodes = [
        node("a", CPU=4.0),
        node("b", CPU=8.0, GPU=2.0),
        node("c", CPU=16.0, GPU=4.0),
        node("d", alive=False, CPU=32.0),
        node("e", memory=1.0),
    ]
    draining: dict[str, int] = {}
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray._private.state.state, "get_draining_nodes", lambda: draining)
    assert cluster_resources().nodes == (Node(4, 0), Node(8, 2), Node(16, 4), Node(0, 0))
    draining["c"] = 0  # drains do not always have a deadline
    assert cluster_resources().nodes == (Node(4, 0), Node(8, 2), Node(0, 0))
    wanted = config(num_workers=6, min_workers=1, cpus_per_worker=1, use_gpu=True)
    assert largest_world_size(wanted, cluster_resources()) == 2
    draining.clear()
    assert largest_world_size(wanted, cluster_resources()) == 6
    for one in nodes:
        one["Alive"] = False
    with raises_line(ClusterError, "Ray has died on this machine; run the same command again"):
        cluster_resources()


def test_a_directory_that_hides_a_package_from_workers_is_refused(tmp_path: Path) -> None:
    for harmless in ("queue.py", "my_model.py", "ray.txt"):
        (tmp_path / harmless).touch()
    (tmp_path / "torch").mkdir()  # without __init__.py, the installed package wins
    check_hides_nothing(tmp_path)
    check_hides_nothing(Path(raytrain_gpt.__file__).parents[1])
    (tmp_path / "torch" / "__init__.py").touch()
    with raises_line(ConfigError, f"{tmp_path}/torch/__init__.py hides the package torch"):
        check_hides_nothing(tmp_path)


UV = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"
COMMAND = """
import raytrain_gpt
from ray._private.worker import _maybe_modify_runtime_env
print(_maybe_modify_runtime_env({}, False))
"""


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "1"}])
def test_ray_starts_workers_by_uv_only_if_asked(tmp_path: Path, given: dict[str, str]) -> None:
    """Ray looks for a parent process `uv run`."""
    (tmp_path / "run").write_text(UV)
    ended = subprocess.run(
        ["uv", "run", sys.executable, "-c", COMMAND],
        executable=sys.executable,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(raytrain_gpt.__file__).parents[1]), **given},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert ("py_executable" in ended.stdout) == bool(given)
