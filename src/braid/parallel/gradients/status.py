"""The status of a backward: one small vector, summed over ranks beside the gradients. Pure.

Problem: ranks must know which gradients and loss weights all ranks have, which rank has no more
input, has raised, or has gradients that are not finite. Each of these could have a separate
collective, or a field in every bucket, which a compressed format would spoil.

Idea: one vector of 64-bit floats, summed over ranks. Counts are exact; each rank has separate
elements, to which the other ranks add zeros.

    | per parameter: present, nonfinite, requires_grad | per rank: state, forwards, hook |
    | loss weight | ranks with a weight | ranks with changed buffers |

The exchange begins when the last gradient of this rank is ready, while buckets are in flight, and
takes the latency of a small message.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["RankState", "Status", "StatusLayout"]


class RankState(enum.IntEnum):
    """Role of a rank in a backward, reported to all ranks."""

    ACTIVE = 0
    JOINED = 1  # it has no more input and shadows the other ranks
    FAILED = 2  # its backward raised
    NONFINITE = 3  # it has gradients that are NaN or infinite


STATES = tuple(RankState)


class Status(NamedTuple):
    """Sum of the status vectors that all ranks report in a backward.

    Attributes:
        present: Number of ranks that have a gradient, by parameter.
        nonfinite: Number of ranks with a gradient that is not finite, by parameter.
        requires_grad: Number of ranks on which a parameter requires a gradient, by parameter.
        states: States of the ranks.
        num_forwards_without_backward: Number of forward passes since the last averaging that no
            backward has reached, by rank.
        has_hook: Whether a communication hook is registered, by rank.
        weight: Sum of the loss weights.
        num_weighted: Number of ranks on which the program has set a loss weight.
        num_buffers_used: Number of ranks that have run the module in training mode since its
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
        """Return the group ranks in this state."""
        return [rank for rank, rank_state in enumerate(self.states) if rank_state is state]


class StatusLayout(NamedTuple):
    """Layout of the status vector, by which each rank reports its state; the sum is a `Status`.

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
        """Return the status vector of rank `rank`, to be summed over ranks.

        The other arguments are this rank's contributions to the fields of `Status`.

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
        fields = [0.0] * (3 * size)
        fields[rank], fields[size + rank] = float(state), float(num_forwards_without_backward)
        fields[2 * size + rank] = float(has_hook)
        flags = map(float, (*present, *nonfinite, *requires_grad))
        return [*flags, *fields, weight, float(is_weighted), float(buffers_used)]

    def decode(self, summed: Sequence[float]) -> Status:
        """Convert the sum of all ranks' vectors to a `Status`."""
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
