"""Models that are no row of layers: captured at module boundaries, and cut into stages."""

from __future__ import annotations

from braid.parallel.graph.captured import ByMode, CapturedGraph, GraphNode, Modes, Scaled
from braid.parallel.graph.eager_capture import capture
from braid.parallel.graph.parts import part_of
from braid.parallel.graph.segment import GraphSegment, segments, share_modules

__all__ = [
    "ByMode",
    "CapturedGraph",
    "GraphNode",
    "GraphSegment",
    "Modes",
    "Scaled",
    "capture",
    "part_of",
    "segments",
    "share_modules",
]
