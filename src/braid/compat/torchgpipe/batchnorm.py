"""`torchgpipe.batchnorm`: BatchNorm whose running statistics follow whole batches."""

from braid.parallel.pipeline.deferred_batch_norm import DeferredBatchNorm

__all__ = ["DeferredBatchNorm"]
