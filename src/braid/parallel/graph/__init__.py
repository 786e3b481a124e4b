"""Models that are no row of layers: captured at module boundaries, and cut into stages."""

from __future__ import annotations

from braid.parallel.graph.captured import ByMode, CapturedGraph, Modes, Node, Scaled
from braid.parallel.graph.eager_capture import capture
from braid.parallel.graph.parts import part_of
from braid.parallel.graph.segment import Segment, segments, share_modules

__all__ = [
    "ByMode",
    "CapturedGraph",
    "Modes",
    "Node",
    "Scaled",
    "Segment",
    "capture",
    "part_of",
    "segments",
    "share_modules",
]
