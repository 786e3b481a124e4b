"""A wire format: a pair of pure functions between float32 numbers and bytes.

Problem: numbers that cross a network are often wanted in fewer bytes than they are computed in, in
ways that differ in everything (a cast, blocks with scales, indices with values) but whose callers
differ in nothing: they need to know how much room to make, fill it, send it, and take it apart at
the other side.

Idea: one small interface for all of them. `nbytes` bounds what `encode` writes, so that a transport
can allocate once; `encode` returns what it did write; `decode` and `add` are given exactly those
bytes and believe none of them: what came over a network is checked before it is used as a count, an
index or a scale. Formats have no state. What a format loses is kept by `feedback.ErrorFeedback`,
which belongs to the tensor.

Bytes are in the machine's own order and every part starts at a multiple of 4 bytes, so that nothing
has to be copied to be read. Numbers that are not finite are never hidden: whoever looks for NaN at
the receiver finds one.
"""

from __future__ import annotations

from typing import Protocol

import torch

from braid.errors import CommError, ConfigError

__all__ = ["CHUNK", "WireFormat", "check_length", "chunks", "numbers", "room", "same_device"]

CHUNK = (
    1 << 16
)  # numbers that are worked on at a time: temporaries of 256 KiB stay in a core's cache
ALIGNMENT = 4  # bytes; torch views bytes as numbers only where those may begin


class WireFormat(Protocol):
    """The form of a flat float32 tensor on a wire; implementations are stateless."""

    @property
    def name(self) -> str:
        """Name from which `by_name` makes an equal format."""

    @property
    def lossy(self) -> bool:
        """Whether decoding may give other numbers than were encoded."""

    def nbytes(self, numel: int) -> int:
        """Upper bound on what `encode` writes for `numel` numbers, in bytes."""

    def encode(self, x: torch.Tensor, into: torch.Tensor) -> int:
        """Write `x` into the beginning of `into`.

        Args:
            x: float32, flat and contiguous; any number of elements.
            into: uint8, flat and contiguous, at least `nbytes(x.numel())` long, beginning at a
                multiple of 4 bytes.

        Returns:
            Bytes written; `into[:written]` is what `decode` takes.

        Raises:
            ConfigError: A tensor is not as described.
        """

    def decode(self, buffer: torch.Tensor, out: torch.Tensor) -> None:
        """Write the numbers in `buffer` into `out`.

        Args:
            buffer: uint8, exactly what `encode` wrote.
            out: float32, flat and contiguous, with as many elements as were encoded.

        Raises:
            ConfigError: A tensor is not as described.
            CommError: The bytes are not what `encode` writes for so many numbers; `out` is as it
                was.
        """

    def add(self, buffer: torch.Tensor, out: torch.Tensor) -> None:
        """Add the numbers in `buffer` to `out`; temporaries stay small."""


def numbers(x: torch.Tensor, name: str) -> torch.Tensor:
    """`x` without its gradient, once it is known to be flat, contiguous float32.

    Raises:
        ConfigError: It is not; `name` is the argument's.
    """
    if x.dtype != torch.float32 or x.dim() != 1 or not x.is_contiguous():
        msg = (
            f"{name} must be a flat contiguous tensor of torch.float32, not {_described(x)}: "
            "pass x.float().contiguous().view(-1)"
        )
        raise ConfigError(msg)
    return x.detach()


def room(buffer: torch.Tensor, name: str, nbytes: int = 0) -> torch.Tensor:
    """Return `buffer` as flat bytes, checked to hold at least `nbytes` of them.

    Raises:
        ConfigError: It is not; `name` is the argument's.
    """
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        msg = (
            f"{name} must be a flat contiguous tensor of torch.uint8, not "
            f"{_described(buffer)}: pass x.view(torch.uint8), or a slice of bytes"
        )
        raise ConfigError(msg)
    if buffer.storage_offset() % ALIGNMENT or buffer.data_ptr() % ALIGNMENT:
        msg = (
            f"{name} begins at byte {buffer.storage_offset()} of memory at "
            f"{buffer.untyped_storage().data_ptr():#x}, which is no multiple of {ALIGNMENT}: "
            "round the offset up"
        )
        raise ConfigError(msg)
    if buffer.numel() < nbytes:
        msg = (
            f"{name} has room for {buffer.numel()} bytes and needs {nbytes}: allocate what "
            "nbytes(numel) says"
        )
        raise ConfigError(msg)
    return buffer


def same_device(x: torch.Tensor, buffer: torch.Tensor) -> None:
    """Refuse numbers and bytes that lie on different devices."""
    if x.device != buffer.device:
        msg = (
            f"the numbers are on {x.device} and the bytes on {buffer.device}: encode where the "
            "numbers are, then move the bytes"
        )
        raise ConfigError(msg)


def chunks(flat: torch.Tensor) -> list[torch.Tensor]:
    """Views of `flat`, `CHUNK` numbers each, the last one shorter."""
    return [flat[start : start + CHUNK] for start in range(0, flat.numel(), CHUNK)]


def check_length(form: str, nbytes: int, expected: int, numel: int) -> None:
    """Refuse a message of `nbytes` bytes where `numel` numbers take `expected`.

    Raises:
        CommError: They differ.
    """
    if nbytes != expected:
        msg = (
            f"expected {expected} bytes for {numel} numbers in {form}, found {nbytes}: "
            "sender and receiver must agree on format and shape"
        )
        raise CommError(msg)


def _described(x: torch.Tensor) -> str:
    strides = "" if x.is_contiguous() else f" and strides {x.stride()}"
    return f"{x.dtype} of shape {tuple(x.shape)}{strides}"
