"""Sizes and rates as text."""

from __future__ import annotations

__all__ = ["GBIT", "KIB", "MIB", "size_text"]

KIB, MIB = 1 << 10, 1 << 20
GBIT = 1e9


def size_text(nbytes: float) -> str:
    """Format a number of bytes, such as 64 KiB."""
    for unit, scale in (("MiB", MIB), ("KiB", KIB)):
        if nbytes >= scale:
            return f"{nbytes / scale:g} {unit}"
    return f"{nbytes:g} B"
