"""`torch.distributed.pipeline.sync.checkpoint`: whether a forward is or will be recomputed."""

from braid.parallel.pipeline.recomputing import is_checkpointing, is_recomputing

__all__ = ["is_checkpointing", "is_recomputing"]
