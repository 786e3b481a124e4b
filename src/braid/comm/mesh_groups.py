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
    """Ranks of a group, arranged along named axes.

    Args:
        layout: The arrangement.
        group: As many ranks.

    Attributes:
        layout: As given.
        coordinates: Index of this rank along each axis.

    Raises:
        ConfigError: The numbers of ranks differ.
    """

    def __init__(self, layout: Mesh, group: Group) -> None:
        if layout.size != group.size:
            msg = (
                f"the mesh {layout} has {layout.size} ranks, and the group {group.size}: let the "
                "axes multiply to the number of ranks"
            )
            raise ConfigError(msg)
        self.layout = layout
        self.coordinates = layout.coordinates(group.rank)
        self._group = group
        self._groups: dict[tuple[str, ...], Group] = {}

    def __getitem__(self, axes: str | tuple[str, ...]) -> Group:
        """Return the group of ranks that differ from this one along some axes only.

        The first use of the axes makes the group, so it is a collective.

        Raises:
            ConfigError: There is no such axis.
        """
        names = (axes,) if isinstance(axes, str) else axes
        key = tuple(name for name in self.layout.axes if name in names)
        peers = self.layout.peers(list(names), self._group.rank)  # refuses unknown axes
        if key not in self._groups:
            own = self._group.split(peers[0])
            assert own is not None, "every rank is in a group of its own peers"
            self._groups[key] = own
        return self._groups[key]

    def view(self, axes: str | Mapping[str, int]) -> MeshGroups:
        """Return other axes over the same ranks, with groups of their own; see `Mesh.view`.

        Raises:
            ConfigError: The axes have another number of ranks, or cut across those here.
        """
        return MeshGroups(self.layout.view(axes), self._group)

    def __getattr__(self, name: str) -> NoReturn:
        """Say which group to pass, where a mesh was taken for one."""
        axis = next(iter(self.__dict__["layout"].axes)) if "layout" in self.__dict__ else "tp"
        msg = f"a mesh has no {name!r}: pass the group along its axes, such as mesh[{axis!r}]"
        raise AttributeError(msg)

    def __str__(self) -> str:
        return f"{self.layout}, here {self.coordinates}"
