"""Combination of several parallel engines on one mesh; see README.md."""

from __future__ import annotations

from braid.parallel.hybrid.hybrid import HybridParallel

__all__ = ["HybridParallel"]
