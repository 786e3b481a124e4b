"""Layouts of tensors: the axes of a mesh that split each dim.

    mesh dp=2,tp=2       layout "dp,tp | -"       shape (5, 3)

    rows     0   1   2   3   4
    dp      |  dp 0     | dp 1  |       larger parts first
    tp      | 0     | 1 | 0 | 1 |       each part of dp is divided again: ranks 0, 1, 2, 3

    packed       3*tp on 12 rows      0 0 1 1 | 0 0 1 1 | 0 0 1 1      each of 3 blocks is split

A dim that several axes split is divided axis by axis, each time as evenly as possible. So one more
inner axis refines the parts, and gathering along the innermost axis gives exactly the parts without
it, for any size. Chunks of equal size with a short last one have no such property: torch's DTensor
returns wrong elements of a (5, 3) tensor that is split twice along dim 0 on a 2x2 mesh.

Along an axis that neither splits nor is partial, ranks hold replicas. If all use theirs for the
same work, their gradients are equal; if each uses it for a part of the work, as the input of a
column-parallel layer, their gradients are terms of a sum: the value varies along this axis. The
conversion from the first kind to the second sums the gradients in backward (Megatron's f). Without
the conversion the layouts do not match, which is an error instead of a wrong gradient.

Source: named axes per dim as in GSPMD (Y. Xu et al., arXiv:2105.04663, 2021); two kinds of replicas
as in JAX's shard_map.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product, repeat

from braid.errors import ConfigError, raise_all
from braid.programs.layout.mesh import Mesh

__all__ = ["Box", "Layout"]

Box = tuple[tuple[int, int], ...]
"""First index and end of each dim."""

NO_DIMS = "scalar"
FORM = (
    "a layout is written as 'dp,tp | 3*tp | - ; partial cp ; varying ep': the axes of each dim, "
    "- for none, N* for N packed blocks"
)


@dataclass(frozen=True, slots=True)
class Layout:
    """Distribution of a tensor over the ranks of a mesh.

    Axes that are not named hold replicas.

    Attributes:
        mesh: Named axes.
        dims: Axes that split each dim of the tensor, outermost first.
        partial: Axes along which values are partial sums, in the order of the mesh.
        varying: Axes along which replicas have different gradients, which are partial sums.
        blocks: Number of packed blocks of each dim; each block is split. Empty if all are 1.

    Raises:
        ConfigError: Axes are unknown or come twice; all problems are named.

    >>> layout = Layout(Mesh({"dp": 2, "tp": 2}), (("dp", "tp"), ()))
    >>> str(layout), [layout.box((5, 3), rank)[0] for rank in range(4)]
    ('dp,tp | -', [(0, 2), (2, 3), (3, 4), (4, 5)])
    """

    mesh: Mesh
    dims: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()
    varying: tuple[str, ...] = ()
    blocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        replicas = (("partial", self.partial), ("varying", self.varying))
        problems = [
            f"{name} is {axes!r}: write a tuple of axes, such as ({axes!r},)"
            for name, axes in (*_named(self.dims), *replicas)
            if isinstance(axes, str)
        ]
        if self.blocks and (len(self.blocks) != len(self.dims) or min(self.blocks) < 1):
            problems.append(
                f"blocks {self.blocks} does not match the dims: give one number per dim"
            )
        if not problems:
            used = [axis for axes in (*self.dims, self.partial, self.varying) for axis in axes]
            problems = [
                f"the mesh {self.mesh} has no axis {axis}"
                for axis in dict.fromkeys(used)
                if axis not in self.mesh.axes
            ]
            problems += [
                f"axis {axis} is named {times} times, and splits one dim, is partial or varies"
                for axis, times in Counter(used).items()
                if times > 1
            ]
        raise_all(problems)
        object.__setattr__(self, "dims", tuple(tuple(axes) for axes in self.dims))
        for name, axes in replicas:
            object.__setattr__(self, name, tuple(axis for axis in self.mesh.axes if axis in axes))
        if all(count == 1 for count in self.blocks):
            object.__setattr__(self, "blocks", ())

    @classmethod
    def parse(cls, mesh: Mesh, text: str) -> Layout:
        """Parse a layout, such as `dp,tp | - ; partial cp`.

        Args:
            mesh: Named axes.
            text: Axes that split each dim, with ` | ` between dims. `-` means no axis, `3*tp` three
                packed blocks that are each split, and `scalar` a tensor without dims. After ` ; `,
                `partial cp` marks values that are partial sums over cp, and `varying tp` gradients
                that differ over tp.

        Raises:
            ConfigError: The text is not a layout, or the axes are not valid.
        """
        split, *rest = text.split(";")
        dims: list[tuple[str, ...]] = []
        blocks: list[int] = []
        for part in split.split("|") if split.strip() != NO_DIMS else ():
            number, star, axes = part.rpartition("*")
            if star and not number.strip().isdecimal():
                raise ConfigError(f"{FORM}; got {text!r}")
            dims.append(() if axes.strip() == "-" else _axes(axes, text))
            blocks.append(int(number) if star else 1)
        replicas: dict[str, tuple[str, ...]] = {}
        for part in rest:
            word, _, axes = part.strip().partition(" ")
            if word not in {"partial", "varying"} or word in replicas:
                raise ConfigError(f"{FORM}; got {text!r}")
            replicas[word] = _axes(axes, text)
        return cls(mesh, tuple(dims), **replicas, blocks=tuple(blocks))

    def box(self, shape: Sequence[int], rank: int) -> Box:
        """Return the slice of each dim that a rank has of a tensor; slices may be empty.

        Args:
            shape: Shape of the whole tensor.
            rank: Rank in the mesh.

        Raises:
            ConfigError: The shape has another number of dims, the rank is not in the mesh, or a dim
                has packed blocks, so that a rank has several boxes: see `pieces`.
        """
        if self.blocks:
            msg = (
                f"layout {self} has packed blocks, so a rank's shard is not one contiguous "
                "slice: call pieces()"
            )
            raise ConfigError(msg)
        if len(shape) != len(self.dims):
            msg = (
                f"layout {self} has {len(self.dims)} dims, but shape {list(shape)} has "
                f"{len(shape)}: use one entry per dim"
            )
            raise ConfigError(msg)
        here = self.mesh.coordinates(rank)
        return tuple(
            self._part((0, size), axes, here) for size, axes in zip(shape, self.dims, strict=True)
        )

    def pieces(self, shape: Sequence[int], rank: int) -> tuple[Box, ...]:
        """Return the slices of a tensor that a rank has, one for each packed block.

        Args:
            shape: Shape of the whole tensor.
            rank: Rank in the mesh.

        Raises:
            ConfigError: See `box`, or a length is not a multiple of its number of blocks.
        """
        if not self.blocks:
            return (self.box(shape, rank),)
        plain = replace(self, blocks=())
        if any(size % count for size, count in zip(shape, self.blocks, strict=False)):
            msg = (
                f"shape {list(shape)} cannot be divided into the packed blocks of layout {self}: "
                "choose lengths that are multiples"
            )
            raise ConfigError(msg)
        lengths = [size // count for size, count in zip(shape, self.blocks, strict=False)]
        first = plain.box(lengths, rank)
        places = product(*(range(count) for count in self.blocks))
        return tuple(
            tuple(
                (begin + index * length, end + index * length)
                for (begin, end), index, length in zip(first, place, lengths, strict=True)
            )
            for place in places
        )

    def _part(
        self, part: tuple[int, int], axes: tuple[str, ...], here: Mapping[str, int]
    ) -> tuple[int, int]:
        for axis in axes:
            part = _share(part, self.mesh.axes[axis], here[axis])
        return part

    def __str__(self) -> str:
        split = " | ".join(
            (f"{count}*" if count > 1 else "") + (",".join(axes) or "-")
            for axes, count in zip(self.dims, self.blocks or repeat(1), strict=False)
        )
        replicas = (("partial", self.partial), ("varying", self.varying))
        return (split or NO_DIMS) + "".join(
            f" ; {name} {','.join(axes)}" for name, axes in replicas if axes
        )


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
