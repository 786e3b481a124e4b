"""Asynchronous pipelines: PipeDream's runtime, and the same training in one process."""

from __future__ import annotations

from braid.pipeline.asynchronous.emulation import Emulation
from braid.pipeline.asynchronous.runtime import AsynchronousPipeline

__all__ = ["AsynchronousPipeline", "Emulation"]
