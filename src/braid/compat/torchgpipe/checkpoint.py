"""`torchgpipe.checkpoint`: whether a forward will be recomputed, or is a recomputation."""

from braid.parallel.pipeline.recomputing import is_checkpointing, is_recomputing

__all__ = ["is_checkpointing", "is_recomputing"]
