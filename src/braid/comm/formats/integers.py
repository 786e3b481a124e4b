"""int8 with a scale per block: a quarter of the bytes, and an outlier affects only 256 numbers.

Problem: one scale for a whole tensor must cover its largest number. If that is 100 times the
typical number, typical numbers are rounded to 1 or 0.

Idea: blocks of 256 numbers, each with a scale for its largest magnitude.

    wire    | scales: float32 x ceil(n / 256) | numbers: int8 x n |
            scale = max |x| of the block / 127,  number = round(x / scale) in -127..127,  x ~ number
            * scale

The error of a number is at most half its block's scale: max |x| / 254. Stochastic rounding, which
rounds up with the probability of the remainder, has up to twice this error but no bias: sums over
many ranks or steps do not drift. A block with an infinite or NaN number is sent with an infinite
scale, and all of its numbers arrive as NaN.

Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022), section 2.1; we use
equal steps instead of dynamic ones. Stochastic rounding: Alistarh et al., "QSGD" (2017), section 3.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from braid.comm.formats.wire_format import check_length, chunks, numbers, room, same_device
from braid.errors import CommError, ConfigError

__all__ = ["Int8"]

BLOCK = 256  # numbers per scale: 1.6 % of the bytes are scales; divides CHUNK
LARGEST = 127  # -128 is never sent, so that x and -x are symmetric
SCALE_BYTES = 4
MAX_SCALE = 2.679388e36  # largest float32 / 127, rounded down: 127 times this is finite


@dataclass(frozen=True, kw_only=True, slots=True)
class Int8:
    """Symmetric 8-bit integers, one float32 scale per block of 256.

    With m the largest magnitude of a number's block, its error is at most `m / 254` (`m / 127` if
    stochastic), plus the rounding of float32: 2^-21 m, and 2^-142 if the scale is subnormal.

    Attributes:
        stochastic: Whether to round up with the probability of the remainder, instead of to
            nearest, ties to even.
        generator: Source of random numbers for stochastic rounding, on the device of the tensors.

    Cost:
        1.016 bytes per number; three passes over the numbers to encode, one to decode.

    Raises:
        ConfigError: `stochastic` without a generator.
    """

    stochastic: bool = False
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if self.stochastic and self.generator is None:
            msg = (
                "stochastic rounding needs a torch.Generator: pass "
                "generator=torch.Generator().manual_seed(seed)"
            )
            raise ConfigError(msg)

    @property
    def name(self) -> str:
        """Name of the format, for `by_name`."""
        return "int8:stochastic" if self.stochastic else "int8"

    @property
    def lossy(self) -> bool:
        """True: decoded numbers may differ from the encoded ones."""
        return True

    def nbytes(self, numel: int) -> int:
        """Return the number of bytes that `encode` writes for `numel` numbers."""
        return SCALE_BYTES * _num_blocks(numel) + numel

    def encode(self, x: torch.Tensor, into: torch.Tensor) -> int:
        """Write `x` into the beginning of `into`; see `WireFormat.encode`."""
        x = numbers(x, "x")
        nbytes = self.nbytes(x.numel())
        into = room(into, "into", nbytes)
        same_device(x, into)
        generator = self.generator if self.stochastic else None
        if generator is not None and generator.device.type != x.device.type:
            msg = (
                f"the generator is on {generator.device} and the numbers are on {x.device}: "
                "make the generator on the same device"
            )
            raise ConfigError(msg)
        scales, codes = _parts(into[:nbytes], x.numel())
        for rows, of_rows, scale in _blocks(x, codes, scales):
            _quantize(rows, of_rows, scale, generator)
        return nbytes

    def decode(self, buffer: torch.Tensor, out: torch.Tensor) -> None:
        """Write the numbers in `buffer` into `out`; see `WireFormat.decode`."""
        out = numbers(out, "out")
        scales, codes = self._read(buffer, out)
        for rows, of_rows, scale in _blocks(out, codes, scales):
            torch.mul(of_rows, scale, out=rows)

    def add(self, buffer: torch.Tensor, out: torch.Tensor) -> None:
        """Add the numbers in `buffer` to `out`; see `WireFormat.add`."""
        out = numbers(out, "out")
        scales, codes = self._read(buffer, out)
        for rows, of_rows, scale in _blocks(out, codes, scales):
            rows.add_(of_rows * scale)  # addcmul_ might round once instead of twice

    def _read(self, buffer: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        buffer = room(buffer, "buffer")
        same_device(out, buffer)
        check_length(self.name, buffer.numel(), self.nbytes(out.numel()), out.numel())
        scales, codes = _parts(buffer, out.numel())
        wrong = torch.logical_not(scales >= 0)  # also True for NaN
        if bool(wrong.any()):
            block = int(wrong.nonzero()[0])
            msg = (
                f"the scale of block {block} of {scales.numel()} in a {self.name} message is "
                f"{float(scales[block])}, not a number of at least 0: use one format on all "
                "ranks, or the message is corrupt"
            )
            raise CommError(msg)
        return scales, codes


def _num_blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _parts(buffer: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    scale_bytes = SCALE_BYTES * _num_blocks(numel)
    return buffer[:scale_bytes].view(torch.float32), buffer[scale_bytes:].view(torch.int8)


def _blocks(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return tuples of numbers, codes and scales: one block per row, one chunk per tuple."""
    rows, of_rows = _rows(x), _rows(codes)
    starts = itertools.accumulate((len(matrix) for matrix in rows), initial=0)
    columns = [
        scales[at : at + len(matrix), None] for at, matrix in zip(starts, rows, strict=False)
    ]
    return list(zip(rows, of_rows, columns, strict=True))


def _rows(flat: torch.Tensor) -> list[torch.Tensor]:
    whole = flat.numel() // BLOCK * BLOCK
    rows = [piece.view(-1, BLOCK) for piece in chunks(flat[:whole])]
    if whole < flat.numel():
        rows.append(flat[whole:].view(1, -1))
    return rows


def _quantize(
    rows: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    generator: torch.Generator | None,
) -> None:
    """Write the codes of `rows` and their `scale`; stochastic if there is a generator."""
    work = rows.abs()
    peak = work.amax(dim=1, keepdim=True)  # NaN if the row has one
    scale.copy_(torch.where(peak.isfinite(), (peak / LARGEST).clamp_(max=MAX_SCALE), torch.inf))
    torch.div(rows, scale, out=work)
    if generator is None:
        work.round_()
    else:
        work.add_(torch.rand(rows.shape, generator=generator, device=rows.device)).floor_()
    # NaN is 0 / 0 in a block of zeros, or inf / inf in a block that decodes to NaN
    codes.copy_(work.clamp_(-LARGEST, LARGEST).nan_to_num_(nan=0.0))
