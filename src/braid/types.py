"""Types that several packages share: of tensors, collectives, and the time of a rank.

They are plain tuples without torch, so that state machines, planners and error reports can use
them. Two ranks agree on an operation when the digests of their `OpDesc` agree: 64 bits in a cache
line instead of a message.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

__all__ = ["OpDesc", "Shares", "TensorSpec", "dtype_name", "first_few", "text_digest"]


def dtype_name(dtype: object) -> str:
    """Return torch's name of a dtype without the prefix, such as `float32`."""
    return str(dtype).removeprefix("torch.")


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor.

    Attributes:
        shape: Extent of each dim.
        dtype: torch's name without the prefix, such as `float32`.
        requires_grad: Whether autograd follows it.
    """

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = False

    def __str__(self) -> str:
        """`float32[4, 8]`, as error messages and traces print it."""
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


class OpDesc(NamedTuple):
    """Description of a collective, which must be equal on all ranks of the group.

    Attributes:
        kind: Name of the operation, such as `all_reduce`.
        spec: The tensor that all ranks must agree on.
        reduce: Reduction, one of sum avg min max product; ignored by operations that do not reduce.
        root: Group rank of the root, -1 when the operation has none.
        wire: Number format on the wire; `same` sends the tensor's own.
    """

    kind: str
    spec: TensorSpec
    reduce: str = "sum"
    root: int = -1
    wire: str = "same"

    @property
    def digest(self) -> int:
        """64 bits that stand for this description; never 0."""
        return text_digest(str(self))

    def __str__(self) -> str:
        """`all_reduce(float32[1024], sum)`."""
        parts = [str(self.spec)]
        if "reduce" in self.kind:
            parts.append(self.reduce)
        if self.root >= 0:
            parts.append(f"root={self.root}")
        if self.wire != "same":
            parts.append(f"wire={self.wire}")
        return f"{self.kind}({', '.join(parts)})"


class Shares(NamedTuple):
    """Shares of a rank's time, which add up to 1; all 0 when there was no time.

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
        """Compute the shares from the counters of a group over an interval."""
        wall = max(wall_ns, spent_ns, 1)
        waited = min(waited_ns, spent_ns)
        return cls(1 - spent_ns / wall, waited / wall, (spent_ns - waited) / wall)


@lru_cache(maxsize=65536)
def text_digest(text: str) -> int:
    """First 63 bits of BLAKE2b of `text`, as a non-zero integer."""
    value = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    return (value >> 1) or 1


def first_few(items: Iterable[object], most: int = 8, separator: str = ", ") -> str:
    """Return the first items as text, and the number of further ones.

    >>> first_few(range(4)), first_few("abcd", 2)
    ('0, 1, 2, 3', 'a, b and 2 more')
    """
    texts = list(map(str, items))
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return separator.join(texts[:most]) + more
