"""Planner of the cheapest steps from one layout to another, by a shortest path.

    nodes    layouts: ordered axes of each dim, and the partial axes
    edges    one collective along one axis, or a slice, which is free
    length   a + l b of the axis, see `axis_moves`

All ranks compute the same path from the same numbers, without communication. Paths of equal length
are ordered by their number of steps, then by the order in which moves are listed.

Source: E. W. Dijkstra, Numerische Mathematik 1 (1959). Fixed rules (gather, then slice; or
MindSpore's inference of split, permute and concat operators) are cheap to compute, but gather even
if a slice along a free axis first would save bytes on a slow one.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import count

from braid.comm.redistribute.axis_moves import AxisMove, AxisState, Prices, possible_moves
from braid.comm.redistribute.steps import AxisCost, RedistributionPlan, RedistributionStep
from braid.errors import raise_all
from braid.programs.layout import Layout

__all__ = ["plan"]

DEFAULT = AxisCost()


def plan(
    shape: Sequence[int],
    itemsize: int,
    source: Layout,
    target: Layout,
    costs: Mapping[str, AxisCost] | None = None,
) -> RedistributionPlan:
    """Return the cheapest steps from one layout to another on the same mesh.

    Axes of one rank are left out of the steps.

    Args:
        shape: Shape of the whole tensor.
        itemsize: Bytes of an element.
        source: Layout before.
        target: Layout afterwards. Its partial axes must be partial before.
        costs: Costs of each axis; `AxisCost()` for missing axes.

    Raises:
        ConfigError: The layouts do not fit together or to the shape; the message names all
            problems.

    Cost: no communication; the number of states grows as (dims + 2) to the power of the number of
    axes with several ranks.

    >>> from braid.programs.layout import Mesh
    >>> mesh = Mesh({"tp": 2})
    >>> layouts = Layout.parse(mesh, "tp | -"), Layout.parse(mesh, "- | tp")
    >>> ", ".join(step.move for step in plan((4, 6), 4, *layouts).steps)
    'all_to_all'
    """
    _check(shape, itemsize, source, target, costs or {})
    priced = dict.fromkeys(source.mesh.axes, DEFAULT) | dict(costs or {})
    axes = [axis for axis, size in source.mesh.axes.items() if size > 1]
    first, last = _state(source), _state(target)
    prices = Prices(shape, itemsize, source.mesh.axes, priced)
    path = _shortest(first, last, axes, prices)
    steps = tuple(
        RedistributionStep(
            move.kind,
            move.axis,
            move.source_dim,
            move.target_dim,
            *prices.price(before, move),
            Layout(source.mesh, *move.after),
        )
        for before, move in zip([first, *(move.after for move in path)], path, strict=False)
    )
    return RedistributionPlan(tuple(shape), itemsize, source, target, steps)


def _shortest(
    first: AxisState, last: AxisState, axes: Sequence[str], prices: Prices
) -> list[AxisMove]:
    order = count()
    queue: list[tuple[float, int, int, AxisState]] = [(0.0, 0, next(order), first)]
    reached: dict[AxisState, tuple[float, int]] = {first: (0.0, 0)}
    previous: dict[AxisState, tuple[AxisState, AxisMove]] = {}
    while queue:
        seconds, length, _, state = heapq.heappop(queue)
        if state == last:
            break
        if (seconds, length) > reached[state]:
            continue  # a shorter path to this state was found
        for move in possible_moves(state, axes, last.partial):
            whole = (seconds + prices.price(state, move)[1], length + 1)
            if move.after not in reached or whole < reached[move.after]:
                reached[move.after] = whole
                previous[move.after] = (state, move)
                heapq.heappush(queue, (*whole, next(order), move.after))
    path = []
    while last != first:
        last, move = previous[last]
        path.append(move)
    return path[::-1]


def _state(layout: Layout) -> AxisState:
    """Return the state of a layout, without axes of one rank."""
    sizes = layout.mesh.axes
    split = (tuple(axis for axis in axes if sizes[axis] > 1) for axes in layout.dims)
    return AxisState(tuple(split), tuple(axis for axis in layout.partial if sizes[axis] > 1))


def _check(
    shape: Sequence[int],
    itemsize: int,
    source: Layout,
    target: Layout,
    costs: Mapping[str, AxisCost],
) -> None:
    problems = [
        f"the {role} layout {layout} has {len(layout.dims)} dims, but the shape {list(shape)} has "
        f"{len(shape)}: use one entry per dim"
        for role, layout in (("source", source), ("target", target))
        if len(layout.dims) != len(shape)
    ]
    if any(size < 0 for size in shape) or itemsize < 1:
        problems.append(f"sizes must not be negative, got shape {list(shape)}, {itemsize} bytes")
    if list(source.mesh.axes.items()) != list(target.mesh.axes.items()):
        problems.append(
            f"the source is on the mesh {source.mesh}, but the target is on {target.mesh}: use "
            "move to change the mesh"
        )
    else:
        added = [axis for axis in _state(target).partial if axis not in source.partial]
        if added:
            problems.append(
                f"the target {target} is partial over {','.join(added)}, but the source {source} "
                "is not: choose a target without partial axes"
            )
    problems += [
        f"the {role} layout {layout} has packed blocks, which cannot be moved: gather the dim first"
        for role, layout in (("source", source), ("target", target))
        if layout.blocks
    ]
    unknown = [axis for axis in costs if axis not in source.mesh.axes]
    if unknown:
        problems.append(f"costs has {','.join(unknown)}, which {source.mesh} lacks: leave it out")
    raise_all(problems)
