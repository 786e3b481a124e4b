"""Consistency of a table: how far workers may be apart, and when a push changes the table.

    staleness 0          bulk synchronous (BSP): all pushes of a clock are added in the order of
                         workers, and applied once; a pull sees all earlier clocks
    staleness k          stale synchronous (SSP): a push is applied when it comes; a pull at clock c
                         waits until all workers have pushed the clocks before c - k
    staleness infinity   asynchronous: workers never wait for each other
    quorum n of m        BSP with backup workers: a clock is applied when n have pushed it

Sources: Q. Ho et al., SSP, NeurIPS 2013; J. Chen et al., Revisiting distributed synchronous SGD,
2016 (backup workers); M. Li et al., Parameter Server, OSDI 2014 (bounded delay).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from braid.errors import raise_all

__all__ = ["BSP", "Consistency"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Consistency:
    """Consistency of a table: staleness of workers, and pushes that complete a clock (a step).

    Attributes:
        staleness: Clocks that a worker may be ahead of the slowest one; infinity for any number.
        quorum: Number of pushes that complete a clock, at staleness 0; all workers' when None.
        late: Whether a push that arrives after its clock is complete is dropped or applied.
        aggregate: Whether pushes of a clock are averaged or summed.
        compensate: Strength of the correction of late gradients of dense tables; 0 for none. For
            staleness above 0.

    Raises:
        ConfigError: A value is out of range; all problems are named.
    """

    staleness: float = 0
    quorum: int | None = None
    late: Literal["drop", "apply"] = "drop"
    aggregate: Literal["mean", "sum"] = "mean"
    compensate: float = 0.0

    def __post_init__(self) -> None:
        problems = []
        if not self.staleness >= 0 or (
            math.isfinite(self.staleness) and self.staleness != int(self.staleness)
        ):
            problems.append(
                "staleness must be a whole number of clocks from 0 on, or infinity, got "
                f"{self.staleness!r}"
            )
        if self.quorum is not None and (self.quorum < 1 or self.staleness != 0):
            problems.append(
                f"quorum must be at least 1 push and needs staleness 0, got quorum {self.quorum} "
                f"and staleness {self.staleness}"
            )
        if self.late not in {"drop", "apply"}:
            problems.append(f"late must be drop or apply, got {self.late!r}")
        if self.aggregate not in {"mean", "sum"}:
            problems.append(f"aggregate must be mean or sum, got {self.aggregate!r}")
        if not 0 <= self.compensate < math.inf or (self.compensate and self.staleness == 0):
            problems.append(
                "compensate must be 0 or above 0, and above 0 it needs a staleness above 0, got "
                f"compensate {self.compensate} and staleness {self.staleness}"
            )
        raise_all(problems)

    @property
    def by_clock(self) -> bool:
        """Whether pushes of one clock (a step of all workers) are applied together."""
        return self.staleness == 0


BSP = Consistency()
