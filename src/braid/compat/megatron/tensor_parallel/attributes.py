"""Attributes of divided parameters, for Megatron's optimizers and checkpoints."""

from __future__ import annotations

from typing import Any

import torch

from braid.compat.megatron.failure import UsageError
from braid.compat.megatron.parallel_state import get_tensor_model_parallel_rank
from braid.parallel.tensor_parallel import Slicing

__all__ = [
    "copy_tensor_model_parallel_attributes",
    "param_is_not_tensor_parallel_duplicate",
    "set_defaults_if_not_set_tensor_model_parallel_attributes",
    "set_tensor_model_parallel_attributes",
]

DEFAULTS = {
    "expert_tp": False,
    "is_qkv": False,
    "tensor_model_parallel": False,
    "partition_dim": -1,
    "partition_stride": 1,
}


def param_is_not_tensor_parallel_duplicate(
    param: torch.Tensor, tp_group: Any = None, expert_tp_group: Any = None
) -> bool:
    """Return whether a parameter is sharded, or is the copy on tensor parallel rank 0.

    Args:
        param: Parameter.
        tp_group: Process group of the ranks; the tensor parallel group when None.
        expert_tp_group: Process group for parameters of experts, which have the attribute
            `allreduce` with the value False; `tp_group` when None.
    """
    if expert_tp_group is not None and not getattr(param, "allreduce", True):
        tp_group = expert_tp_group
    if getattr(param, "tensor_model_parallel", False):
        return True
    rank = get_tensor_model_parallel_rank() if tp_group is None else tp_group.rank()
    return bool(rank == 0)


def set_tensor_model_parallel_attributes(
    tensor: torch.Tensor, is_parallel: bool, dim: int, stride: int
) -> None:
    """Set Megatron's attributes that describe how a parameter is sharded.

    Args:
        tensor: Parameter.
        is_parallel: Whether each rank has a different shard.
        dim: Dim that is sharded.
        stride: Number of equal blocks along `dim`; each block is sharded separately.

    Raises:
        UsageError: The parameter has such attributes already.
    """
    if known := [name for name in DEFAULTS if hasattr(tensor, name)]:
        msg = (
            f"a parameter of shape {list(tensor.shape)} has the attributes {', '.join(known)} "
            "already: leave this call out, because the layer of the parameter sets them"
        )
        raise UsageError(msg)
    values = {
        "tensor_model_parallel": is_parallel,
        "partition_dim": dim,
        "partition_stride": stride,
    }
    for name, value in values.items():
        setattr(tensor, name, value)
    if is_parallel:
        tensor.__dict__["braid_slicing"] = Slicing(dim, stride)


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: torch.Tensor) -> None:
    """Set Megatron's attributes of a parameter that is not sharded, unless they exist."""
    for name, value in DEFAULTS.items():
        if not hasattr(tensor, name):
            setattr(tensor, name, value)


def copy_tensor_model_parallel_attributes(
    destination_tensor: torch.Tensor, source_tensor: torch.Tensor
) -> None:
    """Copy the attributes of one parameter to another."""
    for name in (*DEFAULTS, "braid_slicing"):
        if hasattr(source_tensor, name):
            setattr(destination_tensor, name, getattr(source_tensor, name))
