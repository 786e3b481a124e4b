"""Megatron's API: `from braid.compat.megatron import parallel_state, tensor_parallel`.

Programs for `megatron.core` 0.16 run after changing the import, also on CPUs, if they use its
groups, tensor parallel layers, pipeline schedules, data parallelism and optimizer.
"""

from braid.compat.megatron import (
    distributed,
    num_microbatches_calculator,
    optimizer,
    parallel_state,
    pipeline_parallel,
    tensor_parallel,
)
from braid.compat.megatron.hyper_comm_grid import HyperCommGrid
from braid.compat.megatron.model_parallel_config import ModelParallelConfig

mpu = parallel_state  # the name under which programs know it

__all__ = [
    "HyperCommGrid",
    "ModelParallelConfig",
    "distributed",
    "mpu",
    "num_microbatches_calculator",
    "optimizer",
    "parallel_state",
    "pipeline_parallel",
    "tensor_parallel",
]

__version__ = "0.16.1"  # of the interface
