"""The spec of a sparse tensor of a message: two buffers that belong together."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["SparseSpec"]


class SparseSpec(NamedTuple):
    """A sparse tensor of a message.

    Attributes:
        place: Place of its indices among the buffers; the values follow.
        shape: Extent of each dim.
        is_coalesced: Whether each index occurs once.
        requires_grad: Whether autograd follows it.
    """

    place: int
    shape: tuple[int, ...]
    is_coalesced: bool
    requires_grad: bool
