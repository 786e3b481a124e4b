"""Layouts of tensors: the axes of a mesh that split each dim.

    mesh dp=2,tp=2       layout "dp,tp | -"       shape (5, 3)

    rows     0   1   2   3   4
    dp      |  dp 0     | dp 1  |       larger parts first
    tp      | 0     | 1 | 0 | 1 |       each part of dp is divided anew: ranks 0, 1, 2, 3

A dim that several axes split is divided axis by axis, each time as evenly as possible. So one more
inner axis refines the parts, and gathering along the innermost axis gives exactly the parts without
it, for any size. Chunks of equal size with a short last one have no such property: torch's DTensor
returns wrong elements of a (5, 3) tensor that is split twice along dim 0 on a 2x2 mesh.

Source: the named axes per dim are those of GSPMD (Y. Xu et al., arXiv:2105.04663, 2021).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from braid.errors import ConfigError
from braid.layout.mesh import Mesh

__all__ = ["Box", "Layout"]

Box = tuple[tuple[int, int], ...]
"""First index and end of each dim."""

NO_DIMS = "scalar"
FORM = "a layout is written as 'dp,tp | - ; partial cp': the axes of each dim, - for none"


@dataclass(frozen=True, slots=True)
class Layout:
    """Distribution of a tensor over the ranks of a mesh.

    Axes that are not named hold replicas.

    Attributes:
        mesh: Named axes.
        dims: Axes that split each dim, outermost first.
        partial: Axes over which the values are to be summed, in the order of the mesh.

    Raises:
        ConfigError: Axes are unknown or come twice; all problems are named.

    >>> layout = Layout(Mesh({"dp": 2, "tp": 2}), (("dp", "tp"), ()))
    >>> str(layout), [layout.box((5, 3), rank)[0] for rank in range(4)]
    ('dp,tp | -', [(0, 2), (2, 3), (3, 4), (4, 5)])
    """

    mesh: Mesh
    dims: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {axes!r}: write a tuple of axes, such as ({axes!r},)"
            for name, axes in (*_named(self.dims), ("partial", self.partial))
            if isinstance(axes, str)
        ]
        if not problems:
            used = [axis for axes in (*self.dims, self.partial) for axis in axes]
            problems = [
                f"there is no axis {axis} in the mesh {self.mesh}"
                for axis in dict.fromkeys(used)
                if axis not in self.mesh.axes
            ]
            problems += [
                f"axis {axis} is named {times} times, and splits one dim at most or is partial"
                for axis, times in Counter(used).items()
                if times > 1
            ]
        if problems:
            raise ConfigError("; ".join(problems))
        object.__setattr__(self, "dims", tuple(tuple(axes) for axes in self.dims))
        partial = tuple(axis for axis in self.mesh.axes if axis in self.partial)
        object.__setattr__(self, "partial", partial)

    @classmethod
    def parse(cls, mesh: Mesh, text: str) -> Layout:
        """Return the layout of a text such as `dp,tp | - ; partial cp`.

        Args:
            mesh: Named axes.
            text: Axes of each dim, `-` for none, or `scalar` for a tensor without dims; then the
                axes that are partial, if any.

        Raises:
            ConfigError: The text is something else, or the axes are not valid.
        """
        split, semicolon, rest = text.partition(";")
        word, _, summed = rest.strip().partition(" ")
        dims: list[tuple[str, ...]] = []
        if split.strip() != NO_DIMS:
            dims = [() if part.strip() == "-" else _axes(part, text) for part in split.split("|")]
        if semicolon and word != "partial":
            raise ConfigError(f"{FORM}; got {text!r}")
        return cls(mesh, tuple(dims), _axes(summed, text) if semicolon else ())

    def box(self, shape: Sequence[int], rank: int) -> Box:
        """Return the part of a tensor that a rank holds; it may be empty.

        Args:
            shape: Shape of the whole tensor.
            rank: Rank in the mesh.

        Raises:
            ConfigError: The shape has another number of dims, or there is no such rank.
        """
        if len(shape) != len(self.dims):
            msg = f"layout {self} has {len(self.dims)} dims, and shape {list(shape)} {len(shape)}"
            raise ConfigError(msg)
        here = self.mesh.coordinates(rank)
        parts = []
        for size, axes in zip(shape, self.dims, strict=True):
            part = (0, size)
            for axis in axes:
                part = _share(part, self.mesh.axes[axis], here[axis])
            parts.append(part)
        return tuple(parts)

    def __str__(self) -> str:
        split = " | ".join(",".join(axes) or "-" for axes in self.dims) or NO_DIMS
        return split + (f" ; partial {','.join(self.partial)}" if self.partial else "")


def _named(dims: Sequence[Sequence[str]]) -> list[tuple[str, Sequence[str]]]:
    return [(f"dim {dim}", axes) for dim, axes in enumerate(dims)]


def _axes(part: str, text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in part.split(","))
    if not all(name.isidentifier() for name in names):
        raise ConfigError(f"{FORM}; got {text!r}")
    return names


def _share(part: tuple[int, int], count: int, index: int) -> tuple[int, int]:
    """Return one of `count` parts that differ by one at most, the larger ones first."""
    begin, end = part
    size, larger = divmod(end - begin, count)
    first = begin + index * size + min(index, larger)
    return first, first + size + (index < larger)
