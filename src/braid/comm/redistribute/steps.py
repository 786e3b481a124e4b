"""Plans as data: the steps from one layout of a tensor to another on the same mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from braid.errors import ConfigError
from braid.programs.layout import Layout

__all__ = ["AxisCost", "RedistributionPlan", "RedistributionStep"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisCost:
    """Cost of a collective along one axis.

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
            msg = f"costs of an axis in seconds must be finite and at least 0, got {self}"
            raise ConfigError(msg)


@dataclass(frozen=True, slots=True)
class RedistributionStep:
    """One collective, or one slice, of a plan.

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
class RedistributionPlan:
    """Steps between two layouts on one mesh.

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
    steps: tuple[RedistributionStep, ...]

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


def _dims(step: RedistributionStep) -> str:
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
