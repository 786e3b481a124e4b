"""What ranks tell each other once per backward besides gradients: one small sum, in which each has its places. Pure.

Problem: who has a gradient of what, who counts how much, who has no more input, who left backward by an exception, whose
numbers are not finite: each of these could have a collective of its own, as elsewhere, or a place in every bucket, where a compressed format
would spoil it.

Idea: one vector of 64-bit floats, summed over ranks. Counts are exact; a rank has places of its own, in which the others add zeros.

    | per parameter: present, not finite, trained | per rank: standing, unreached | weight | weighed | buffers |

It begins when the last gradient of this rank is there, beside buckets that are on their way, and takes the latency of a small message.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Standing", "Status", "StatusLayout"]


class Standing(enum.IntEnum):
    """How a rank takes part in a backward."""

    WORKS = 0
    JOINED = 1  # it has no more input and only helps the others
    BROKE = 2  # it left backward by an exception
    SPOILED = 3  # it has numbers that are not finite


class Status(NamedTuple):
    """What all ranks said, or what one says.

    Attributes:
        present: By parameter, number of ranks that have a gradient.
        spoiled: By parameter, number of ranks whose gradient is not finite.
        trained: By parameter, number of ranks on which it requires a gradient.
        standings: By rank.
        unreached: By rank, number of forwards since the last averaging to which no backward has come.
        weight: Sum of the weights.
        weighed: Number of ranks whose gradients count what the program has said.
        buffers: Number of ranks that have used the module in training mode since buffers were last equal.
    """

    present: Sequence[int]
    spoiled: Sequence[int]
    trained: Sequence[int]
    standings: Sequence[Standing]
    unreached: Sequence[int]
    weight: float
    weighed: int
    buffers: int

    def ranks(self, standing: Standing) -> list[int]:
        """Group ranks of this standing."""
        return [rank for rank, found in enumerate(self.standings) if found is standing]


class StatusLayout(NamedTuple):
    """Where in the vector what lies.

    Attributes:
        num_params: Number of parameters.
        size: Number of ranks.
    """

    num_params: int
    size: int

    @property
    def length(self) -> int:
        """Of the vector."""
        return 3 * self.num_params + 2 * self.size + 3

    def encode(
        self,
        rank: int,
        *,
        present: Sequence[bool],
        spoiled: Sequence[bool],
        trained: Sequence[bool],
        standing: Standing,
        unreached: int,
        weight: float,
        weighed: bool,
        buffers: bool,
    ) -> list[float]:
        """What rank `rank` puts in.

        >>> layout = StatusLayout(1, 2)
        >>> layout.encode(
        ...     1, present=[True], spoiled=[False], trained=[True], standing=Standing.JOINED, unreached=2, weight=4.0, weighed=True, buffers=False
        ... )
        [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 2.0, 4.0, 1.0, 0.0]
        """
        own = [0.0] * (2 * self.size)
        own[rank], own[self.size + rank] = float(standing), float(unreached)
        flags = [float(flag) for part in (present, spoiled, trained) for flag in part]
        return [*flags, *own, weight, float(weighed), float(buffers)]

    def decode(self, summed: Sequence[float]) -> Status:
        """What the sum says."""
        n, size = self.num_params, self.size
        counts = [round(number) for number in summed[: 3 * n + 2 * size]]
        by_rank = counts[3 * n :]
        return Status(
            present=counts[:n],
            spoiled=counts[n : 2 * n],
            trained=counts[2 * n : 3 * n],
            standings=[Standing(code) for code in by_rank[:size]],
            unreached=by_rank[size:],
            weight=summed[-3],
            weighed=round(summed[-2]),
            buffers=round(summed[-1]),
        )
