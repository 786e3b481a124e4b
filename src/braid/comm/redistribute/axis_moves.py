"""Moves between states of a tensor on one mesh, and their costs.

    move             axis a, p ranks                              bytes received per rank
    slice            dim i whole     -> innermost of dim i        0
    all_gather       innermost of i  -> dim i whole               (p-1)/p l    l: after
    all_to_all       innermost of i  -> innermost of j            (p-1)/p l    l: the larger
    reduce_scatter   partial         -> innermost of dim j        (p-1)/p l    l: before
    all_reduce       partial         -> replicas                2 (p-1)/p l    l: before and after

Seconds are a + l b with the a and b of the axis. l is counted on the first rank of the mesh, which
has the largest part. Partial axes are summed from the last axis of the mesh to the first, so that
the bits of a sum depend neither on sizes nor on costs.

Source: the states and moves of DTensor and GSPMD; costs of R. Thakur, R. Rabenseifner, W. Gropp,
IJHPCA 19 (2005).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from braid.comm.redistribute.steps import AxisCost

__all__ = ["AxisMove", "AxisState", "Dims", "Prices", "possible_moves"]

Dims = tuple[tuple[str, ...], ...]
FACTORS = {"slice": 0, "all_gather": 1, "all_to_all": 1, "reduce_scatter": 1, "all_reduce": 2}
"""Multiples of (p-1)/p l bytes that each kind of move receives."""


class AxisState(NamedTuple):
    """Layout without its mesh: a node of the planner's graph.

    Attributes:
        dims: Axes that split each dim, outermost first.
        partial: Axes over which the values are to be summed, in the order of the mesh.
    """

    dims: Dims
    partial: tuple[str, ...]


class AxisMove(NamedTuple):
    """Change of a tensor's layout along one mesh axis: an edge of the planner's graph.

    Attributes:
        kind: slice, all_gather, all_to_all, reduce_scatter or all_reduce.
        axis: Axis that changes.
        source_dim: Dim that the axis splits before; None if it splits none.
        target_dim: Dim that the axis splits afterwards; None if it splits none.
        after: State afterwards.
    """

    kind: str
    axis: str
    source_dim: int | None
    target_dim: int | None
    after: AxisState


def possible_moves(
    state: AxisState, axes: Sequence[str], kept_partial: Sequence[str]
) -> Iterator[AxisMove]:
    """Yield each possible move from a state.

    Args:
        state: State before.
        axes: Axes of several ranks.
        kept_partial: Axes that stay partial.
    """
    dims, partial = state
    used = {axis for split in (*dims, partial) for axis in split}
    for axis in axes:
        if axis not in used:
            for j in range(len(dims)):
                yield AxisMove("slice", axis, None, j, AxisState(_pushed(dims, j, axis), partial))
    for i, split in enumerate(dims):
        if split:
            axis, whole = split[-1], (*dims[:i], split[:-1], *dims[i + 1 :])
            yield AxisMove("all_gather", axis, i, None, AxisState(whole, partial))
            for j in range(len(dims)):
                if j != i:
                    yield AxisMove(
                        "all_to_all", axis, i, j, AxisState(_pushed(whole, j, axis), partial)
                    )
    unsummed = [axis for axis in partial if axis not in kept_partial]
    if unsummed:
        axis = unsummed[-1]
        rest = tuple(other for other in partial if other != axis)
        yield AxisMove("all_reduce", axis, None, None, AxisState(dims, rest))
        for j in range(len(dims)):
            yield AxisMove("reduce_scatter", axis, None, j, AxisState(_pushed(dims, j, axis), rest))


class Prices:
    """Bytes and seconds of moves of one tensor.

    Args:
        shape: Shape of the whole tensor.
        itemsize: Bytes of an element.
        sizes: Number of ranks of each axis.
        costs: Costs of each axis.
    """

    def __init__(
        self,
        shape: Sequence[int],
        itemsize: int,
        sizes: Mapping[str, int],
        costs: Mapping[str, AxisCost],
    ) -> None:
        self._shape = tuple(shape)
        self._itemsize = itemsize
        self._sizes = sizes
        self._costs = costs
        self._local: dict[Dims, int] = {}

    def price(self, before: AxisState, move: AxisMove) -> tuple[int, float]:
        """Return the bytes that the first rank receives in `move`, and the estimated seconds."""
        factor = FACTORS[move.kind]
        if not factor:
            return 0, 0.0
        local = max(self._local_bytes(before.dims), self._local_bytes(move.after.dims))
        nbytes = factor * (local - local // self._sizes[move.axis])
        cost = self._costs[move.axis]
        return nbytes, cost.latency_s + nbytes * cost.s_per_byte

    def _local_bytes(self, dims: Dims) -> int:
        """Return the bytes of the first rank's part, which is the largest."""
        if dims not in self._local:
            parts = []
            for size, axes in zip(self._shape, dims, strict=True):
                part = size
                for axis in axes:
                    part = -(-part // self._sizes[axis])
                parts.append(part)
            self._local[dims] = self._itemsize * math.prod(parts)
        return self._local[dims]


def _pushed(dims: Dims, dim: int, axis: str) -> Dims:
    return (*dims[:dim], (*dims[dim], axis), *dims[dim + 1 :])
