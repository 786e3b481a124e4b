"""Pipelines: a model split into stages that process micro-batches by a program."""

from __future__ import annotations

from braid.parallel.pipeline.balance import Balance, balance_by_size, balance_by_time
from braid.parallel.pipeline.block_partition import block_partition
from braid.parallel.pipeline.deferred_batch_norm import DeferredBatchNorm
from braid.parallel.pipeline.device_pipeline import DevicePipeline
from braid.parallel.pipeline.executor import Executor
from braid.parallel.pipeline.microbatches import scatter, sizes_of
from braid.parallel.pipeline.pipeline import Pipeline
from braid.parallel.pipeline.stage import Layer, Stage

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
