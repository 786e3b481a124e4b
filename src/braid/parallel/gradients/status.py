"""The status of a backward: one small sum over ranks beside the gradients. Pure.

Problem: who has a gradient of what, which loss weight each rank has, who has no more input, whose
backward raised, whose numbers are not finite: each of these could have a collective of its own, as
elsewhere, or a place in every bucket, where a compressed format would spoil it.

Idea: one vector of 64-bit floats, summed over ranks. Counts are exact; a rank has elements of its
own, to which the others add zeros.

    | per parameter: present, nonfinite, requires_grad | per rank: state, forwards, hook |
    | loss weight | ranks with a weight | ranks with changed buffers |

It begins when the last gradient of this rank is there, beside buckets that are on their way, and
takes the latency of a small message.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["RankState", "Status", "StatusLayout"]


class RankState(enum.IntEnum):
    """Part of a rank in a backward."""

    ACTIVE = 0
    JOINED = 1  # it has no more input and only shadows the others
    FAILED = 2  # an exception ended its backward
    NONFINITE = 3  # it has gradients that are NaN or infinite


STATES = tuple(RankState)


class Status(NamedTuple):
    """The sum of what all ranks reported.

    Attributes:
        present: Number of ranks that have a gradient, by parameter.
        nonfinite: Number of ranks whose gradient is not finite, by parameter.
        requires_grad: Number of ranks on which a parameter requires a gradient, by parameter.
        states: States of the ranks.
        num_forwards_without_backward: Number of forward passes since the last averaging that no
            backward has reached, by rank.
        has_hook: Whether a communication hook is registered, by rank.
        weight: Sum of the loss weights.
        num_weighted: Number of ranks whose loss weight was set by the program.
        num_buffers_used: Number of ranks that have used the module in training mode since its
            buffers were last equal.
    """

    present: Sequence[int]
    nonfinite: Sequence[int]
    requires_grad: Sequence[int]
    states: Sequence[RankState]
    num_forwards_without_backward: Sequence[int]
    has_hook: Sequence[int]
    weight: float
    num_weighted: int
    num_buffers_used: int

    def ranks(self, state: RankState) -> list[int]:
        """Group ranks in this state."""
        return [rank for rank, own in enumerate(self.states) if own is state]


class StatusLayout(NamedTuple):
    """Layout of the status vector.

    Attributes:
        num_params: Number of parameters.
        size: Number of ranks.
    """

    num_params: int
    size: int

    @property
    def length(self) -> int:
        """Length of the status vector."""
        return 3 * self.num_params + 3 * self.size + 3

    def encode(
        self,
        rank: int,
        *,
        present: Sequence[bool],
        nonfinite: Sequence[bool],
        requires_grad: Sequence[bool],
        state: RankState,
        num_forwards_without_backward: int,
        has_hook: bool,
        weight: float,
        is_weighted: bool,
        buffers_used: bool,
    ) -> list[float]:
        """Return the summand of rank `rank`.

        >>> StatusLayout(1, 2).encode(
        ...     1,
        ...     present=[True],
        ...     nonfinite=[False],
        ...     requires_grad=[True],
        ...     state=RankState.JOINED,
        ...     num_forwards_without_backward=2,
        ...     has_hook=True,
        ...     weight=4.0,
        ...     is_weighted=True,
        ...     buffers_used=False,
        ... )
        [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 2.0, 0.0, 1.0, 4.0, 1.0, 0.0]
        """
        size = self.size
        own = [0.0] * (3 * size)
        own[rank], own[size + rank] = float(state), float(num_forwards_without_backward)
        own[2 * size + rank] = float(has_hook)
        flags = map(float, (*present, *nonfinite, *requires_grad))
        return [*flags, *own, weight, float(is_weighted), float(buffers_used)]

    def decode(self, summed: Sequence[float]) -> Status:
        """Return what the sum of all ranks' vectors says."""
        n, size = self.num_params, self.size
        counts = list(map(round, summed[:-3]))
        weight, num_weighted, num_buffers_used = summed[-3:]
        return Status(
            present=counts[:n],
            nonfinite=counts[n : 2 * n],
            requires_grad=counts[2 * n : 3 * n],
            states=list(map(STATES.__getitem__, counts[3 * n : 3 * n + size])),
            num_forwards_without_backward=counts[3 * n + size : 3 * n + 2 * size],
            has_hook=counts[3 * n + 2 * size :],
            weight=weight,
            num_weighted=round(num_weighted),
            num_buffers_used=round(num_buffers_used),
        )
