"""Execution of layout changes: by collectives on one mesh, or by a move between two meshes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from braid.comm import Group
from braid.comm.redistribute.exchange import Exchange, intersection, relative
from braid.comm.redistribute.planner import plan
from braid.comm.redistribute.steps import AxisCost, RedistributionPlan, RedistributionStep
from braid.errors import ConfigError
from braid.programs.layout import Box, Layout

__all__ = ["carry_out", "move", "redistribute"]

Groups = Callable[[str], Group]


def redistribute(
    x: torch.Tensor,
    source: Layout,
    target: Layout,
    groups: Groups,
    *,
    shape: Sequence[int],
    costs: Mapping[str, AxisCost] | None = None,
) -> torch.Tensor:
    """Return this rank's part of a tensor in another layout on the same mesh.

    Moves are exact, so the parts are bitwise parts of the whole tensor. Sums are taken in the order
    of ranks along each partial axis, the last axis of the mesh first. Gradients are not propagated.

    Args:
        x: This rank's part in the source layout.
        source: Layout of `x`.
        target: Layout of the result.
        groups: Function that returns the group of an axis, with its ranks in the order of the axis,
            such as `mesh.__getitem__` of `braid.mesh`. It is called in the order of the mesh's
            axes.
        shape: Shape of the whole tensor; it cannot be computed from uneven parts.
        costs: Costs of each axis, see `plan`; the same on all ranks.

    Shape:
        x: the box of the source layout. Result: the box of the target layout; it may share memory
        with `x`.

    Raises:
        ConfigError: The layouts do not fit together, or `x` is not the source layout's part.
        MismatchError, PeerLostError, CommTimeout: See `braid.comm`.

    Cost: `plan(...).explain()` lists the steps with their bytes and seconds.
    """
    steps = plan(shape, x.element_size(), source, target, costs)
    return carry_out(steps, x, groups)


def carry_out(steps: RedistributionPlan, x: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Return this rank's part after the steps of a plan; see `redistribute`.

    Args:
        steps: The plan, the same on all ranks.
        x: This rank's part in the source layout.
        groups: Function that returns the group of an axis.

    Raises:
        ConfigError: A group and its axis have different numbers of ranks, or `x` has another
            shape or element size than in the plan.
        MismatchError, PeerLostError, CommTimeout: See `braid.comm`.
    """
    mesh = steps.source.mesh
    named = {
        axis for side in (steps.source, steps.target) for axes in side.dims for axis in axes
    } | {step.axis for step in steps.steps}
    along = {axis: groups(axis) for axis, size in mesh.axes.items() if axis in named and size > 1}
    for axis, group in along.items():
        if group.size != mesh.axes[axis]:
            msg = (
                f"axis {axis} of {mesh} has {mesh.axes[axis]} ranks, but its group has "
                f"{group.size}: pass the group of this axis"
            )
            raise ConfigError(msg)
    rank = mesh.rank({axis: group.rank for axis, group in along.items()})
    _check_part(x, steps.source.box(steps.shape, rank), steps.source, rank)
    if x.element_size() != steps.itemsize:
        msg = (
            f"x has elements of {x.element_size()} bytes ({x.dtype}), but the plan is for "
            f"{steps.itemsize}: make a plan with this itemsize"
        )
        raise ConfigError(msg)
    layout, x = steps.source, x.detach()
    for step in steps.steps:
        x = _after_step(x, steps.shape, layout, step, rank, along[step.axis])
        layout = step.layout
    return x


def _after_step(
    x: torch.Tensor,
    shape: Sequence[int],
    layout: Layout,
    step: RedistributionStep,
    rank: int,
    group: Group,
) -> torch.Tensor:
    """Return this rank's part after one step; the layouts determine the peers' parts."""
    peers = layout.mesh.peers(step.axis, rank)
    before, after = layout.box(shape, rank), step.layout.box(shape, rank)
    if step.move == "slice":
        return x[relative(after, before)]
    held = [layout.box(shape, peer) for peer in peers]
    wanted = [step.layout.box(shape, peer) for peer in peers]
    out = _empty(after, x)
    if not any(_numel(box) for box in (*held, *wanted)):
        return out
    match step.move:
        case "all_reduce":
            group.all_reduce(x, out=out)
        case "all_gather":
            group.all_gather(x, out=[out[relative(box, after)] for box in held])
        case "reduce_scatter":
            group.reduce_scatter([x[relative(box, before)] for box in wanted], out=out)
        case _:
            parts = [_common(x, before, box) for box in wanted]
            group.all_to_all(parts, out=[_common(out, after, box) for box in held])
    return out


def move(
    x: torch.Tensor,
    source: Layout,
    target: Layout,
    group: Group,
    *,
    shape: Sequence[int],
    source_ranks: Sequence[int] | None = None,
    target_ranks: Sequence[int] | None = None,
) -> torch.Tensor | None:
    """Move a tensor between any two layouts on any two meshes over ranks of one group.

    Every rank sends exactly the elements that a receiver lacks, each from one rank. All ranks of
    the group call this. Gradients are not propagated.

    Args:
        x: This rank's part in the source layout. Ranks outside the source's mesh pass an empty
            tensor of the same dtype, on the device of their result.
        source: Layout of `x`, without partial axes.
        target: Layout of the result, without partial axes.
        group: Group that contains the ranks of both meshes.
        shape: Shape of the whole tensor.
        source_ranks: Group rank of each rank of the source's mesh; None for the first ranks.
        target_ranks: Group rank of each rank of the target's mesh; None for the first ranks.

    Returns:
        This rank's part, in new memory; None outside the target's mesh.

    Raises:
        ConfigError: Layouts, ranks and shape do not fit together, or `x` is not this rank's part.
        MismatchError, PeerLostError, CommTimeout: See `braid.comm`.

    Cost: 2 a + l b, with l the larger of the bytes that a rank sends and receives.
    """
    firsts = range(source.mesh.size) if source_ranks is None else source_ranks
    lasts = range(target.mesh.size) if target_ranks is None else target_ranks
    parts = Exchange(tuple(shape), source, target, tuple(firsts), tuple(lasts), group.size)
    held, wanted = parts.source_box(group.rank), parts.target_box(group.rank)
    if held is not None:
        _check_part(x, held, source, parts.source_ranks.index(group.rank))
    elif x.numel():
        msg = (
            f"group rank {group.rank} is not in the source mesh {source.mesh} (its ranks are "
            f"{list(firsts)}), but passed a tensor of shape {list(x.shape)}: pass an empty tensor"
        )
        raise ConfigError(msg)
    nothing, x = x.new_empty(0), x.detach()
    sends, receives = [nothing] * group.size, [nothing] * group.size
    out = None if wanted is None else _empty(wanted, x)
    for peer, part in parts.sent(group.rank):
        assert held is not None, "only ranks with a part send"
        sends[peer] = x[relative(part, held)]
    for peer, part in parts.received(group.rank):
        assert out is not None, "only ranks with a part receive"
        assert wanted is not None, "only ranks with a part receive"
        receives[peer] = out[relative(part, wanted)]
    kept = sends[group.rank]
    if kept.numel():  # equal to the number that it receives from itself
        receives[group.rank].copy_(kept)
        sends[group.rank] = receives[group.rank] = nothing
    group.all_to_all(sends, out=receives)
    return out


def _check_part(x: torch.Tensor, box: Box, layout: Layout, rank: int) -> None:
    expected = [end - begin for begin, end in box]
    if list(x.shape) != expected:
        msg = (
            f"rank {rank} of the mesh {layout.mesh} has a shard of shape {expected} in layout "
            f"{layout}, but passed one of shape {list(x.shape)}: pass the shape of the whole "
            "tensor and its current layout"
        )
        raise ConfigError(msg)


def _common(x: torch.Tensor, box: Box, other: Box) -> torch.Tensor:
    part = intersection(box, other)
    return x.new_empty(0) if part is None else x[relative(part, box)]


def _empty(box: Box, x: torch.Tensor) -> torch.Tensor:
    return x.new_empty([end - begin for begin, end in box])


def _numel(box: Box) -> int:
    return math.prod(end - begin for begin, end in box)
