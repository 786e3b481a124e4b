"""Arrangements of ranks along named axes, as data."""

from __future__ import annotations

from braid.layout.grid import Grid
from braid.layout.mesh import Mesh

__all__ = ["Grid", "Mesh"]
