"""`megatron.core.ModelParallelConfig`: sizes of parallelism, dtypes and options of layers.

It has all fields of Megatron's class, so that programs can set them. Fields for speed on GPUs have
no effect; options that need an NVIDIA library are refused by name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from braid.compat.megatron.failure import UnsupportedError, UsageError
from braid.errors import raise_all

__all__ = ["ModelParallelConfig", "check_served"]

REFUSED = {  # option -> advice
    "gradient_accumulation_fusion": "leave it False: gradients are accumulated by autograd",
    "defer_embedding_wgrad_compute": "leave it False, or use braid.Pipeline with schedule='zbv'",
    "delay_wgrad_compute": "leave it False, or use braid.Pipeline with schedule='zbv'",
    "use_te_rng_tracker": "leave it False: Transformer Engine is not used",
    "tp_comm_overlap": "leave it False: the overlap of input gradients is always on",
    "overlap_moe_expert_parallel_comm": "leave it False",
    "cpu_offloading": "leave it False, and recompute with tensor_parallel.checkpoint",
    "use_ring_exchange_p2p": "leave it False: braid has no ring exchange",
    "mtp_standalone": "leave it False: there is no multi-token prediction",
}


@dataclass
class ModelParallelConfig:
    """Options of parallel layers, with Megatron's names and defaults.

    Raises:
        UsageError: Options contradict each other; the message has all problems.
        UnsupportedError: An option is set that braid does not support.
    """

    # sizes
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_comm_backend: str | None = None
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    sequence_parallel: bool = False
    context_parallel_size: int = 1
    hierarchical_context_parallel_sizes: list[int] | None = None
    max_seqlen_per_dp_cp_rank: int | None = None
    hybrid_context_parallel: bool = False
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    moe_extended_tp: bool = False
    # parameters
    perform_initialization: bool = True
    use_cpu_initialization: bool = False
    fp16: bool = False
    bf16: bool = False
    params_dtype: torch.dtype = torch.float32
    # functions of a training loop
    timers: Callable[..., Any] | None = None
    finalize_model_grads_func: Callable[..., Any] | None = None
    grad_scale_func: Callable[..., Any] | None = None
    no_sync_func: Callable[..., Any] | None = None
    grad_sync_func: Callable[..., Any] | None = None
    param_sync_func: Callable[..., Any] | None = None
    deterministic_mode: bool = False
    enable_autocast: bool = False
    autocast_dtype: torch.dtype | None = None
    num_microbatches_with_partial_activation_checkpoints: int | None = None
    # speed on GPUs
    gradient_accumulation_fusion: bool = False
    async_tensor_model_parallel_allreduce: bool = True
    use_te_rng_tracker: bool = False
    tp_comm_overlap: bool = False
    tp_comm_bulk_wgrad: bool = True
    tp_comm_bulk_dgrad: bool = True
    tp_comm_overlap_ag: bool = True
    tp_comm_overlap_rs: bool = True
    tp_comm_overlap_rs_dgrad: bool = False
    tp_comm_split_ag: bool = True
    tp_comm_atomic_ag: bool = False
    tp_comm_split_rs: bool = True
    tp_comm_atomic_rs: bool = False
    cross_entropy_loss_fusion: bool = False
    cross_entropy_fusion_impl: str = "native"
    tp_comm_overlap_disable_qkv: bool = False
    tp_comm_overlap_disable_fc1: bool = False
    tp_comm_bootstrap_backend: str = "nccl"
    overlap_moe_expert_parallel_comm: bool = False
    delay_wgrad_compute: bool = False
    ep_overlap_early_attn_memory_release: bool = False
    # pipelines
    pipeline_dtype: torch.dtype | None = None
    variable_seq_lengths: bool = False
    overlap_p2p_comm: bool = False
    batch_p2p_comm: bool = True
    batch_p2p_sync: bool = True
    use_ring_exchange_p2p: bool = False
    deallocate_pipeline_outputs: bool = False
    defer_embedding_wgrad_compute: bool = False
    wgrad_deferral_limit: int = 0
    overlap_p2p_comm_warmup_flush: bool = False
    microbatch_group_size_per_vp_stage: int | None = None
    mtp_standalone: bool = False
    # memory and timing
    cpu_offloading: bool = False
    cpu_offloading_num_layers: int = 0
    _cpu_offloading_context: AbstractContextManager[Any] | None = None
    cpu_offloading_activations: bool = True
    cpu_offloading_weights: bool = False
    cpu_offloading_double_buffering: bool = False
    barrier_with_L1_time: bool = True  # noqa: N815 - the original's name

    def __post_init__(self) -> None:
        check_served(self)
        problems = []
        if self.sequence_parallel and self.tensor_model_parallel_size <= 1:
            problems.append(
                "sequence_parallel=True needs a tensor_model_parallel_size of at least 2, got "
                f"{self.tensor_model_parallel_size}"
            )
        if self.pipeline_model_parallel_size > 1 and self.pipeline_dtype is None:
            problems.append(
                f"pipeline_model_parallel_size={self.pipeline_model_parallel_size} needs a "
                "pipeline_dtype, such as torch.float32"
            )
        if self.overlap_p2p_comm_warmup_flush and not (
            self.overlap_p2p_comm and not self.batch_p2p_comm
        ):
            problems.append(
                "overlap_p2p_comm_warmup_flush=True needs overlap_p2p_comm=True and "
                "batch_p2p_comm=False: set both"
            )
        raise_all(problems, UsageError)
        if self.expert_tensor_parallel_size is None:
            self.expert_tensor_parallel_size = self.tensor_model_parallel_size
        if self.autocast_dtype is None:
            self.autocast_dtype = self.params_dtype
        if self.microbatch_group_size_per_vp_stage is None:
            self.microbatch_group_size_per_vp_stage = self.pipeline_model_parallel_size
        divided = self.expert_model_parallel_size > 1 and self.tensor_model_parallel_size > 1
        if divided and not self.sequence_parallel:
            msg = "training with expert and tensor parallelism needs sequence_parallel=True: set it"
            warnings.warn(msg, stacklevel=3)


def check_served(config: Any, refused: Mapping[str, str] = REFUSED) -> None:
    """Raise UnsupportedError if unsupported options are set; all are named.

    Args:
        config: Object with the options.
        refused: Advice for each unsupported option.
    """
    set_options = [
        f"{name}={value!r}: {instead}"
        for name, instead in refused.items()
        if (value := getattr(config, name, False))
    ]
    if set_options:
        msg = f"this configuration is not supported: {'; '.join(set_options)}"
        raise UnsupportedError(msg)
