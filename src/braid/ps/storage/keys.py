"""Ids of rows: all 64-bit integers, and the shard of each.

Problem: keys of parameter servers are uint64, for which torch has few operations. Ids are often
small and consecutive, so that division by ranges of ids would put all of them on one server.

Idea: flipping the top bit maps uint64 to int64 and keeps the order. A hash that mixes all bits
spreads ids evenly; its high bits select the shard, its low bits the bucket of a hash table.

Source: G. Steele, D. Lea, C. Flood, Fast splittable pseudorandom number generators, OOPSLA 2014
(finalizer of splitmix64, after D. Stafford's variant 13).
"""

from __future__ import annotations

import torch

from braid.errors import ConfigError

__all__ = ["mix", "shard_of", "to_signed", "to_unsigned"]

TOP = -(1 << 63)
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
FACTORS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
SHIFTS = (30, 27, 31)


def to_signed(keys: torch.Tensor) -> torch.Tensor:
    """Map keys (uint64) to ids (int64) in the same order, by flipping the top bit."""
    return keys.view(torch.int64) ^ TOP


def to_unsigned(ids: torch.Tensor) -> torch.Tensor:
    """Map ids (int64) back to keys (uint64)."""
    return (ids ^ TOP).view(torch.uint64)


def mix(ids: torch.Tensor) -> torch.Tensor:
    """Return a 64-bit hash of each id (int64); a bijection, and the same on all machines.

    Products and sums wrap around, as in two's complement.
    """
    mixed = ids + GOLDEN
    for shift, factor in zip(SHIFTS, (*FACTORS, None), strict=True):
        # a shift of int64 copies the sign, which the mask removes
        mixed ^= (mixed >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        if factor is not None:
            mixed *= factor
    return mixed


def shard_of(ids: torch.Tensor, num_shards: int) -> torch.Tensor:
    """Return the shard of each id, from the high 32 bits of its hash.

    Args:
        ids: Ids, int64.
        num_shards: Number of shards, at most 2^31.

    Returns:
        Numbers of shards in int64, of the shape of `ids`.

    Raises:
        ConfigError: The number of shards is out of range.
    """
    if not 1 <= num_shards <= 1 << 31:
        msg = f"num_shards of a table must be from 1 to 2^31, got {num_shards}"
        raise ConfigError(msg)
    high = (mix(ids) >> 32).bitwise_and_(0xFFFFFFFF)
    return high.mul_(num_shards).bitwise_right_shift_(32)
