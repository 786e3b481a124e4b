"""Parameters, gradients and optimizer states divided over ranks: ZeRO and FSDP as layouts."""

from braid.sharding.engine import Sharding
from braid.sharding.layouts import Bytes, Layouts, layouts_of
from braid.sharding.optimizer import attach, needs_whole
from braid.sharding.options import ShardingOptions
from braid.sharding.state import ShardedSnapshot, restore_sharded, sharded_numbers

__all__ = [
    "Bytes",
    "Layouts",
    "ShardedSnapshot",
    "Sharding",
    "ShardingOptions",
    "attach",
    "layouts_of",
    "needs_whole",
    "restore_sharded",
    "sharded_numbers",
]
