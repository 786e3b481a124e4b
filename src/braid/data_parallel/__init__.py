"""Data parallel training: every rank holds the model, each works on its share of the batch."""

from braid.data_parallel.clipping import clip_grad_norm_, grad_norm
from braid.data_parallel.ddp import DistributedDataParallel
from braid.data_parallel.finite import NonFinite, NonFiniteError
from braid.data_parallel.join import Join, Joinable, JoinHook
from braid.data_parallel.layerwise import LAMB, LARS
from braid.data_parallel.mixed_precision import MixedPrecision
from braid.data_parallel.optimizer import DistributedOptimizer
from braid.data_parallel.reference import accumulate

__all__ = [
    "LAMB",
    "LARS",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "Join",
    "JoinHook",
    "Joinable",
    "MixedPrecision",
    "NonFinite",
    "NonFiniteError",
    "accumulate",
    "clip_grad_norm_",
    "grad_norm",
]
