"""`megatron.core.distributed`: data parallel gradients in flat buffers."""

from braid.compat.megatron.distributed.distributed_data_parallel import DistributedDataParallel
from braid.compat.megatron.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig,
)
from braid.compat.megatron.distributed.finalize_model_grads import finalize_model_grads

__all__ = ["DistributedDataParallel", "DistributedDataParallelConfig", "finalize_model_grads"]
