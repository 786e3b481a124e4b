"""Data parallel training: every rank holds the model, each works on its share of the batch."""

from braid.data_parallel.applying import parallel_apply
from braid.data_parallel.clipping import clip_grad_norm_, grad_norm
from braid.data_parallel.data_parallel import DataParallel
from braid.data_parallel.ddp import DistributedDataParallel
from braid.data_parallel.finite import NonFinite, NonFiniteError
from braid.data_parallel.gathering import gather
from braid.data_parallel.join import Join, Joinable, JoinHook
from braid.data_parallel.layerwise import LAMB, LARS
from braid.data_parallel.mixed_precision import MixedPrecision
from braid.data_parallel.optimizer import DistributedOptimizer
from braid.data_parallel.reference import accumulate
from braid.data_parallel.replicas import replicate
from braid.data_parallel.scattering import scatter
from braid.data_parallel.sync_batch_norm import SyncBatchNorm

__all__ = [
    "LAMB",
    "LARS",
    "DataParallel",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "Join",
    "JoinHook",
    "Joinable",
    "MixedPrecision",
    "NonFinite",
    "NonFiniteError",
    "SyncBatchNorm",
    "accumulate",
    "clip_grad_norm_",
    "gather",
    "grad_norm",
    "parallel_apply",
    "replicate",
    "scatter",
]
