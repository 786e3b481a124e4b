"""Parameters, gradients and optimizer states divided over ranks: ZeRO and FSDP as layouts."""

from braid.sharding.engine import Sharding, sharding_of
from braid.sharding.fsdp import FullyShardedDataParallel
from braid.sharding.fully_shard import FSDPModule, fully_shard, register_fsdp_forward_method
from braid.sharding.grad_scaler import ShardedGradScaler
from braid.sharding.layouts import Bytes, Layouts, layouts_of
from braid.sharding.memory import LiveBytes, live_bytes, memory_of
from braid.sharding.optimizer import attach, has_pieces, needs_whole, shard_optimizer
from braid.sharding.options import ShardingOptions
from braid.sharding.policies import (
    CPUOffloadPolicy,
    DiskOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from braid.sharding.state import ShardedSnapshot, restore_sharded, sharded_numbers

__all__ = [
    "Bytes",
    "CPUOffloadPolicy",
    "DiskOffloadPolicy",
    "FSDPModule",
    "FullyShardedDataParallel",
    "Layouts",
    "LiveBytes",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardedGradScaler",
    "ShardedSnapshot",
    "Sharding",
    "ShardingOptions",
    "attach",
    "fully_shard",
    "has_pieces",
    "layouts_of",
    "live_bytes",
    "memory_of",
    "needs_whole",
    "register_fsdp_forward_method",
    "restore_sharded",
    "shard_optimizer",
    "sharded_numbers",
    "sharding_of",
]
