"""Asynchronous pipelines: PipeDream's runtime, and the same training in one process."""

from __future__ import annotations

from braid.parallel.pipeline.asynchronous.emulation import Emulation
from braid.parallel.pipeline.asynchronous.runtime import AsynchronousPipeline
from braid.parallel.pipeline.asynchronous.stale_lr import stale_lr_scale

__all__ = ["AsynchronousPipeline", "Emulation", "stale_lr_scale"]
