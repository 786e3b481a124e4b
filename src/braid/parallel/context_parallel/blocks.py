"""The block in which queries of a rank meet keys of another rank, and what causality masks.

Keys and values go round the ring; in step t a rank has those of the rank t places before it. With
the balanced cut each pair of ranks meets in one dense block, so that a mask is needed in step 0
only:

    keys of           queries           keys             mask
    the rank itself   all               all              causal
    an earlier rank   all               early chunk      none: both chunks come after it
    a later rank      late chunk        all              none: it comes after both chunks

Each step after the first has half of the products of a full block, on all ranks. Without causality
everything meets everything.

Source: H. Liu, M. Zaharia, P. Abbeel, Ring attention with blockwise transformers, 2023.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["AttentionBlock", "block_of"]


class AttentionBlock(NamedTuple):
    """Queries and keys that meet, as slices of what the two ranks have.

    Attributes:
        queries: Positions of this rank.
        keys: Positions of the other rank.
        is_causal: Whether query i sees keys up to i only.
    """

    queries: slice
    keys: slice
    is_causal: bool = False


def block_of(
    rank: int, source: int, length: int, *, causal: bool, balanced: bool
) -> AttentionBlock | None:
    """Return the block in which a rank's queries meet the keys of rank `source`.

    Args:
        rank: Rank of the queries.
        source: Rank of the keys.
        length: Number of positions of each rank.
        causal: Whether a position sees no later ones.
        balanced: Whether a rank has an early and a late chunk; see `split_sequence`.

    Returns:
        The block; None where causality masks all of it.
    """
    everything, half = slice(0, length), length // 2
    if not causal or rank == source:
        return AttentionBlock(everything, everything, is_causal=causal)
    if not balanced:
        return AttentionBlock(everything, everything) if source < rank else None
    if source < rank:
        return AttentionBlock(everything, slice(0, half))
    return AttentionBlock(slice(half, length), everything)
