"""`torchgpipe.batchnorm`: BatchNorm with running statistics of whole batches."""

from braid.parallel.pipeline.deferred_batch_norm import DeferredBatchNorm

__all__ = ["DeferredBatchNorm"]
