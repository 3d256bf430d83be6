"""Last lines on stderr of dead actors' processes, where NCCL's watchdog, CUDA and glibc say why they died.

Ray keeps them on the process's node, those of a private cluster only until the command ends.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import ray
from ray.core.generated.gcs_pb2 import ActorTableData
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain_gpt.cluster.failures import causes
from raytrain_gpt.redact import redacted


def last_words(error: BaseException) -> str:
    """Return the last lines of each process whose death is in an exception's chain, if its node answers."""
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
