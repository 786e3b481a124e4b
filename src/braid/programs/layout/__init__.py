"""Arrangements of ranks along named axes, and of tensors over them, as data."""

from __future__ import annotations

from braid.programs.layout.grid import Grid
from braid.programs.layout.layout import Box, Layout
from braid.programs.layout.mesh import Mesh
from braid.programs.layout.placement import place
from braid.programs.layout.traffic import Traffic, usual_traffic

__all__ = ["Box", "Grid", "Layout", "Mesh", "Traffic", "place", "usual_traffic"]
