"""What a rank wants done with a tensor, and what all ranks have agreed to do. Pure."""

from __future__ import annotations

from math import prod

import msgspec

__all__ = ["BATCHED", "JOINABLE", "Request", "Response"]

BATCHED = frozenset({"all_reduce"})  # kinds that share a message with others of their kind
JOINABLE = frozenset(
    {"all_reduce", "barrier"}
)  # kinds that can go on without a rank that has joined


class Request(msgspec.Struct, frozen=True, array_like=True):
    """One operation on one tensor, as one rank asks for it.

    Attributes:
        name: By which ranks find each other.
        kind: all_reduce, all_gather, broadcast, all_to_all, reduce_scatter, barrier, or agree (on
            `text`).
        dtype: torch's name of it.
        shape: Of this rank's tensor.
        itemsize: Bytes of an element.
        op: Reduction.
        root: Group rank.
        prescale: Factor before the reduction.
        postscale: Factor after it.
        splits: Rows for each rank of an all_to_all.
        group: Name of requests that are carried out together or not at all.
        group_size: Their number.
        text: What ranks must say alike.
        device: Type of device, and its number, of the tensor.
        place: Where it lies among others in one flat tensor of this rank, in elements, if it does;
            else -1. What is carried out together and lies side by side needs no copies. Places of
            several flat tensors differ: see `Fusion.reserve`.
        strides: With a place: those of the tensor, if it does not lie row by row.
    """

    name: str
    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    itemsize: int = 0
    op: str = ""
    root: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    splits: tuple[int, ...] = ()
    group: str = ""
    group_size: int = 0
    text: str = ""
    device: str = "cpu"
    place: int = -1
    strides: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Of this rank's tensor."""
        return prod(self.shape) * self.itemsize


class Response(msgspec.Struct, frozen=True, array_like=True):
    """What all ranks do with the tensors of one name, the same on all.

    Attributes:
        name: Of the requests.
        request: One of them, for what they have in common; of no meaning with an error.
        rows: Extent of dim 0 by rank, of an all_gather; by sender, then receiver, of an all_to_all.
        error: Why there is nothing to do.
    """

    name: str
    request: Request
    rows: tuple[tuple[int, ...], ...] = ()
    error: str = ""
