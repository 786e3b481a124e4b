"""`megatron.core.pipeline_parallel`: schedules of pipelines, and messages between stages."""

from braid.compat.megatron.pipeline_parallel.p2p_communication import P2PCommunicator
from braid.compat.megatron.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
    get_forward_backward_func,
    get_tensor_shapes,
)

__all__ = [
    "P2PCommunicator",
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
    "get_forward_backward_func",
    "get_tensor_shapes",
]
