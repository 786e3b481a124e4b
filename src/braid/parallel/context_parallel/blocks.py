"""Blocks of attention: a rank's queries with another rank's keys, and the causal mask.

Keys and values are passed around the ring; in step t a rank has keys of the rank t places before
it. With balanced chunks each pair of ranks has one dense block, so only step 0 needs a mask:

    keys of           queries           keys             mask
    the rank itself   all               all              causal
    an earlier rank   all               early chunk      none: both chunks come after it
    a later rank      late chunk        all              none: it comes after both chunks

Each step after the first has half of the products of a full block, on all ranks. Without causal
masking every block is full.

Source: H. Liu, M. Zaharia, P. Abbeel, Ring attention with blockwise transformers, 2023.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["AttentionBlock", "block_of"]


class AttentionBlock(NamedTuple):
    """One block of attention: slices of one rank's queries and of one rank's keys.

    Attributes:
        queries: Slice of the positions of the rank with the queries.
        keys: Slice of the positions of the rank with the keys.
        is_causal: Whether query i attends to keys up to i only.
    """

    queries: slice
    keys: slice
    is_causal: bool = False


def block_of(
    rank: int, source: int, length: int, *, causal: bool, balanced: bool
) -> AttentionBlock | None:
    """Return the block of attention of a rank's queries to the keys of rank `source`.

    Args:
        rank: Rank of the queries.
        source: Rank of the keys.
        length: Number of positions of each rank.
        causal: Whether a position attends to no later positions.
        balanced: Whether a rank has an early and a late chunk; see `split_sequence`.

    Returns:
        The block; None if the causal mask covers all of it.
    """
    everything, half = slice(0, length), length // 2
    if not causal or rank == source:
        return AttentionBlock(everything, everything, is_causal=causal)
    if not balanced:
        return AttentionBlock(everything, everything) if source < rank else None
    if source < rank:
        return AttentionBlock(everything, slice(0, half))
    return AttentionBlock(slice(half, length), everything)
