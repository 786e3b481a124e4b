"""Points of an elastic training at which tests end a rank, as patches of braid's methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from braid.checkpoint import tensor_file
from braid.checkpoint.directory import CheckpointDirectory
from braid.comm import Group
from braid.elasticity import replica
from braid.elasticity.gradient_sums import GradientSums
from braid.elasticity.mesh import MeshReplica
from braid.elasticity.training import ElasticTraining
from braid.runtime.rendezvous.launcher_news import LauncherNews
from braid.runtime.rendezvous.membership import _JobEntrance

Visit = Callable[[str], object]
MESH_POINTS = {  # method of MeshReplica, and whether the rank dies before it
    "prepare": ("prepare", True),
    "agree": ("agree", True),
    "agreed": ("agree", False),
    "enter": ("enter", True),
    "divided": ("_divide", False),
}


def add_points(patch: Callable[[Any, str, Any], object], visit: Visit) -> None:
    """Call `visit` with the name of each point that a rank reaches.

    Args:
        patch: Sets an attribute, such as `setattr`.
        visit: Called with the name of the point; may end the rank.
    """

    def add(target: Any, name: str, before: str = "", after: str = "") -> None:
        patch(target, name, _visiting(getattr(target, name), before, after, visit))

    reduce, broadcast = GradientSums.reduce, Group.broadcast

    def reduce_in_parts(sums: Any, *args: Any, **options: Any) -> bool:
        if sums._requests and not isinstance(sums._requests[-1], _Started):
            sums._requests[-1] = _Started(sums._requests[-1], visit)
        return reduce(sums, *args, **options)

    def broadcast_in_parts(group: Group, tensor: Any, root: int, **options: Any) -> Any:
        result = broadcast(group, tensor, root, **options)
        visit("send" if group.rank == root else "receive")
        return result

    patch(GradientSums, "reduce", reduce_in_parts)
    patch(Group, "broadcast", broadcast_in_parts)
    add(GradientSums, "reduce", "sum", "summed")
    add(replica, "transfer", "state")
    add(ElasticTraining, "_save", "save", "saved")
    add(tensor_file, "bytes_of", "saving")
    add(CheckpointDirectory, "publish", "publish")
    add(LauncherNews, "ready", "ready")
    add(_JobEntrance, "join", "meet", "met")
    for point, (name, is_before) in MESH_POINTS.items():
        add(MeshReplica, name, point * is_before, point * (not is_before))


class _Started:
    """Request whose ranks visit "summing" when their part of the sum has begun."""

    def __init__(self, request: Any, visit: Visit) -> None:
        self.request = request
        self.visit = visit

    def start(self, *args: Any) -> Any:
        work = self.request.start(*args)
        self.visit("summing")
        return work


def _visiting(
    function: Callable[..., Any], before: str, after: str, visit: Visit
) -> Callable[..., Any]:
    def visiting(*args: Any, **options: Any) -> Any:
        if before:
            visit(before)
        result = function(*args, **options)
        if after:
            visit(after)
        return result

    return visiting
