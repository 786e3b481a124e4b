"""Numbers cast to another float type: float32 unchanged, bf16 and float16 in half the bytes.

bf16 keeps the range of float32 (8 bits of exponent) with 8 significant bits: the safe choice for
gradients. float16 keeps 11 significant bits, but only for numbers from 6.1e-5 to 65,504. Smaller
numbers lose precision; from 65,520 on, it sends infinity, which a loss scaler detects. NaN stays
NaN, infinity stays infinity, zero keeps its sign.

    | format  | bytes | error of a number x that is in range                         |
    |---------|-------|--------------------------------------------------------------|
    | float32 | 4     | none, bit by bit                                             |
    | bf16    | 2     | 2^-8 |x| + 2^-134     (half the distance to the next number) |
    | float16 | 2     | 2^-11 |x| + 2^-25                                            |

Source: IEEE 754-2019, section 3.6 (binary16) and 4.3.1 (round to nearest, ties to even); Kalamkar
et al., "A Study of BFLOAT16 for Deep Learning Training" (2019).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from braid.comm.formats.wire_format import check_length, numbers, room, same_device

__all__ = ["BF16", "FLOAT16", "FLOAT32"]


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """A cast to `dtype`, rounded to nearest, ties to even.

    Attributes:
        name: Name of the format, for `by_name`.
        dtype: Dtype of the numbers on the wire.

    Cost:
        `dtype.itemsize` bytes per number; one pass over the numbers in each direction.
    """

    name: str
    dtype: torch.dtype

    @property
    def lossy(self) -> bool:
        """Whether `dtype` has less precision than float32."""
        return self.dtype != torch.float32

    def nbytes(self, numel: int) -> int:
        """Return the number of bytes that `encode` writes for `numel` numbers."""
        return numel * self.dtype.itemsize

    def encode(self, x: torch.Tensor, into: torch.Tensor) -> int:
        """Write `x` into the beginning of `into`; see `WireFormat.encode`."""
        x = numbers(x, "x")
        nbytes = self.nbytes(x.numel())
        into = room(into, "into", nbytes)
        same_device(x, into)
        into[:nbytes].view(self.dtype).copy_(x)
        return nbytes

    def decode(self, buffer: torch.Tensor, out: torch.Tensor) -> None:
        """Write the numbers in `buffer` into `out`; see `WireFormat.decode`."""
        out = numbers(out, "out")
        out.copy_(self._read(buffer, out))

    def add(self, buffer: torch.Tensor, out: torch.Tensor) -> None:
        """Add the numbers in `buffer` to `out`; see `WireFormat.add`."""
        out = numbers(out, "out")
        out.add_(self._read(buffer, out))

    def _read(self, buffer: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        buffer = room(buffer, "buffer")
        same_device(out, buffer)
        check_length(self.name, buffer.numel(), self.nbytes(out.numel()), out.numel())
        return buffer.view(self.dtype)


FLOAT32 = FloatFormat("float32", torch.float32)
BF16 = FloatFormat("bf16", torch.bfloat16)
FLOAT16 = FloatFormat("float16", torch.float16)
