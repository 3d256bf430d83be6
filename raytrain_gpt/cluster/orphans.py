"""What Ray keeps of a worker group whose controller was killed."""

from __future__ import annotations

import ray
from ray.core.generated.gcs_pb2 import PlacementGroupTableData
from ray.util.placement_group import PlacementGroup, remove_placement_group

_NO_ACTOR = ray.ActorID.nil().binary()


def remove_orphaned_groups() -> None:
    """Remove the placement groups of this job that were made by an actor which has died.

    Ray keeps them, and with them their CPUs and GPUs, until the job ends. Ray Train has a cleaner, but it
    asks the dashboard, which not every cluster has, and Ray's public table does not say who made a group.
    """
    job = ray.get_runtime_context().get_job_id()
    accessor = ray._private.state.state._connect_and_get_accessor()
    for entry in accessor.get_placement_group_table():
        group = PlacementGroupTableData.FromString(entry)
        made_here = group.creator_job_id.hex() == job and group.creator_actor_id != _NO_ACTOR
        if made_here and group.creator_actor_dead and group.state != group.REMOVED:
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(group.placement_group_id)))
