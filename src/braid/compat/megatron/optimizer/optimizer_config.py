"""Options of Megatron's optimizers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from braid.compat.megatron.failure import UnsupportedError
from braid.compat.megatron.model_parallel_config import check_served

__all__ = ["OptimizerConfig"]

REFUSED = {  # option -> advice
    "fp16": "set bf16=True: there is no loss scale for float16",
    "fp8_recipe": "leave it None: there are no fp8 parameters",
    "reuse_grad_buf_for_mxfp8_param_ag": "leave it False: there are no fp8 parameters",
    "use_precision_aware_optimizer": "leave it False: states have the dtype of main parameters",
    "optimizer_cpu_offload": "leave it False, or use braid.FullyShardedDataParallel with offload",
    "loss_scale": "leave it None: there is no loss scale for float16",
}


@dataclass
class OptimizerConfig:
    """Options of an optimizer, with Megatron's names and defaults.

    Options of loss scales, Muon, fp8 and offloading have no effect or are refused. As in Megatron,
    some options are entries of parameter groups, which only the program's scheduler uses.

    Attributes:
        optimizer: adam or sgd.
        lr: Learning rate.
        min_lr: Entry `min_lr` for schedulers.
        decoupled_lr: Entry `max_lr` for schedulers, in the group of parameters with
            `is_embedding_or_output_parameter`.
        weight_decay: Weight decay of all parameters; schedulers multiply it by the entry `wd_mult`,
            which is 0 for biases and parameters with one dim.
        clip_grad: Largest norm of all gradients; 0 for no limit.
        use_distributed_optimizer: Whether each data parallel rank updates a shard (ZeRO stage 1).
        log_num_zeros_in_grad: Whether `step` counts the zeros in all gradients.

    Raises:
        UnsupportedError: An option is set that is not supported.
    """

    lr: float | None = None
    min_lr: float | None = None
    decoupled_lr: float | None = None
    decoupled_min_lr: float | None = None
    weight_decay: float = 0.01
    apply_wd_to_qk_layernorm: bool = False
    fp8_recipe: str | None = None
    fp16: bool = False
    bf16: bool = False
    reuse_grad_buf_for_mxfp8_param_ag: bool = False
    params_dtype: torch.dtype = torch.float32
    use_precision_aware_optimizer: bool = False
    store_param_remainders: bool = True
    main_grads_dtype: torch.dtype = torch.float32
    main_params_dtype: torch.dtype = torch.float32
    exp_avg_dtype: torch.dtype = torch.float32
    exp_avg_sq_dtype: torch.dtype = torch.float32
    optimizer: str = "adam"
    loss_scale: float | None = None
    initial_loss_scale: float = 2**32
    min_loss_scale: float = 1.0
    loss_scale_window: float = 1000
    hysteresis: int = 2
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    decoupled_weight_decay: bool = True
    sgd_momentum: float = 0.9
    use_distributed_optimizer: bool = False
    overlap_param_gather: bool = False
    overlap_param_gather_with_optimizer_step: bool = False
    optimizer_cpu_offload: bool = False
    optimizer_offload_fraction: float = 0.0
    use_torch_optimizer_for_cpu_offload: bool = False
    overlap_cpu_optimizer_d2h_h2d: bool = False
    pin_cpu_grads: bool = True
    pin_cpu_params: bool = True
    clip_grad: float = 1.0
    log_num_zeros_in_grad: bool = False
    barrier_with_L1_time: bool = False  # noqa: N815 - the original's name
    timers: Callable[..., Any] | None = None
    config_logger_dir: str = ""

    def __post_init__(self) -> None:
        check_served(self, REFUSED)
        if self.optimizer not in {"adam", "sgd"}:
            msg = f"{self.optimizer} optimizer is not supported: set optimizer to 'adam' or 'sgd'"
            raise UnsupportedError(msg)
