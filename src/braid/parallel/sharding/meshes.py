"""Groups of the ranks that own parts and of those that have replicas of them, along a mesh."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch.distributed.device_mesh import DeviceMesh

from braid.comm import Group
from braid.errors import ConfigError
from braid.parallel.gradients.process_groups import group_of
from braid.programs.layout import Mesh

__all__ = ["GroupsOfMesh", "MeshOfGroups", "groups_of_mesh"]


class GroupsOfMesh(NamedTuple):
    """Groups of a rank.

    Attributes:
        shard: Ranks that together own each parameter once.
        replicas: Ranks that own the same parts; None if there are no others.
    """

    shard: Group
    replicas: Group | None


@runtime_checkable
class MeshOfGroups(Protocol):
    """A mesh that makes groups along its axes, as `braid.mesh` returns it."""

    layout: Mesh

    def __getitem__(self, axes: str | tuple[str, ...]) -> Group:
        """Return the group of ranks that differ from this one along some axes only."""
        ...


def groups_of_mesh(mesh: Any) -> GroupsOfMesh:
    """Return the groups along the axes of a mesh: the last one has the parts.

    Args:
        mesh: A mesh of braid, or a DeviceMesh of torch over the backend "braid", of one or two
            axes.

    Raises:
        ConfigError: The mesh is something else, or has more axes.
    """
    if isinstance(mesh, DeviceMesh):
        dims = range(mesh.ndim)
        _check(mesh.ndim, str(mesh))
        groups = [group_of(mesh.get_group(mesh_dim=dim)) for dim in dims]
    elif isinstance(mesh, MeshOfGroups):
        axes = list(mesh.layout.axes)
        _check(len(axes), str(mesh.layout))
        groups = [mesh[axis] for axis in axes]
    else:
        msg = (
            f"mesh must be a mesh of braid or a DeviceMesh of torch, got {type(mesh).__name__}: "
            'pass braid.mesh("replica=2,shard=2"), or a process_group'
        )
        raise ConfigError(msg)
    return GroupsOfMesh(groups[-1], groups[0] if len(groups) > 1 else None)


def _check(num_axes: int, shown: str) -> None:
    if num_axes > 2:
        msg = (
            f"mesh {shown} has {num_axes} axes: pass one of replicas and one of shards, such as "
            'mesh["replica", "shard"], or the shards alone'
        )
        raise ConfigError(msg)
