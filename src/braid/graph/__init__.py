"""Models that are no row of layers: captured at module boundaries, and cut into stages."""

from __future__ import annotations

from braid.graph.captured import ByMode, CapturedGraph, Modes, Node, Scaled
from braid.graph.eager_capture import capture
from braid.graph.parts import part_of
from braid.graph.segment import Segment, segments, share_modules

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
