"""Data parallel training: every rank holds the model, each works on its share of the batch."""

from braid.data_parallel.ddp import DistributedDataParallel
from braid.data_parallel.reference import accumulate

__all__ = ["DistributedDataParallel", "accumulate"]
