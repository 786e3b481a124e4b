"""Named axes over the ranks of a job.

Ranks are counted along the last axis first, as elements of an array of this shape. So ranks that
differ along the last axis only are neighbours, which launchers put on the same host: name the axis
with the most traffic last.

Source: the mesh of N. Shazeer et al., Mesh-TensorFlow, NeurIPS 2018.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from operator import mul

from braid.errors import ConfigError, raise_all

__all__ = ["Mesh"]

NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Mesh:
    """An arrangement of ranks along named axes.

    Attributes:
        axes: Number of ranks along each axis, by name; consecutive ranks differ in the last axis.

    Raises:
        ConfigError: `axes` is empty, or a name or size is not valid; the message lists all
            problems.

    >>> mesh = Mesh({"pp": 2, "dp": 3})
    >>> mesh.size, mesh.coordinates(4), mesh.peers(["dp"], 4), mesh.peers(["pp"], 4)
    (6, {'pp': 1, 'dp': 1}, (3, 4, 5), (1, 4))
    """

    axes: Mapping[str, int]

    def __post_init__(self) -> None:
        problems = [
            f"{name!r} is not an axis name, such as dp" for name in self.axes if not _is_name(name)
        ]
        problems += [
            f"axis {name} must have at least 1 rank, got {size!r}"
            for name, size in self.axes.items()
            if type(size) is not int or size < 1
        ]
        if not self.axes:
            problems.append("a mesh needs at least one axis, such as dp=2")
        raise_all(problems)

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Parse a mesh, such as `pp=2,dp=4`.

        Raises:
            ConfigError: The text is not a mesh.
        """
        axes: dict[str, int] = {}
        for part in text.split(","):
            name, equals, size = part.strip().partition("=")
            if not equals or not size.strip().isdecimal() or name.strip() in axes:
                msg = f"a mesh is written as pp=2,dp=4 (each axis once), got {text!r}"
                raise ConfigError(msg)
            axes[name.strip()] = int(size)
        return cls(axes)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.axes.values())

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the index of a rank along each axis.

        Raises:
            ConfigError: The rank is not in the mesh.
        """
        if not 0 <= rank < self.size:
            msg = f"rank {rank} is not in a mesh of {self.size} ranks ({self})"
            raise ConfigError(msg)
        indices = {}
        for name, size in reversed(list(self.axes.items())):
            rank, indices[name] = divmod(rank, size)
        return {name: indices[name] for name in self.axes}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """Return the rank at `coordinates`; a missing axis has index 0.

        Raises:
            ConfigError: There are no such coordinates.
        """
        number = 0
        self._check_axes(coordinates)
        for name, size in self.axes.items():
            index = coordinates.get(name, 0)
            if not 0 <= index < size:
                msg = f"axis {name} has only the indices 0 to {size - 1}, got {index}"
                raise ConfigError(msg)
            number = number * size + index
        return number

    def peers(self, axes: str | list[str] | tuple[str, ...], rank: int) -> tuple[int, ...]:
        """Return a rank and all ranks that differ from it only along `axes`, in order.

        Raises:
            ConfigError: An axis or the rank is not in the mesh.
        """
        names = [axes] if isinstance(axes, str) else list(axes)
        here = self.coordinates(rank)
        self._check_axes(dict.fromkeys(names, 0))
        along = [name for name in self.axes if name in names]
        places = product(*(range(self.axes[name]) for name in along))
        return tuple(self.rank({**here, **dict(zip(along, p, strict=True))}) for p in places)

    def view(self, axes: str | Mapping[str, int]) -> Mesh:
        """Return a mesh of the same ranks with some axes split and neighbouring axes joined.

        Experts often use other axes than dense layers, such as `dp=1,ep=8` instead of `dp=4,tp=2`.

        Args:
            axes: Text such as `dp=2,ep=4`, or sizes by name; the last axis varies fastest.

        Raises:
            ConfigError: The product of the sizes is not the number of ranks, or splitting and
                joining axes cannot give these axes.

        >>> str(Mesh.parse("dp=4,tp=2").view("dp=2,ep=4"))
        'dp=2,ep=4'
        """
        other = Mesh.parse(axes) if isinstance(axes, str) else Mesh(dict(axes))
        if other.size != self.size:
            msg = (
                f"{other} has {other.size} ranks, but {self} has {self.size}: choose a view with "
                "the same number of ranks"
            )
            raise ConfigError(msg)
        # both are made of the same parts if the ranks below any two cuts divide each other
        cuts = sorted({*_blocks(self), *_blocks(other)})
        crossed = [(low, high) for low, high in pairwise(cuts) if high % low]
        if crossed:
            low, high = crossed[0]
            msg = (
                f"{other} cuts across {self}: blocks of {low} and of {high} ranks do not divide "
                "each other. A view can only split axes, and join axes that stand side by side"
            )
            raise ConfigError(msg)
        return other

    def split(self, axis: str, into: str | Mapping[str, int]) -> Mesh:
        """Return a mesh with one axis replaced by several axes of the same total size.

        Raises:
            ConfigError: The axis is unknown, a name occurs twice, or the sizes do not fit.

        >>> str(Mesh.parse("dp=8,tp=2").split("dp", "dp=2,fsdp=4"))
        'dp=2,fsdp=4,tp=2'
        """
        self._check_axes({axis: 0})
        parts = Mesh.parse(into) if isinstance(into, str) else Mesh(dict(into))
        if parts.size != self.axes[axis]:
            msg = (
                f"axis {axis} has {self.axes[axis]} ranks, but the axes {parts} have "
                f"{parts.size}: choose sizes whose product is {self.axes[axis]}"
            )
            raise ConfigError(msg)
        return self._replaced([axis], parts.axes)

    def join(self, axes: list[str] | tuple[str, ...], name: str) -> Mesh:
        """Return a mesh with neighbouring axes replaced by one axis.

        Raises:
            ConfigError: An axis is unknown, axes are not neighbours, or the name occurs twice.

        >>> str(Mesh.parse("pp=2,dp=4,tp=2").join(["dp", "tp"], "ep"))
        'pp=2,ep=8'
        """
        self._check_axes(dict.fromkeys(axes, 0))
        names = list(self.axes)
        first = names.index(axes[0]) if axes else 0
        if not axes or names[first : first + len(axes)] != list(axes):
            msg = (
                f"axes {', '.join(axes) or 'none'} are not adjacent in {self}: join axes that "
                "follow each other, in their order"
            )
            raise ConfigError(msg)
        return self._replaced(axes, {name: math.prod(self.axes[axis] for axis in axes)})

    def _replaced(self, axes: Sequence[str], by: Mapping[str, int]) -> Mesh:
        """Return a mesh with some neighbouring axes replaced."""
        twice = [name for name in by if name in self.axes and name not in axes]
        if twice:
            msg = f"{self} already has an axis {', '.join(twice)}: choose another name"
            raise ConfigError(msg)
        made: dict[str, int] = {}
        for name, size in self.axes.items():
            made.update(by if name == axes[0] else {} if name in axes else {name: size})
        return Mesh(made)

    def _check_axes(self, names: Mapping[str, int]) -> None:
        unknown = [name for name in names if name not in self.axes]
        if unknown:
            msg = f"the mesh {self} has no axis {', '.join(unknown)}: use one of its axes"
            raise ConfigError(msg)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes.items())


def _blocks(mesh: Mesh) -> Iterator[int]:
    """Return the number of ranks of a block inside each axis, from the innermost."""
    return accumulate(reversed(list(mesh.axes.values())), mul, initial=1)


def _is_name(name: object) -> bool:
    return isinstance(name, str) and NAME.fullmatch(name) is not None
