"""Capture of models at module boundaries, and their split into stages of a pipeline."""

from __future__ import annotations

from braid.parallel.graph.captured import ByMode, CapturedGraph, GraphNode, Modes, Scaled
from braid.parallel.graph.device_scopes import device_scope
from braid.parallel.graph.eager_capture import capture
from braid.parallel.graph.parts import part_of
from braid.parallel.graph.segment import (
    GraphNodes,
    GraphSegment,
    last_uses,
    segments,
    share_modules,
)
from braid.parallel.graph.variables import Situation

__all__ = [
    "ByMode",
    "CapturedGraph",
    "GraphNode",
    "GraphNodes",
    "GraphSegment",
    "Modes",
    "Scaled",
    "Situation",
    "capture",
    "device_scope",
    "last_uses",
    "part_of",
    "segments",
    "share_modules",
]
