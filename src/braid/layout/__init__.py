"""Arrangements of ranks along named axes, and of tensors over them, as data."""

from __future__ import annotations

from braid.layout.grid import Grid
from braid.layout.layout import Box, Layout
from braid.layout.mesh import Mesh
from braid.layout.placement import Placement, place
from braid.layout.traffic import Traffic, usual_traffic

__all__ = ["Box", "Grid", "Layout", "Mesh", "Placement", "Traffic", "place", "usual_traffic"]
