"""Arrangements of ranks along named axes, and of tensors over them, as data."""

from __future__ import annotations

from braid.layout.grid import Grid
from braid.layout.layout import Box, Layout
from braid.layout.mesh import Mesh

__all__ = ["Box", "Grid", "Layout", "Mesh"]
