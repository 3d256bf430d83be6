"""Ray's processes that died or hang: last words and remains of the dead, and an end for those that hang."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import ray
from ray.core.generated.gcs_pb2 import ActorTableData, PlacementGroupTableData
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain_gpt.cluster.failures import causes
from raytrain_gpt.redact import redacted

_NO_ACTOR = ray.ActorID.nil().binary()


def remove_orphaned_groups() -> None:
    """Remove this job's placement groups whose creating actor has died.

    Ray would hold their CPUs and GPUs until the job ends. Ray Train's cleaner needs the dashboard, which some
    clusters lack, and Ray's public table does not name a group's creator.
    """
    job = ray.get_runtime_context().get_job_id()
    accessor = ray._private.state.state._connect_and_get_accessor()
    for entry in accessor.get_placement_group_table():
        group = PlacementGroupTableData.FromString(entry)
        made_here = group.creator_job_id.hex() == job and group.creator_actor_id != _NO_ACTOR
        if made_here and group.creator_actor_dead and group.state != group.REMOVED:
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(group.placement_group_id)))


def kill_controllers(grace_s: float = 0.0) -> None:
    """Kill the Ray Train controllers that this process started, which run on its node.

    This ends the `fit()` of a hanging controller. After `fit()`, a controller may hang in Ray's destructors
    and outlive the command, with 400 MB. Ray does not warn about those that exit within `grace_s`.
    """
    this_process = ray.get_runtime_context().get_worker_id()
    accessor = ray._private.state.state._connect_and_get_accessor()
    job = ray.JobID.from_hex(ray.get_runtime_context().get_job_id())
    for entry in accessor.get_actor_table(job, None):
        actor = ActorTableData.FromString(entry)
        is_ours = actor.owner_address.worker_id.hex() == this_process
        if is_ours and actor.class_name == "TrainController" and actor.pid:
            with contextlib.suppress(OSError):  # it has exited
                command, until = Path(f"/proc/{actor.pid}/cmdline"), time.monotonic() + grace_s
                while command.read_bytes().startswith(b"ray::TrainContr"):
                    if time.monotonic() >= until:
                        os.kill(actor.pid, signal.SIGKILL)
                        break
                    time.sleep(0.1)


def kill_process(node_id: str, pid: int) -> None:
    """SIGKILL a process by a task on its node.

    `ray.kill` needs the actor's handle, which Ray Train hides; a stopped process reacts only to SIGKILL.
    """
    node = NodeAffinitySchedulingStrategy(node_id, soft=False)
    _kill.options(scheduling_strategy=node).remote(pid)


@ray.remote(num_cpus=0, max_retries=0)  # type: ignore[untyped-decorator]
def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def last_words(error: BaseException) -> str:
    """Return the last lines on stderr of each process whose death is in an exception's chain.

    There NCCL's watchdog, CUDA and glibc say why it died. Ray keeps them on the process's node, those of a
    private cluster only until the command ends; none come from a node that does not answer.
    """
    dead = [cause for cause in causes(error) if isinstance(cause, ray.exceptions.ActorDiedError)]
    shown = list[str]()
    for actor_id in dict.fromkeys(actor.actor_id for actor in dead if actor.actor_id):
        accessor = ray._private.state.state._connect_and_get_accessor()
        found = accessor.get_actor_info(ray.ActorID.from_hex(actor_id))
        actor = ActorTableData.FromString(found or b"")
        with contextlib.suppress(ray.exceptions.RayError, ValueError):  # the node is lost too
            node = NodeAffinitySchedulingStrategy(actor.address.node_id.hex(), soft=False)
            task = _read_stderr.options(scheduling_strategy=node).remote(actor.pid)
            if lines := ray.get(task, timeout=10):
                shown.append(f"last lines of process {actor.pid}:\n{redacted(lines)}")
    return "\n".join(shown)


@ray.remote(num_cpus=0, max_retries=0)  # type: ignore[untyped-decorator]
def _read_stderr(pid: int) -> str:
    logs = Path(ray._private.worker.global_worker.node.get_logs_dir_path())
    text = "".join(file.read_text(errors="replace") for file in logs.glob(f"worker-*-{pid}.err"))
    lines = [line[:300] for line in text.splitlines()[-80:] if not line.startswith(":")]
    return "\n".join([line for line in lines if line][-40:])
