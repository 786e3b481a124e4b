"""Types shared by several packages: descriptions of tensors, and time shares.

They are plain tuples that do not import torch, so state machines, planners and error reports can
use them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

__all__ = ["Shares", "TensorSpec", "dtype_name", "first_few", "ranks_text", "text_digest"]


def dtype_name(dtype: object) -> str:
    """Return torch's name of a dtype without the prefix, such as `float32`."""
    return str(dtype).removeprefix("torch.")


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor.

    Attributes:
        shape: Size of each dim.
        dtype: torch's name without the prefix, such as `float32`.
        requires_grad: Whether autograd records operations on the tensor.
    """

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = False

    def __str__(self) -> str:
        """`float32[4, 8]`, as error messages and traces print it."""
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


class Shares(NamedTuple):
    """Shares of a rank's time, which add up to 1; all 0 for an empty interval.

    Attributes:
        compute: Share of time outside of collectives.
        wait: Share of time in collectives, waiting for other ranks.
        transfer: Share of time in collectives, moving and adding data.
    """

    compute: float
    wait: float
    transfer: float

    @classmethod
    def of(cls, wall_ns: int, spent_ns: int, waited_ns: int) -> Shares:
        """Return the shares of an interval, from a group's counters at its end minus its begin.

        Args:
            wall_ns: Length of the interval.
            spent_ns: Time spent in collectives, including waits.
            waited_ns: Part of `spent_ns` spent waiting for other ranks.
        """
        wall = max(wall_ns, spent_ns, 1)
        waited = min(waited_ns, spent_ns)
        return cls(1 - spent_ns / wall, waited / wall, (spent_ns - waited) / wall)


@lru_cache(maxsize=65536)
def text_digest(text: str) -> int:
    """Return 63 bits of the BLAKE2b hash of `text` as a non-zero integer."""
    value = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    return (value >> 1) or 1


def first_few(items: Iterable[object], most: int = 8, separator: str = ", ") -> str:
    """Return the first `most` items as text, joined by `separator`, and the number of the others.

    >>> first_few(range(4)), first_few("abcd", 2)
    ('0, 1, 2, 3', 'a, b and 2 more')
    """
    texts = list(map(str, items))
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return separator.join(texts[:most]) + more


def ranks_text(ranks: Sequence[int], most: int | None = None) -> str:
    """Return ranks as text, such as `rank 1` or `ranks 0, 2`; at most the first `most` of them."""
    return f"rank{'s' if len(ranks) > 1 else ''} {first_few(ranks, most or len(ranks))}"
