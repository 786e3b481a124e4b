"""Options of Megatron's DistributedDataParallel."""

from __future__ import annotations

from dataclasses import dataclass

from braid.compat.megatron.failure import UnsupportedError
from braid.compat.megatron.model_parallel_config import check_served

__all__ = ["DistributedDataParallelConfig"]

REFUSED = {  # option -> advice
    "use_megatron_fsdp": "use braid.FullyShardedDataParallel",
    "use_custom_fsdp": "use braid.FullyShardedDataParallel",
    "fp8_param_gather": "leave it False: there are no fp8 parameters",
    "reuse_grad_buf_for_mxfp8_param_ag": "leave it False: there are no fp8 parameters",
    "reduce_scatter_with_fp32_accumulation": "set grad_reduce_in_fp32=True",
    "nccl_ub": "leave it False: braid has no buffers of NCCL",
    "delay_wgrad_compute": "leave it False, or use braid.Pipeline with schedule='zbv'",
}


@dataclass
class DistributedDataParallelConfig:
    """Options of data parallel gradients, with Megatron's names and defaults.

    Parameters are gathered in `optimizer.step`, so `overlap_param_gather` and `align_param_gather`
    have no effect. Options of FSDP, NCCL and fp8 have no effect or are refused.

    Attributes:
        grad_reduce_in_fp32: Whether gradients of any dtype are accumulated and reduced in float32.
        overlap_grad_reduce: Whether buckets are reduced during backward.
        use_distributed_optimizer: Whether each rank gets the reduced gradients of its shard only.
        check_for_nan_in_grad: Whether to raise an error if a local gradient is not finite.
        bucket_size: Number of elements of a bucket with `overlap_grad_reduce`; by default 40
            million, or 1 million per rank if that is more.
        average_in_collective: Whether to divide by the number of ranks after the sum, not before.

    Raises:
        UnsupportedError: An option is set that is not supported.
    """

    grad_reduce_in_fp32: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    align_param_gather: bool = False
    use_distributed_optimizer: bool = False
    num_distributed_optimizer_instances: int = 1
    check_for_nan_in_grad: bool = False
    check_for_large_grads: bool = False
    bucket_size: int | None = None
    pad_buckets_for_high_nccl_busbw: bool = False
    reduce_scatter_with_fp32_accumulation: bool = False
    average_in_collective: bool = False
    fp8_param_gather: bool = False
    reuse_grad_buf_for_mxfp8_param_ag: bool = False
    use_megatron_fsdp: bool = False
    use_custom_fsdp: bool = False
    data_parallel_sharding_strategy: str = "no_shard"
    gradient_reduce_div_fusion: bool = True
    suggested_communication_unit_size: int | None = None
    preserve_fp32_weights: bool = True
    keep_fp8_transpose_cache: bool = False
    nccl_ub: bool = False
    fsdp_double_buffer: bool = False
    outer_dp_sharding_strategy: str = "no_shard"
    disable_symmetric_registration: bool = False
    fsdp_manual_registration: bool = False
    delay_wgrad_compute: bool = False

    def __post_init__(self) -> None:
        check_served(self, REFUSED)
        for name in ("data_parallel_sharding_strategy", "outer_dp_sharding_strategy"):
            if getattr(self, name) != "no_shard":
                msg = (
                    f"{name}={getattr(self, name)!r} is not supported: leave it 'no_shard', or use "
                    "braid.FullyShardedDataParallel"
                )
                raise UnsupportedError(msg)
        if self.num_distributed_optimizer_instances != 1:
            msg = (
                f"num_distributed_optimizer_instances={self.num_distributed_optimizer_instances} "
                "is not supported: leave it 1, so that all data parallel ranks share one optimizer"
            )
            raise UnsupportedError(msg)
