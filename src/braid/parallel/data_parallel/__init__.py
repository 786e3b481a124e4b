"""Data parallel training: every rank holds the model, each works on its share of the batch."""

from braid.parallel.data_parallel.clipping import clip_grad_norm_, grad_norm
from braid.parallel.data_parallel.ddp.averaging_optimizer import AveragingOptimizer
from braid.parallel.data_parallel.ddp.distributed_data_parallel import DistributedDataParallel
from braid.parallel.data_parallel.ddp.join import Join, Joinable, JoinHook
from braid.parallel.data_parallel.ddp.mixed_precision import MixedPrecision
from braid.parallel.data_parallel.ddp.reference import accumulate
from braid.parallel.data_parallel.finite import NonFinite, NonFiniteError
from braid.parallel.data_parallel.hooks.adasum import adasum, adasum_hook
from braid.parallel.data_parallel.hooks.catalogue import CastHook, bf16_hook, fp16_hook
from braid.parallel.data_parallel.hooks.powersgd import PowerSGDHook, PowerSGDOptions
from braid.parallel.data_parallel.layerwise import LAMB, LARS
from braid.parallel.data_parallel.local_sgd.averaging import (
    HierarchicalModelAverager,
    PeriodicModelAverager,
)
from braid.parallel.data_parallel.local_sgd.diloco import DiLoCo
from braid.parallel.data_parallel.local_sgd.post_local import (
    PostLocalSGDHook,
    PostLocalSGDOptimizer,
)
from braid.parallel.data_parallel.replicas.data_parallel import DataParallel, data_parallel
from braid.parallel.data_parallel.replicas.gather import gather
from braid.parallel.data_parallel.replicas.parallel_apply import parallel_apply
from braid.parallel.data_parallel.replicas.replicate import replicate
from braid.parallel.data_parallel.replicas.scatter import scatter
from braid.parallel.data_parallel.sync_batch_norm import SyncBatchNorm

__all__ = [
    "LAMB",
    "LARS",
    "AveragingOptimizer",
    "CastHook",
    "DataParallel",
    "DiLoCo",
    "DistributedDataParallel",
    "HierarchicalModelAverager",
    "Join",
    "JoinHook",
    "Joinable",
    "MixedPrecision",
    "NonFinite",
    "NonFiniteError",
    "PeriodicModelAverager",
    "PostLocalSGDHook",
    "PostLocalSGDOptimizer",
    "PowerSGDHook",
    "PowerSGDOptions",
    "SyncBatchNorm",
    "accumulate",
    "adasum",
    "adasum_hook",
    "bf16_hook",
    "clip_grad_norm_",
    "data_parallel",
    "fp16_hook",
    "gather",
    "grad_norm",
    "parallel_apply",
    "replicate",
    "scatter",
]
