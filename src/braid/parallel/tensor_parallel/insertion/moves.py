"""Moves between two layouts of a value: collectives forward, with the matching ones backward.

    from          to            forward           backward
    partial       whole         all_reduce        -                   g
    partial       split         reduce_scatter    all_gather
    whole         varying       -                 all_reduce          f
    whole         split         own part          all_gather
    split         whole         all_gather        own part
    split         varying       all_gather        reduce_scatter
    split         other dim     all_to_all        all_to_all

A move is a module, so that it has a name in the code of the graph. Its costs are the costs of
`redistribute`, with the bytes that a rank receives.

Source: M. Shoeybi et al., Megatron-LM, 2019, section 3; for the two kinds of replicas see `Layout`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from braid.comm import Group
from braid.comm.autograd import (
    all_gather,
    all_gather_forward_split_backward,
    all_reduce,
    all_reduce_forward_identity_backward,
    all_to_all,
    identity_forward_all_reduce_backward,
    reduce_scatter,
    split_forward_all_gather_backward,
)
from braid.comm.redistribute import AxisCost, plan
from braid.errors import ConfigError
from braid.parallel.tensor_parallel.slices import Slicing
from braid.programs.layout import Layout

__all__ = ["Move", "MoveStep", "StepCollective", "steps_between"]

Groups = Callable[[str], Group]


@dataclass(frozen=True)
class StepCollective:
    """Collective that a move runs in each training step, for tables.

    Attributes:
        name: Name of the operation.
        axis: Axis of the mesh along which ranks communicate.
        nbytes: Bytes that a rank receives.
        seconds: Estimated time.
        backward: Whether it runs in backward.
    """

    name: str
    axis: str
    nbytes: int
    seconds: float
    backward: bool


@dataclass(frozen=True)
class MoveStep:
    """One step in the conversion of a value from one layout to another.

    Attributes:
        kind: Name of the forward operation; or `f`, which changes nothing in forward and sums
            gradients in backward.
        axis: Axis of the mesh.
        dim: Dim that is gathered, split or exchanged; None if the move has none.
        to_dim: Dim that is split afterwards; None if there is none.
        blocks: Number of packed blocks of the dim.
        varying: Whether gradients of the result are partial sums.
        has_grad: Whether gradients flow back.
        collectives: Collectives forward and backward.
    """

    kind: str
    axis: str
    dim: int | None
    to_dim: int | None
    blocks: int
    varying: bool
    has_grad: bool
    collectives: tuple[StepCollective, ...]


class Move(nn.Module):
    """Module that executes one step in the conversion of a value to another layout."""

    def __init__(self, step: MoveStep, group: Group) -> None:
        super().__init__()
        self.step = step
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the value in the layout after the step."""
        if self.step.has_grad:
            return self._moved(x)
        with torch.no_grad():  # collectives always have gradients, so that all ranks take part
            return self._moved(x)

    def _moved(self, x: torch.Tensor) -> torch.Tensor:
        group, step = self.group, self.step
        step_dim = step.to_dim if step.dim is None else step.dim
        dim = 0 if step_dim is None else step_dim
        match step.kind:
            case "f":
                return identity_forward_all_reduce_backward(group, x)
            case "all_reduce":
                reduce = all_reduce if step.varying else all_reduce_forward_identity_backward
                return reduce(group, x)
            case "reduce_scatter":
                return reduce_scatter(group, x, dim=_checked(x, dim, group))
            case "slice":
                parts = [
                    split_forward_all_gather_backward(group, block, dim=_checked(block, dim, group))
                    for block in x.chunk(step.blocks, dim)
                ]
                return parts[0] if step.blocks == 1 else torch.cat(parts, dim)
            case "all_gather":
                gather = all_gather if step.varying else all_gather_forward_split_backward
                whole = gather(group, x, dim=dim)
                if step.blocks == 1:
                    return whole
                return Slicing(dim, step.blocks).whole_of(list(whole.chunk(group.size, dim)))
            case _:
                return self._exchanged(x)

    def _exchanged(self, x: torch.Tensor) -> torch.Tensor:
        """Return the value split along another dim."""
        source, target = self.step.dim, self.step.to_dim
        assert source is not None, "an all_to_all gathers a dim"
        assert target is not None, "and splits another"
        parts = x.chunk(self.group.size, _checked(x, target, self.group))
        stacked = all_to_all(self.group, torch.stack(list(parts)))
        return torch.cat(list(stacked), source)

    def extra_repr(self) -> str:
        """Return the step, for `repr`."""
        dims = [str(dim) for dim in (self.step.dim, self.step.to_dim) if dim is not None]
        return f"{self.step.kind} over {self.step.axis}" + (
            f", dim {' -> '.join(dims)}" if dims else ""
        )


def steps_between(
    shape: tuple[int, ...],
    itemsize: int,
    source: Layout,
    target: Layout,
    costs: Mapping[str, AxisCost],
    *,
    has_grad: bool,
) -> Iterator[MoveStep]:
    """Yield the steps that convert a value from one layout to another.

    Args:
        shape: Shape of the whole value.
        itemsize: Bytes of an element.
        source: Layout of the value.
        target: Layout afterwards; its varying axes include the source's.
        costs: Costs of each axis.
        has_grad: Whether gradients flow back.
    """
    known = {*target.varying, *target.partial, *(axis for axes in target.dims for axis in axes)}
    lost = [axis for axis in source.varying if axis not in known]
    assert not lost, f"gradients along {lost} are partial sums, and would be treated as whole"
    price = _Price(shape, itemsize, source.mesh.axes, costs, has_grad=has_grad)
    price.share(source)
    if source.blocks and source.blocks != target.blocks:
        yield from _unpacked(source, target, price)
        rest = tuple(
            axes if n == 1 else () for axes, n in zip(source.dims, source.blocks, strict=True)
        )
        source = replace(source, dims=rest, blocks=())
    first, last = (replace(layout, varying=(), blocks=()) for layout in (source, target))
    finished_axes: set[str] = set()
    for step in plan(shape, itemsize, first, last, dict(costs)).steps:
        to = step.target_dim if step.move in {"slice", "reduce_scatter", "all_to_all"} else None
        blocks = target.blocks[to] if to is not None and target.blocks else 1
        varying = step.axis in target.varying
        yield price.step(step.move, step.axis, step.source_dim, to, blocks, varying=varying)
        finished_axes.add(step.axis)
        price.share(step.layout)
    for axis in target.varying:
        if axis not in {*finished_axes, *source.varying} and source.mesh.axes[axis] > 1:
            yield price.step("f", axis, None, None, 1, varying=True)


class _Price:
    """Calculator of the bytes and seconds of steps for one value."""

    def __init__(
        self,
        shape: tuple[int, ...],
        itemsize: int,
        sizes: Mapping[str, int],
        costs: Mapping[str, AxisCost],
        *,
        has_grad: bool,
    ) -> None:
        self._nbytes = math.prod(shape) * itemsize
        self._sizes = sizes
        self._costs = costs
        self._has_grad = has_grad
        self._split: tuple[str, ...] = ()

    def share(self, layout: Layout) -> None:
        """Record the layout before the next step: along its axes, a rank has a part only."""
        self._split = tuple(axis for axes in layout.dims for axis in axes)

    def step(
        self, kind: str, axis: str, dim: int | None, to: int | None, blocks: int, *, varying: bool
    ) -> MoveStep:
        forward, backward = {
            "f": ("", "all_reduce"),
            "all_reduce": ("all_reduce", "all_reduce" if varying else ""),
            "reduce_scatter": ("reduce_scatter", "all_gather"),
            "slice": ("", "all_gather"),
            "all_gather": ("all_gather", "reduce_scatter" if varying else ""),
            "all_to_all": ("all_to_all", "all_to_all"),
        }[kind]
        names = [(forward, False), *([(backward, True)] if self._has_grad else [])]
        collectives = tuple(
            self._collective(name, axis, backward=late) for name, late in names if name
        )
        return MoveStep(kind, axis, dim, to, blocks, varying, self._has_grad, collectives)

    def _collective(self, name: str, axis: str, *, backward: bool) -> StepCollective:
        n = self._sizes[axis]
        cost = self._costs.get(axis, AxisCost())
        factor = {"all_reduce": 2 * (n - 1) / n, "all_to_all": (n - 1) / n**2}.get(
            name, (n - 1) / n
        )
        others = math.prod(self._sizes[other] for other in self._split if other != axis)
        nbytes = round(self._nbytes * factor / others)
        seconds = cost.latency_s + nbytes * cost.s_per_byte
        return StepCollective(name, axis, nbytes, seconds, backward)


def _unpacked(source: Layout, target: Layout, price: _Price) -> Iterator[MoveStep]:
    """Yield the moves that gather dims of packed blocks, which other moves do not support."""
    for dim, (axes, count) in enumerate(zip(source.dims, source.blocks, strict=True)):
        if count > 1 and axes:
            if len(axes) > 1:
                msg = f"packed blocks can be sharded along only one mesh axis, got {source}"
                raise ConfigError(msg)
            yield price.step(
                "all_gather", axes[0], dim, None, count, varying=axes[0] in target.varying
            )


def _checked(x: torch.Tensor, dim: int, group: Group) -> int:
    if x.shape[dim] % group.size:
        msg = (
            f"a value of shape {list(x.shape)} cannot be divided over {group.size} ranks along dim "
            f"{dim}: pad it to {-(-x.shape[dim] // group.size) * group.size}"
        )
        raise ConfigError(msg)
    return dim
