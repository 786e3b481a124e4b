"""Closed forms: messages and bytes that a rank sends for one attention.

n: ranks; kv_bytes: bytes of a rank's keys and values; q_bytes: bytes of its queries, which are
those of its output; wide: bytes of a number of sums over bytes of a number (2 for bfloat16).

    ring          forward   (n-1) kv              backward   (n-1) (1 + wide) kv
    all-to-all    forward   (n-1)/n (2 q + kv)    backward   (n-1)/n (2 q + kv)

With as many heads of keys as of queries kv = 2 q, and a ring sends n/2 times as much forward; with
g times fewer, n/(g+1) times.
"""

from __future__ import annotations

from braid.cost import Cost

__all__ = ["all_to_all_costs", "ring_costs"]


def ring_costs(size: int, kv_bytes: int, *, wide: int = 1) -> tuple[Cost, Cost]:
    """Return the costs of `ring_attention`, forward and backward.

    Args:
        size: Number of ranks.
        kv_bytes: Bytes of a rank's keys and values.
        wide: Bytes of a number of sums over bytes of a number: 2 for float16 and bfloat16.
    """
    hops = size - 1
    return Cost(hops, hops * kv_bytes), Cost(2 * hops, hops * (1 + wide) * kv_bytes)


def all_to_all_costs(size: int, q_bytes: int, kv_bytes: int) -> tuple[Cost, Cost]:
    """Return the costs of `all_to_all_attention`, forward and backward.

    Args:
        size: Number of ranks.
        q_bytes: Bytes of a rank's queries.
        kv_bytes: Bytes of a rank's keys and values.
    """
    one_way = Cost(2 * (size - 1), (size - 1) / size * (2 * q_bytes + kv_bytes))
    return one_way, one_way
