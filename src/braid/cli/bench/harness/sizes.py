"""Units of sizes and rates."""

from __future__ import annotations

__all__ = ["GBIT", "KIB", "MIB"]

KIB, MIB = 1 << 10, 1 << 20
GBIT = 1e9
