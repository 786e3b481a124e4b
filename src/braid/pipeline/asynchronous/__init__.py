"""Asynchronous pipelines: PipeDream's runtime, and the same training in one process."""

from __future__ import annotations

from braid.pipeline.asynchronous.emulation import Emulation
from braid.pipeline.asynchronous.runtime import AsynchronousPipeline
from braid.pipeline.asynchronous.stale_lr import stale_lr_scale

__all__ = ["AsynchronousPipeline", "Emulation", "stale_lr_scale"]
