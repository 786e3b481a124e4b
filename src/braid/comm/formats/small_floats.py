"""Floats of 16 bits with 6 bits of exponent: 1-6-9 with a sign, 0-6-10 without.

Problem: parameters and their statistics are compressed on the way between devices and servers. float16 has too little
range for them (5 bits of exponent), bf16 too few digits (8 significant bits).

Idea: between the two. 1-6-9 has 1 bit of sign, 6 of exponent, 9 of mantissa; numbers that are never negative (second
moments, counts, norms) give the sign's bit to the mantissa: 0-6-10. Both are built as IEEE 754 builds its formats:

    | format | value                                  | smallest, smallest normal | largest          | error of x          |
    |--------|----------------------------------------|---------------------------|------------------|---------------------|
    | 1-6-9  | (-1)^s 2^(e-31) (1 + m / 512), 0<e<63  | 2^-39, 2^-30              | 4,290,772,992    | 2^-10 |x| + 2^-40   |
    | 0-6-10 | 2^(e-31) (1 + m / 1024), 0<e<63        | 2^-40, 2^-30              | 4,292,870,144    | 2^-11 x + 2^-41     |
    |        | e = 0: subnormal, 2^-30 (m / 512 or 1024); e = 63: infinity (m = 0), NaN (else)                      |

Rounding is to the nearest, ties to even. Infinity and NaN are kept, and what would be rounded beyond the largest number
becomes infinity, as float16 does: a value that does not fit shall be noticed, not replaced by a plausible one.
Codes are bit patterns in int16, which torch moves everywhere, unlike uint16; their order as integers means nothing.

Source: OpenMLSys, "Machine Learning Systems: Design and Implementation", on compressing parameters on the wire; the
bias of 31 is that of DLFloat (Agrawal et al., 2019), which has no subnormal numbers and one code for infinity and NaN.
"""

from __future__ import annotations

import torch

from braid.comm.formats.wire_format import chunks
from braid.errors import ConfigError

__all__ = ["from_0_6_10", "from_1_6_9", "to_0_6_10", "to_1_6_9"]

MANTISSA_32 = 23  # bits of float32
INFINITY_32 = 0xFF << MANTISSA_32
BIAS_SHIFT = (127 - 31) << MANTISSA_32  # exponents of float32 are biased by 127, ours by 31
MIN_NORMAL = 2.0**-30
EXPONENTS = 63  # the exponent field of infinity and NaN


def to_1_6_9(x: torch.Tensor) -> torch.Tensor:
    """Bit patterns of `x` in 1-6-9.

    Args:
        x: float32, any shape.

    Returns:
        int16 of the same shape, contiguous.

    Raises:
        ConfigError: `x` has another dtype.

    Source: see the module.
    """
    return _packed(_checked(x, torch.float32, "numbers"), mantissa=9, signed=True)


def from_1_6_9(codes: torch.Tensor) -> torch.Tensor:
    """The float32 numbers, exactly, whose 1-6-9 bit patterns are `codes` (int16, any shape)."""
    return _unpacked(_checked(codes, torch.int16, "codes"), mantissa=9, signed=True)


def to_0_6_10(x: torch.Tensor) -> torch.Tensor:
    """Bit patterns of `x` in 0-6-10; -0 becomes 0, NaN loses its sign.

    Args:
        x: float32, any shape, no number below 0.

    Returns:
        int16 of the same shape, contiguous.

    Raises:
        ConfigError: `x` has another dtype, or a number below 0.

    Source: see the module.
    """
    x = _checked(x, torch.float32, "numbers")
    if x.numel() and bool((x < 0).any()):
        msg = (
            f"expected numbers of at least 0 for 0-6-10, which has no sign, found {int((x < 0).sum())} of {x.numel()} "
            f"below, the first {float(x[x < 0][0])}: use 1-6-9"
        )
        raise ConfigError(msg)
    return _packed(x, mantissa=10, signed=False)


def from_0_6_10(codes: torch.Tensor) -> torch.Tensor:
    """The float32 numbers, exactly, whose 0-6-10 bit patterns are `codes` (int16, any shape)."""
    return _unpacked(_checked(codes, torch.int16, "codes"), mantissa=10, signed=False)


def _checked(x: torch.Tensor, dtype: torch.dtype, what: str) -> torch.Tensor:
    if x.dtype != dtype:
        msg = f"expected {what} of {dtype}, found {x.dtype}: convert them first"
        raise ConfigError(msg)
    return x.detach().contiguous()


def _packed(x: torch.Tensor, *, mantissa: int, signed: bool) -> torch.Tensor:
    codes = torch.empty(x.shape, dtype=torch.int16, device=x.device)
    for piece, into in zip(chunks(x.view(-1)), chunks(codes.view(-1)), strict=True):
        magnitude = piece.abs()
        packed = torch.where(
            magnitude < MIN_NORMAL, _subnormal(magnitude, mantissa), _normal(magnitude, mantissa)
        )
        if signed:
            packed |= (piece.view(torch.int32) < 0).int() << 15
        into.copy_(packed)  # the low 16 bits
    return codes


def _subnormal(magnitude: torch.Tensor, mantissa: int) -> torch.Tensor:
    """How many smallest numbers: adding one whose last bit is worth that much makes float32 do the rounding."""
    exponent = MANTISSA_32 - 30 - mantissa
    return (magnitude + 2.0**exponent).view(torch.int32) - ((exponent + 127) << MANTISSA_32)


def _normal(magnitude: torch.Tensor, mantissa: int) -> torch.Tensor:
    """Shift exponent and mantissa into place; a carry of the rounding goes into the exponent, as it should."""
    drop = MANTISSA_32 - mantissa
    bits = magnitude.view(torch.int32)
    to_even = (bits >> drop) & 1
    half = (1 << (drop - 1)) - 1
    packed = (bits - BIAS_SHIFT + half + to_even) >> drop
    infinity = EXPONENTS << mantissa
    packed.clamp_(max=infinity)
    return packed + (bits > INFINITY_32).int() * (1 << (mantissa - 1))  # a quiet NaN


def _unpacked(codes: torch.Tensor, *, mantissa: int, signed: bool) -> torch.Tensor:
    x = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    drop = MANTISSA_32 - mantissa
    for piece, into in zip(chunks(codes.view(-1)), chunks(x.view(-1)), strict=True):
        magnitude = piece.int() & (0x7FFF if signed else 0xFFFF)
        exponent = magnitude >> mantissa
        bits = (magnitude << drop) + BIAS_SHIFT
        bits = torch.where(exponent == EXPONENTS, bits | INFINITY_32, bits)
        subnormal = magnitude.float() * (MIN_NORMAL / (1 << mantissa))
        torch.where(exponent == 0, subnormal, bits.view(torch.float32), out=into)
        if signed:
            torch.where(piece < 0, -into, into, out=into)
    return x
