"""Data parallel training: every rank holds the model, each works on its share of the batch."""

from braid.data_parallel.ad_psgd import ADPSGD
from braid.data_parallel.adasum import adasum, adasum_hook
from braid.data_parallel.averaging import HierarchicalModelAverager, PeriodicModelAverager
from braid.data_parallel.ddp import DistributedDataParallel
from braid.data_parallel.decentralized import DPSGD, PushSum
from braid.data_parallel.diloco import DiLoCo
from braid.data_parallel.hooks import CastHook, bf16_hook, fp16_hook
from braid.data_parallel.mixing import Mixing
from braid.data_parallel.post_local import PostLocalSGDHook, PostLocalSGDOptimizer
from braid.data_parallel.powersgd import PowerSGDHook, PowerSGDOptions
from braid.data_parallel.reference import accumulate

__all__ = [
    "ADPSGD",
    "DPSGD",
    "CastHook",
    "DiLoCo",
    "DistributedDataParallel",
    "HierarchicalModelAverager",
    "Mixing",
    "PeriodicModelAverager",
    "PostLocalSGDHook",
    "PostLocalSGDOptimizer",
    "PowerSGDHook",
    "PowerSGDOptions",
    "PushSum",
    "accumulate",
    "adasum",
    "adasum_hook",
    "bf16_hook",
    "fp16_hook",
]
