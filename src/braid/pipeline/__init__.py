"""Pipelines: a model cut into stages, which work on micro-batches as a program says."""

from __future__ import annotations

from braid.pipeline.executor import Executor
from braid.pipeline.microbatches import scatter
from braid.pipeline.pipeline import Pipeline
from braid.pipeline.stage import Layer, Stage

__all__ = ["Executor", "Layer", "Pipeline", "Stage", "scatter"]
