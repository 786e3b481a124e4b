"""Random layouts, and a second way from one to another, with which the planner is compared."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from braid.comm.redistribute.axis_moves import AxisState, Prices, possible_moves
from braid.programs.layout import Layout, Mesh

MESHES = st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(
    lambda sizes: math.prod(sizes) <= 8
)
SIZES = st.sampled_from(
    [0, 1, 2, 3, 5, 7, 8, 11, 12]
)  # primes, and sizes below the number of ranks


@st.composite
def meshes(draw):
    return Mesh(dict(zip(("a", "b", "c"), draw(MESHES), strict=False)))


@st.composite
def layouts(draw, mesh, num_dims, partial=()):
    """A layout whose partial axes are among some."""
    dims = [[] for _ in range(num_dims)]
    summed, unused = [], []
    for axis in draw(st.permutations(list(mesh.axes))):
        draw(st.sampled_from([*dims, unused, *([summed] if axis in partial else [])])).append(axis)
    return Layout(mesh, tuple(map(tuple, dims)), tuple(summed))


@st.composite
def moves(draw, mesh):
    """Shape, source and target on one mesh."""
    shape = tuple(draw(st.lists(SIZES, max_size=3)))
    source = draw(layouts(mesh, len(shape), tuple(mesh.axes)))
    return shape, source, draw(layouts(mesh, len(shape), source.partial))


def inferred_seconds(shape, itemsize, source, target, costs):
    """Seconds by MindSpore's inference: reduce; then Split, Permute or Concat while one helps; break cycles by a Concat.

    Source: Redistribution of MindSpore's auto-parallel (InferRedistribution: InferSplitByAxis, InferPermuteByAxis,
    InferConcatByAxis), on layouts over one device matrix.
    """
    state, seconds = AxisState(source.dims, source.partial), 0.0
    prices = Prices(shape, itemsize, source.mesh.axes, costs)
    while wanted := _inferred(state, target):
        moves = possible_moves(state, list(source.mesh.axes), target.partial)
        (move,) = [move for move in moves if move[:4] == wanted]
        seconds += prices.price(state, move)[1]
        state = move.after
    assert state == (target.dims, target.partial)
    return seconds


def _inferred(state, target) -> tuple[str, str, int | None, int | None] | None:
    unsummed = [axis for axis in state.partial if axis not in target.partial]
    if unsummed:
        return "all_reduce", unsummed[-1], None, None
    pairs = list(zip(state.dims, target.dims, strict=True))
    wrong = {now[-1]: i for i, (now, then) in enumerate(pairs) if now != then[: len(now)]}
    lacking = {
        then[len(now)]: j
        for j, (now, then) in enumerate(pairs)
        if now == then[: len(now)] and len(now) < len(then)
    }
    placed = {axis for axes in state.dims for axis in axes}
    for axis, j in lacking.items():
        if axis not in placed:
            return "slice", axis, None, j
    for axis, i in wrong.items():
        if axis in lacking:
            return "all_to_all", axis, i, lacking[axis]
    kept = {axis for axes in target.dims for axis in axes}
    for axis, i in sorted(wrong.items(), key=lambda pair: pair[0] in kept):
        return "all_gather", axis, i, None
    return None
