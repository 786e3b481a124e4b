"""Parameters, gradients and optimizer states sharded over ranks: ZeRO and FSDP as layouts."""

from braid.parallel.sharding.engine import Sharding, sharding_of
from braid.parallel.sharding.fsdp import FullyShardedDataParallel
from braid.parallel.sharding.fully_shard import (
    FSDPModule,
    fully_shard,
    register_fsdp_forward_method,
)
from braid.parallel.sharding.layouts import Bytes, Layouts, layouts_of
from braid.parallel.sharding.memory import LiveBytes, live_bytes, memory_of
from braid.parallel.sharding.optimizer import (
    ShardedGradScaler,
    attach,
    has_pieces,
    needs_whole,
    shard_optimizer,
)
from braid.parallel.sharding.options import ShardingOptions
from braid.parallel.sharding.policies import (
    CPUOffloadPolicy,
    DiskOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from braid.parallel.sharding.state import ShardedSnapshot, restore_sharded, sharded_numbers

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
