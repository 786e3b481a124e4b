"""Exchange of part sizes: one step after which all members know what each sends to each.

The parts of a ragged all-to-all, a gather and a scatter have sizes that no member knows completely.
Each member publishes two rows: the sizes it sends to each member, and the sizes it expects from
each (-1: unknown). All members read all rows, so all have the same matrix. If sizes disagree, all
raise the same error.

Cost: one step of 16 n bytes.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch

from braid.comm.channel.channel import Channel
from braid.errors import MismatchError
from braid.runtime.transport import Wait, WaitAny

__all__ = ["Matrix", "agree_on_sizes", "offsets_of"]

Matrix = list[list[int]]
UNKNOWN = -1


def agree_on_sizes(
    ch: Channel, sends: Sequence[int], expects: Sequence[int]
) -> Generator[Wait | WaitAny, None, Matrix]:
    """Exchange the sizes of an all-to-all, and check that senders and receivers agree.

    Args:
        ch: Channel of the group.
        sends: Number of elements that this rank sends to each member, including itself.
        expects: Number of elements that this rank expects from each member, -1 to accept any.

    Returns:
        `sends` of every member.

    Raises:
        MismatchError: Some pairs disagree; every rank raises the same error, which names them all.
    """
    n = ch.size
    ch.own.stage(torch.tensor([*sends, *expects], dtype=torch.int64, device="cpu"))
    yield from ch.publish_and_wait()
    rows = [
        [*sends, *expects] if r == ch.rank else ch.peek(r, 2 * n, torch.int64).tolist()
        for r in range(n)
    ]
    wrong = [
        f"  rank {ch.ranks[s]} sends {rows[s][r]} elements to rank {ch.ranks[r]}, which expects "
        f"{rows[r][n + s]}"
        for s in range(n)
        for r in range(n)
        if rows[r][n + s] not in (UNKNOWN, rows[s][r])
    ]
    if wrong:
        msg = "\n".join(
            [
                "senders and receivers disagree on the number of elements:",
                *wrong,
                "make each send as long as the matching receive",
            ]
        )
        raise MismatchError(msg)
    return [row[:n] for row in rows]


def offsets_of(widths: Sequence[int]) -> list[int]:
    """Return the offset of each of consecutive parts, and the end of the last part.

    >>> offsets_of([3, 0, 2])
    [0, 3, 3, 5]
    """
    offsets = [0]
    for width in widths:
        offsets.append(offsets[-1] + width)
    return offsets
