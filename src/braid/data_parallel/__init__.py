"""Data parallel training: every rank holds the model, each works on its share of the batch."""

from braid.data_parallel.ddp import DistributedDataParallel
from braid.data_parallel.finite import NonFinite, NonFiniteError
from braid.data_parallel.join import Join, Joinable, JoinHook
from braid.data_parallel.mixed_precision import MixedPrecision
from braid.data_parallel.reference import accumulate

__all__ = [
    "DistributedDataParallel",
    "Join",
    "JoinHook",
    "Joinable",
    "MixedPrecision",
    "NonFinite",
    "NonFiniteError",
    "accumulate",
]
