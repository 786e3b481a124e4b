"""`torch.distributed.pipeline.sync.batchnorm`: BatchNorm with statistics of whole batches."""

from braid.parallel.pipeline.deferred_batch_norm import DeferredBatchNorm

__all__ = ["DeferredBatchNorm"]
