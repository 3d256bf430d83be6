"""torchrun on two hosts whose own names mean 127.0.1.1, as on Debian."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpus.null_gpus import RUN, assert_same_calls, variables
from tests.made_runs import steps

from .hosts import SHARED, missing, network

pytestmark = pytest.mark.long


@pytest.mark.parametrize("gpus", [0, pytest.param(2, marks=pytest.mark.gpus)])
def test_ranks_on_two_hosts_find_each_other(tmp_path: Path, dataset: Path, gpus: int) -> None:
    if reason := missing():
        pytest.skip(reason)
    subprocess.run(["cp", "-rL", dataset, tmp_path / "data"], check=True)
    (tmp_path / "calls").mkdir()
    with network(["first", "second"], tmp_path, {"first": "", "second": ""}) as net:
        settings = {
            "data_path": f"{SHARED}/data", "storage_path": f"{SHARED}/runs", "run_name": "both",
            "num_workers": 0, "min_workers": "null", "max_steps": 4, "use_gpu": bool(gpus),
            "micro_batch_sequences": 4,
        }  # fmt: skip
        flags = [f"--{name}={value}" for name, value in settings.items()]
        processes = []
        for number, host in enumerate(net.hosts):
            launch = f"--nnodes=2 --node_rank={number} --master_addr={net.hosts[0].address}"
            argv = ["-m", "torch.distributed.run", *launch.split(), f"--nproc_per_node={gpus or 1}"]
            argv = [str(RUN) if gpus else sys.executable, *argv, "train.py", "--preset=quickstart"]
            env = variables(gpus, Path(SHARED, "calls")) | {"NULL_HOST": host.name}
            command = host.enter([*argv, *flags], env)
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        shown = [process.communicate(timeout=300)[0] for process in processes]
        for host in net.hosts:
            host.kill_all()
    assert [process.returncode for process in processes] == [0, 0], shown
    assert f"local mode: {2 * (gpus or 1)} processes" in shown[0]
    assert len(steps(tmp_path / "runs" / "both")) == 4
    if gpus:
        assert "ranks [0, 1, 2, 3]" in assert_same_calls(tmp_path / "calls")
