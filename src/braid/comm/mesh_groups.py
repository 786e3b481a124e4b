"""Groups of the ranks along the axes of a mesh.

mesh = braid.mesh("dp=2,tp=2")
braid.parallelize(model, mesh["tp"])          # ranks that differ along tp only
mesh["dp", "tp"]                              # along both: all ranks here
mesh.view("ep=4")["ep"]                       # other axes over the same ranks
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from braid.comm import Group
from braid.errors import ConfigError
from braid.programs.layout import Mesh

__all__ = ["MeshGroups"]


class MeshGroups:
    """Groups along the named axes of a mesh, over the ranks of one group.

    Args:
        layout: Mesh of axes and sizes.
        group: Group of `layout.size` ranks.

    Attributes:
        layout: Mesh of axes and sizes.
        coordinates: Index of this rank along each axis.

    Raises:
        ConfigError: The numbers of ranks differ.
    """

    def __init__(self, layout: Mesh, group: Group) -> None:
        if layout.size != group.size:
            msg = (
                f"the mesh {layout} has {layout.size} ranks, but the group has {group.size}: "
                "choose axis sizes whose product is the number of ranks"
            )
            raise ConfigError(msg)
        self.layout = layout
        self.coordinates = layout.coordinates(group.rank)
        self._group = group
        self._groups: dict[tuple[str, ...], Group] = {}

    def __getitem__(self, axes: str | tuple[str, ...]) -> Group:
        """Return the group of ranks that differ from this rank along the given axes only.

        The first use of the axes creates the group and is a collective call.

        Raises:
            ConfigError: The mesh has no such axis.
        """
        names = (axes,) if isinstance(axes, str) else axes
        key = tuple(name for name in self.layout.axes if name in names)
        peers = self.layout.peers(list(names), self._group.rank)  # raises for unknown axes
        if key not in self._groups:
            group = self._group.split(peers[0])
            assert group is not None, "every rank is among its peers"
            self._groups[key] = group
        return self._groups[key]

    def view(self, axes: str | Mapping[str, int]) -> MeshGroups:
        """Return a mesh with other axes over the same ranks, and new groups; see `Mesh.view`.

        Raises:
            ConfigError: The axes have another number of ranks, or cut across the axes of this mesh.
        """
        return MeshGroups(self.layout.view(axes), self._group)

    def __getattr__(self, name: str) -> NoReturn:
        """Raise an error that names the group to pass, where a mesh was used as a group."""
        axis = next(iter(self.__dict__["layout"].axes)) if "layout" in self.__dict__ else "tp"
        msg = f"a mesh has no {name!r}: pass the group along its axes, such as mesh[{axis!r}]"
        raise AttributeError(msg)

    def __str__(self) -> str:
        return f"{self.layout}, here {self.coordinates}"
