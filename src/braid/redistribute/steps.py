"""Steps from one layout of a tensor to another on the same mesh, and their costs.

    step             axis a, p ranks                              bytes received per rank
    slice            dim i whole     -> innermost of dim i        0
    all_gather       innermost of i  -> dim i whole               (p-1)/p l    l: result
    all_to_all       innermost of i  -> innermost of j            (p-1)/p l    l: before and after
    reduce_scatter   partial         -> innermost of dim j        (p-1)/p l    l: before
    all_reduce       partial         -> replicas                2 (p-1)/p l    l: before and after

Seconds are a + l b with the a and b of the axis. l is counted on the first rank of the mesh, whose
part is the largest. Partial axes are summed from the last axis of the mesh to the first, so that
the bits of a sum depend neither on sizes nor on costs.

Source: the states and moves of DTensor and GSPMD; costs of R. Thakur, R. Rabenseifner, W. Gropp,
IJHPCA 19 (2005).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from braid.errors import ConfigError
from braid.layout import Layout

__all__ = ["AxisCost", "Plan", "Step", "local_bytes", "next_steps"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisCost:
    """Time of a collective along one axis.

    Attributes:
        latency_s: Seconds of a collective without data.
        s_per_byte: Seconds per byte that a rank receives.

    Raises:
        ConfigError: A number is negative or not finite.
    """

    latency_s: float = 20e-6  # a collective between processes of one host
    s_per_byte: float = 1e-10  # 10 GB/s

    def __post_init__(self) -> None:
        if not all(math.isfinite(x) and x >= 0 for x in (self.latency_s, self.s_per_byte)):
            msg = f"seconds of an axis must be finite and at least 0, got {self}"
            raise ConfigError(msg)


@dataclass(frozen=True, slots=True)
class Step:
    """One collective, or one slice.

    Attributes:
        move: slice, all_gather, all_to_all, reduce_scatter or all_reduce.
        axis: Axis along which the ranks communicate.
        source_dim: Dim that the axis splits before; None if it splits none.
        target_dim: Dim that the axis splits afterwards; None if it splits none.
        nbytes: Bytes that the first rank receives.
        seconds: Estimated time.
        layout: Layout afterwards.
    """

    move: str
    axis: str
    source_dim: int | None
    target_dim: int | None
    nbytes: int
    seconds: float
    layout: Layout


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps between two layouts.

    Attributes:
        shape: Shape of the whole tensor.
        itemsize: Bytes of an element.
        source: Layout before.
        target: Layout afterwards.
        steps: Steps in order.
    """

    shape: tuple[int, ...]
    itemsize: int
    source: Layout
    target: Layout
    steps: tuple[Step, ...]

    @property
    def seconds(self) -> float:
        """Estimated time of all steps."""
        return math.fsum(step.seconds for step in self.steps)

    @property
    def nbytes(self) -> int:
        """Bytes that the first rank receives in all steps."""
        return sum(step.nbytes for step in self.steps)

    def explain(self) -> str:
        """Return the steps as a table."""
        head = ("step", "axis", "dims", "bytes", "us", "layout")
        rows = [head, ("", "", "", "", "", str(self.source))]
        rows += [
            (
                step.move,
                step.axis,
                _dims(step),
                str(step.nbytes),
                f"{step.seconds * 1e6:.1f}",
                str(step.layout),
            )
            for step in self.steps
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(_line(row, widths) for row in rows)


def local_bytes(shape: Sequence[int], itemsize: int, layout: Layout) -> int:
    """Return the bytes of the first rank's part, which is the largest."""
    return itemsize * math.prod(end - begin for begin, end in layout.box(shape, 0))


def next_steps(
    shape: Sequence[int],
    itemsize: int,
    layout: Layout,
    target: Layout,
    costs: Mapping[str, AxisCost],
) -> Iterator[Step]:
    """Yield each step that may follow a layout on the way to a target.

    Args:
        shape: Shape of the whole tensor.
        itemsize: Bytes of an element.
        layout: Layout before the step.
        target: Layout in the end, whose partial axes are left alone.
        costs: Costs of each axis.
    """
    before = local_bytes(shape, itemsize, layout)
    mesh, dims = layout.mesh, layout.dims

    def step(move: str, axis: str, i: int | None, j: int | None, after: Layout) -> Step:
        busiest = max(before, local_bytes(shape, itemsize, after))
        nbytes = (busiest - busiest // mesh.axes[axis]) * WEIGHTS[move]
        cost = costs[axis]
        seconds = cost.latency_s + nbytes * cost.s_per_byte if WEIGHTS[move] else 0.0
        return Step(move, axis, i, j, nbytes, seconds, after)

    used = {axis for axes in (*dims, layout.partial) for axis in axes}
    for axis in (a for a, size in mesh.axes.items() if a not in used and size > 1):
        for j in range(len(dims)):
            yield step("slice", axis, None, j, _pushed(layout, j, axis))
    for i, axes in enumerate(dims):
        if axes:
            whole = replace(layout, dims=(*dims[:i], axes[:-1], *dims[i + 1 :]))
            yield step("all_gather", axes[-1], i, None, whole)
            for j in range(len(dims)):
                if j != i:
                    yield step("all_to_all", axes[-1], i, j, _pushed(whole, j, axes[-1]))
    unsummed = [axis for axis in layout.partial if axis not in target.partial]
    if unsummed:
        axis = unsummed[-1]
        summed = replace(layout, partial=tuple(a for a in layout.partial if a != axis))
        yield step("all_reduce", axis, None, None, summed)
        for j in range(len(dims)):
            yield step("reduce_scatter", axis, None, j, _pushed(summed, j, axis))


WEIGHTS = {"slice": 0, "all_gather": 1, "all_to_all": 1, "reduce_scatter": 1, "all_reduce": 2}


def _pushed(layout: Layout, dim: int, axis: str) -> Layout:
    dims = layout.dims
    return replace(layout, dims=(*dims[:dim], (*dims[dim], axis), *dims[dim + 1 :]))


def _dims(step: Step) -> str:
    match step.source_dim, step.target_dim:
        case None, None:
            return ""
        case None, target:
            return f"-> {target}"
        case source, None:
            return f"{source} ->"
        case source, target:
            return f"{source} -> {target}"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    step, axis, dims, nbytes, us, layout = row
    a, b, c, d, e, _ = widths
    return f"{step:{a}}  {axis:{b}}  {dims:{c}}  {nbytes:>{d}}  {us:>{e}}  {layout}".rstrip()
