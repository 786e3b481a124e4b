"""Pipelines: a model cut into stages, which work on micro-batches as a program says."""

from __future__ import annotations

from braid.pipeline.balance import Balance, balance_by_size, balance_by_time
from braid.pipeline.block_partition import block_partition
from braid.pipeline.deferred_batch_norm import DeferredBatchNorm
from braid.pipeline.device_pipeline import DevicePipeline
from braid.pipeline.executor import Executor
from braid.pipeline.microbatches import scatter, sizes_of
from braid.pipeline.pipeline import Pipeline
from braid.pipeline.stage import Layer, Stage

__all__ = [
    "Balance",
    "DeferredBatchNorm",
    "DevicePipeline",
    "Executor",
    "Layer",
    "Pipeline",
    "Stage",
    "balance_by_size",
    "balance_by_time",
    "block_partition",
    "scatter",
    "sizes_of",
]
