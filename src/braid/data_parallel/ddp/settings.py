"""The arguments of a DistributedDataParallel, as its copies need them: without module and group."""

from __future__ import annotations

from dataclasses import dataclass

from braid.data_parallel.ddp.arguments import finite_check_of
from braid.data_parallel.finite import NonfiniteHandler
from braid.params import Caps, ReducerOptions

__all__ = ["WrapperSettings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WrapperSettings:
    """Arguments of a wrapper; parameters stand here by their names.

    Attributes:
        init_sync: Whether rank 0's values are copied at wrapping.
        broadcast_buffers: Whether those of buffers are, too.
        caps: Sizes of buckets.
        delayed: Names of parameters whose gradients are launched late.
        delayed_after: Name of the parameter whose gradient launches them.
        gradient_accumulation_steps: Number of backwards from average to average.
        nonfinite: Reaction to NaN and infinity.
        check_all: Whether every number is looked at.
        hash_every: Number of averagings from one comparison of parameters to the next.
        hook: Communication hook by name.
    """

    init_sync: bool
    broadcast_buffers: bool
    caps: Caps
    delayed: frozenset[str]
    delayed_after: str
    gradient_accumulation_steps: int
    nonfinite: str | NonfiniteHandler
    check_all: bool
    hash_every: int
    hook: str | None

    def options(self, wire: str | None, *, static_graph: bool) -> ReducerOptions:
        """Return the options of the reducer.

        Args:
            wire: Format in which gradients cross a network.
            static_graph: Whether every backward uses the same parameters, equally often.
        """
        return ReducerOptions(
            caps=self.caps,
            wire=wire,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
            static_graph=static_graph,
            delayed=self.delayed,
            delayed_after=self.delayed_after,
            finite_check=finite_check_of(self.nonfinite, check_all=self.check_all),
        )
