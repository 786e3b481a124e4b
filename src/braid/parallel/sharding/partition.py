"""Positions of parameters in flat vectors, and the cuts between ranks, as plain numbers.

The parameters of a unit are concatenated to a flat vector, which is cut once per rank:

    by elements      |--- w1 ------|-- w2 --|b|.|      ranks own the same number of elements
                     |  rank 0   |   rank 1     |

    whole            |--- w1 ------|b|-- w2 --|.|      each parameter belongs to one rank
                     |    rank 0     | rank 1   |

Parameters begin at multiples of ALIGN elements, and cuts are such multiples as well. So a vector
instruction on a part of a parameter gets the same elements as in the whole parameter: fused
optimizers round the remaining elements at the end of a tensor, which fill no vector, differently.

Source: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", SC 2020, section 5; Y. Zhao et al., "PyTorch FSDP", VLDB 2023, section 3.2 (flat vectors).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from braid.errors import ConfigError
from braid.parallel.sharding.layouts import SHARD
from braid.programs.layout import Layout, Mesh

__all__ = ["ALIGN", "FlatPartition", "assign_owners", "boxes_of", "by_elements", "by_owners"]

ALIGN = 32  # elements: 64 bytes of 16-bit numbers, and two vectors of any instruction set


class ParamPiece(NamedTuple):
    """Elements of a parameter that a rank owns.

    Attributes:
        begin: First element, counted in the parameter.
        end: One after the last element; equal to `begin` if the rank owns nothing.
        start: First element, counted in the rank's part of the flat vector.
    """

    begin: int
    end: int
    start: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.end - self.begin


class FlatPartition(NamedTuple):
    """Positions of parameters in a flat vector, and the positions at which ranks' parts begin.

    Attributes:
        numels: Number of elements of each parameter.
        starts: First element of each parameter in the flat vector.
        bounds: First element of each rank's part, and the length of the vector.
    """

    numels: tuple[int, ...]
    starts: tuple[int, ...]
    bounds: tuple[int, ...]

    @property
    def length(self) -> int:
        """Number of elements of the flat vector, including the gaps between parameters."""
        return self.bounds[-1]

    @property
    def widths(self) -> tuple[int, ...]:
        """Number of elements of each rank's part."""
        return tuple(b - a for a, b in zip(self.bounds, self.bounds[1:], strict=False))

    def pieces(self, rank: int) -> tuple[ParamPiece, ...]:
        """Return, for each parameter, the range of elements that a rank owns."""
        low, high = self.bounds[rank], self.bounds[rank + 1]
        pieces = []
        for numel, start in zip(self.numels, self.starts, strict=True):
            begin = min(max(low - start, 0), numel)
            end = max(min(high - start, numel), begin)
            pieces.append(ParamPiece(begin, end, start + begin - low if begin < end else 0))
        return tuple(pieces)


def by_elements(numels: Sequence[int], num_ranks: int) -> FlatPartition:
    """Return a partition of one flat vector into equal ranges, one per rank.

    `numels` has the number of elements of each parameter in the vector.

    The vector has the `Layout` "shard": each rank owns the box that this layout assigns to it.
    """
    starts = list(accumulate(map(_aligned, numels), initial=0))
    blocks = -(-starts[-1] // (num_ranks * ALIGN)) * num_ranks
    layout = Layout(Mesh({SHARD: num_ranks}), ((SHARD,),))
    boxes = [layout.box((blocks,), rank) for rank in range(num_ranks)]
    bounds = [0, *(end * ALIGN for ((_, end),) in boxes)]
    return FlatPartition(tuple(numels), tuple(starts[:-1]), tuple(bounds))


def by_owners(numels: Sequence[int], owners: Sequence[int], num_ranks: int) -> FlatPartition:
    """Return a partition in which parameters are sorted by owner, so each rank owns whole ones.

    Args:
        numels: Number of elements of each parameter.
        owners: Rank that owns each parameter.
        num_ranks: Number of ranks.
    """
    starts = [0] * len(numels)
    bounds = [0]
    here = 0
    for rank in range(num_ranks):
        for index, owner in enumerate(owners):
            if owner == rank:
                starts[index] = here
                here += _aligned(numels[index])
        bounds.append(here)
    return FlatPartition(tuple(numels), tuple(starts), tuple(bounds))


def assign_owners(numels: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """Return the rank that owns each parameter, so that ranks own about equally many elements.

    `numels` has the number of elements of each parameter.

    Source: R. Graham, "Bounds on Multiprocessing Timing Anomalies", 1969 (longest first).
    """
    loads = [0] * num_ranks
    owners = [0] * len(numels)
    for index in sorted(range(len(numels)), key=lambda i: (-numels[i], i)):
        rank = loads.index(min(loads))
        owners[index] = rank
        loads[rank] += _aligned(numels[index])
    return tuple(owners)


class FlatBox(NamedTuple):
    """Box of a tensor, whose elements are contiguous in the flattened tensor.

    Attributes:
        offset: First index of each dim.
        extent: Size of each dim.
        begin: Index of the box's first element in the flattened tensor.
    """

    offset: tuple[int, ...]
    extent: tuple[int, ...]
    begin: int


def boxes_of(shape: Sequence[int], begin: int, end: int) -> tuple[FlatBox, ...]:
    """Return the boxes that cover the elements from `begin` to before `end`, in order.

    Elements are counted in the flattened tensor of this shape (row-major).

    There are at most two boxes per dim and one more: a part of the first row, whole rows, and a
    part of the last row.

    >>> boxes_of((4, 3), 2, 8)
    (FlatBox(offset=(0, 2), extent=(1, 1), begin=2), FlatBox(offset=(1, 0), extent=(1, 3), begin=3)\
, FlatBox(offset=(2, 0), extent=(1, 2), begin=6))

    Raises:
        ConfigError: The range is outside of the tensor.
    """
    numel = math.prod(shape)
    if not 0 <= begin <= end <= numel:
        msg = f"elements {begin} to {end} are not in a tensor of {numel} elements"
        raise ConfigError(msg)
    return tuple(_boxes(tuple(shape), begin, end)) if begin < end else ()


def _boxes(shape: tuple[int, ...], begin: int, end: int) -> list[FlatBox]:
    if not shape:
        return [FlatBox((), (), 0)]
    rest = shape[1:]
    row = math.prod(rest)
    boxes = []
    first, last = -(-begin // row), end // row  # whole rows
    if first > last:  # inside of one row
        return _in_row(last, rest, begin, end, row)
    if begin < first * row:
        boxes += _in_row(first - 1, rest, begin, first * row, row)
    if first < last:
        zeros = (0,) * len(rest)
        boxes.append(FlatBox((first, *zeros), (last - first, *rest), first * row))
    if last * row < end:
        boxes += _in_row(last, rest, last * row, end, row)
    return boxes


def _in_row(index: int, rest: tuple[int, ...], begin: int, end: int, row: int) -> list[FlatBox]:
    inner = _boxes(rest, begin - index * row, end - index * row)
    return [
        FlatBox((index, *box.offset), (1, *box.extent), index * row + box.begin) for box in inner
    ]


def _aligned(numel: int) -> int:
    return -(-numel // ALIGN) * ALIGN
