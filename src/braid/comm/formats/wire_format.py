"""Wire format: a pair of pure functions between float32 numbers and bytes.

Problem: numbers often need fewer bytes on a network than in computation. Formats differ in
everything (a cast, blocks with scales, indices with values), but their callers all do the same:
allocate a buffer, fill it, send it, and decode it on the other side.

Idea: one small interface for all formats. `nbytes` is an upper bound for `encode`, so that a
transport can allocate once; `encode` returns the number of bytes written; `decode` and `add` get
exactly those bytes and check them: bytes from a network are validated before use as a count, an
index or a scale. Formats have no state. `feedback.ErrorFeedback`, which belongs to the tensor,
keeps the error of a lossy format.

Bytes are in the machine's native order and every part starts at a multiple of 4 bytes, so that
reading needs no copy. Numbers that are not finite are never hidden: a check for NaN at the receiver
finds them.
"""

from __future__ import annotations

from typing import Protocol

import torch

from braid.errors import CommError, ConfigError

__all__ = ["CHUNK", "WireFormat", "check_length", "chunks", "numbers", "room", "same_device"]

CHUNK = 1 << 16  # numbers per pass: temporaries of 256 KiB stay in a core's cache
ALIGNMENT = 4  # bytes; torch views bytes as numbers only at aligned addresses


class WireFormat(Protocol):
    """Encoding of a flat float32 tensor as bytes; implementations are stateless."""

    @property
    def name(self) -> str:
        """Name from which `by_name` makes an equal format."""

    @property
    def lossy(self) -> bool:
        """Whether decoded numbers may differ from the encoded ones."""

    def nbytes(self, numel: int) -> int:
        """Return an upper bound on the bytes that `encode` writes for `numel` numbers."""

    def encode(self, x: torch.Tensor, into: torch.Tensor) -> int:
        """Write `x` into the beginning of `into`.

        Args:
            x: float32, flat and contiguous; any number of elements.
            into: uint8, flat and contiguous, at least `nbytes(x.numel())` long, beginning at a
                multiple of 4 bytes.

        Returns:
            Number of bytes written; pass `into[:written]` to `decode`.

        Raises:
            ConfigError: A tensor does not fit this description.
        """

    def decode(self, buffer: torch.Tensor, out: torch.Tensor) -> None:
        """Write the numbers in `buffer` into `out`.

        Args:
            buffer: uint8, exactly the bytes that `encode` wrote.
            out: float32, flat and contiguous, with the number of encoded elements.

        Raises:
            ConfigError: A tensor does not fit this description.
            CommError: The bytes are not valid for this number of elements; `out` is unchanged.
        """

    def add(self, buffer: torch.Tensor, out: torch.Tensor) -> None:
        """Add the numbers in `buffer` to `out`, with small temporaries."""


def numbers(x: torch.Tensor, name: str) -> torch.Tensor:
    """Return `x` detached, after checking that it is flat, contiguous float32.

    Args:
        x: Numbers to encode, or the tensor for decoded numbers.
        name: Name of the argument, for the message.

    Raises:
        ConfigError: `x` has another shape, layout or dtype.
    """
    if x.dtype != torch.float32 or x.dim() != 1 or not x.is_contiguous():
        msg = (
            f"{name} must be a flat contiguous tensor of torch.float32, not {_described(x)}: "
            "pass x.float().contiguous().view(-1)"
        )
        raise ConfigError(msg)
    return x.detach()


def room(buffer: torch.Tensor, name: str, nbytes: int = 0) -> torch.Tensor:
    """Return `buffer` after checking that it is flat bytes, at least `nbytes` long.

    Args:
        buffer: uint8 tensor.
        name: Name of the argument, for the message.
        nbytes: Least length.

    Raises:
        ConfigError: `buffer` has another dtype or shape, or is shorter.
    """
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        msg = (
            f"{name} must be a flat contiguous tensor of torch.uint8, not "
            f"{_described(buffer)}: pass x.view(torch.uint8), or a slice of bytes"
        )
        raise ConfigError(msg)
    if buffer.storage_offset() % ALIGNMENT or buffer.data_ptr() % ALIGNMENT:
        msg = (
            f"{name} begins at address {buffer.data_ptr():#x}, offset {buffer.storage_offset()}: "
            f"make both multiples of {ALIGNMENT} bytes"
        )
        raise ConfigError(msg)
    if buffer.numel() < nbytes:
        msg = (
            f"{name} has {buffer.numel()} bytes but needs {nbytes}: allocate "
            "format.nbytes(numel) bytes"
        )
        raise ConfigError(msg)
    return buffer


def same_device(x: torch.Tensor, buffer: torch.Tensor) -> None:
    """Raise if numbers and bytes are on different devices."""
    if x.device != buffer.device:
        msg = (
            f"the numbers are on {x.device}, but the bytes are on {buffer.device}: encode on the "
            "device of the numbers, then move the bytes"
        )
        raise ConfigError(msg)


def chunks(flat: torch.Tensor) -> list[torch.Tensor]:
    """Return views of `flat` with `CHUNK` numbers each, the last one shorter."""
    return [flat[start : start + CHUNK] for start in range(0, flat.numel(), CHUNK)]


def check_length(form: str, nbytes: int, expected: int, numel: int) -> None:
    """Raise if a message has `nbytes` bytes, but `numel` numbers need `expected`.

    `form` is the name of the format, for the error message.

    Raises:
        CommError: The two differ.
    """
    if nbytes != expected:
        msg = (
            f"{numel} numbers in {form} have {expected} bytes, but {nbytes} were sent: use the "
            "same format and shape on both ranks"
        )
        raise CommError(msg)


def _described(x: torch.Tensor) -> str:
    strides = "" if x.is_contiguous() else f" and strides {x.stride()}"
    return f"{x.dtype} of shape {tuple(x.shape)}{strides}"
