"""`torchgpipe.balance.blockpartition`: division of a sequence into parts with balanced sums."""

from __future__ import annotations

from collections.abc import Sequence

from braid.parallel.pipeline import block_partition

__all__ = ["solve"]


def solve(sequence: Sequence[int], partitions: int = 1) -> list[list[int]]:
    """Return contiguous parts of a sequence that minimize the largest sum.

    Raises:
        ValueError: `partitions` is less than 1, or exceeds the length of the sequence.
    """
    if partitions < 1:
        msg = f"partitions must be a positive integer (partitions: {partitions})"
        raise ValueError(msg)
    if len(sequence) < partitions:
        msg = (
            f"sequence is shorter than intended partitions (sequence: {len(sequence)}, "
            f"partitions: {partitions}): use fewer partitions"
        )
        raise ValueError(msg)
    rest = iter(sequence)
    return [[next(rest) for _ in range(size)] for size in block_partition(sequence, partitions)]
