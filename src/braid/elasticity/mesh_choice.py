"""The mesh of an elastic training for each number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from braid.errors import ConfigError
from braid.programs.layout import Mesh

__all__ = ["mesh_chooser", "mesh_for"]

AXES = ("pp", "dp", "tp")


def mesh_for(wanted: Mesh, num_ranks: int) -> Mesh:
    """Return the mesh for `num_ranks` ranks: only dp changes, else all ranks become replicas.

    >>> wanted = Mesh.parse("pp=2,dp=2")
    >>> str(mesh_for(wanted, 6)), str(mesh_for(wanted, 3))
    ('pp=2,dp=3', 'dp=3')
    """
    inner = prod(size for axis, size in wanted.axes.items() if axis != "dp")
    if num_ranks % inner:
        return Mesh({"dp": num_ranks})
    return Mesh({**wanted.axes, "dp": num_ranks // inner})


def mesh_chooser(mesh: str | Callable[[int], str]) -> Callable[[int], Mesh]:
    """Return a function that returns the mesh for a number of ranks; see `elastic_mesh`.

    Raises:
        ConfigError: A mesh cannot be parsed, or has axes other than pp, dp and tp.
    """
    meshes = [_checked(text) for text in mesh.split(";")] if isinstance(mesh, str) else []
    by_size = {wanted.size: wanted for wanted in meshes}
    if len(by_size) < len(meshes):
        msg = (
            f"two meshes of {mesh} have the same number of ranks: pass one mesh for each number "
            "of ranks"
        )
        raise ConfigError(msg)

    def choose(num_ranks: int) -> Mesh:
        if isinstance(mesh, str):
            return by_size.get(num_ranks) or mesh_for(meshes[0], num_ranks)
        return _checked(mesh(num_ranks))

    return choose


def _checked(text: str) -> Mesh:
    mesh = Mesh.parse(text)
    if others := [axis for axis in mesh.axes if axis not in AXES]:
        msg = (
            f"an elastic mesh has only the axes {', '.join(AXES)}, got {', '.join(others)} in "
            f"{mesh}"
        )
        raise ConfigError(msg)
    return mesh
