"""The part of `megatron.core.parallel_state` for experts: groups, sizes and ranks."""

from __future__ import annotations

import warnings
from typing import Any

import torch.distributed as dist

from braid.compat.megatron.state import STATE

__all__ = [
    "get_data_modulo_expert_parallel_group",
    "get_expert_data_parallel_group",
    "get_expert_data_parallel_group_gloo",
    "get_expert_data_parallel_rank",
    "get_expert_data_parallel_world_size",
    "get_expert_model_parallel_group",
    "get_expert_model_parallel_rank",
    "get_expert_model_parallel_src_rank",
    "get_expert_model_parallel_world_size",
    "get_expert_tensor_and_model_parallel_group",
    "get_expert_tensor_and_model_parallel_rank",
    "get_expert_tensor_and_model_parallel_world_size",
    "get_expert_tensor_model_pipeline_parallel_group",
    "get_expert_tensor_parallel_group",
    "get_expert_tensor_parallel_rank",
    "get_expert_tensor_parallel_world_size",
    "get_inter_distributed_optimizer_instance_group",
    "get_intra_distributed_optimizer_instance_group",
    "set_expert_model_parallel_rank",
    "set_expert_model_parallel_world_size",
    "set_expert_tensor_parallel_rank",
    "set_expert_tensor_parallel_world_size",
]


def _known(kind: str, what: str) -> bool:
    """Return whether a value can be asked for: it is set, or there is torch.distributed."""
    return f"{kind} {what}" in STATE.overrides or dist.is_initialized()


def get_expert_model_parallel_group(check_initialized: bool = True) -> Any:
    """Return the group among which experts are divided."""
    return STATE.group("ep", check_initialized=check_initialized)


def get_expert_model_parallel_src_rank() -> int:
    """Return its first rank, counted in the world."""
    return STATE.members("ep")[0]


def get_expert_model_parallel_world_size() -> int:
    """Return the number of its ranks; 0 without torch.distributed."""
    return STATE.size("ep") if _known("ep", "size") else 0


def get_expert_model_parallel_rank() -> int:
    """Return the rank in it; 0 without torch.distributed."""
    return STATE.rank("ep") if _known("ep", "rank") else 0


def set_expert_model_parallel_world_size(world_size: int | None) -> None:
    """Set the number of ranks that the function returns; None for the group's."""
    STATE.override("ep size", world_size)


def set_expert_model_parallel_rank(rank: int | None) -> None:
    """Set the rank that the function returns; None for the group's."""
    STATE.override("ep rank", rank)


def get_expert_tensor_parallel_group(check_initialized: bool = True) -> Any:
    """Return the group that shares each expert."""
    return STATE.group("ep_tp", check_initialized=check_initialized)


def get_expert_tensor_parallel_world_size() -> int | None:
    """Return the number of its ranks; without groups that which is set for tensor parallelism."""
    if "ep_tp size" in STATE.overrides or STATE.initialized:
        return STATE.size("ep_tp")
    return STATE.overrides.get("tp size")


def get_expert_tensor_parallel_rank() -> int | None:
    """Return the rank in it; without groups that which is set for tensor parallelism."""
    if "ep_tp rank" in STATE.overrides or STATE.initialized:
        return STATE.rank("ep_tp")
    return STATE.overrides.get("tp rank")


def set_expert_tensor_parallel_world_size(world_size: int | None) -> None:
    """Set the number of ranks that the function returns; None for the group's."""
    STATE.override("ep_tp size", world_size)


def set_expert_tensor_parallel_rank(rank: int | None) -> None:
    """Set the rank that the function returns; None for the group's."""
    STATE.override("ep_tp rank", rank)


def get_expert_tensor_and_model_parallel_group(check_initialized: bool = True) -> Any:
    """Return the group that has all experts of a layer."""
    return STATE.group("tp_ep", check_initialized=check_initialized)


def get_expert_tensor_and_model_parallel_world_size() -> int:
    """Return the number of its ranks; 0 without torch.distributed."""
    return STATE.size("tp_ep") if dist.is_initialized() else 0


def get_expert_tensor_and_model_parallel_rank() -> int:
    """Return the rank in it; 0 without torch.distributed."""
    return STATE.rank("tp_ep") if dist.is_initialized() else 0


def get_expert_tensor_model_pipeline_parallel_group(check_initialized: bool = True) -> Any:
    """Return the group that has all experts of all stages."""
    return STATE.group("tp_ep_pp", check_initialized=check_initialized)


def _data_kind(*, partial: bool) -> str:
    return "intra_ep_dp" if partial else "ep_dp"


def get_expert_data_parallel_group(
    check_initialized: bool = True, partial_expert_data_parallel: bool = False
) -> Any:
    """Return the group whose ranks have the same experts."""
    kind = _data_kind(partial=partial_expert_data_parallel)
    return STATE.group(kind, check_initialized=check_initialized)


def get_data_modulo_expert_parallel_group(partial_expert_data_parallel: bool = False) -> Any:
    """Return the group whose ranks have the same experts; deprecated."""
    msg = "use get_expert_data_parallel_group instead of get_data_modulo_expert_parallel_group"
    warnings.warn(msg, DeprecationWarning, stacklevel=2)
    return STATE.group(_data_kind(partial=partial_expert_data_parallel))


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> Any:
    """Return that group for CPU tensors, which is the same one."""
    return STATE.gloo_group(_data_kind(partial=partial_expert_data_parallel))


def get_expert_data_parallel_rank(partial_expert_data_parallel: bool = False) -> int:
    """Return the rank in it; 0 without torch.distributed."""
    kind = _data_kind(partial=partial_expert_data_parallel)
    return STATE.rank(kind) if dist.is_initialized() else 0


def get_expert_data_parallel_world_size(partial_expert_data_parallel: bool = False) -> int:
    """Return the number of its ranks; 0 without torch.distributed."""
    kind = _data_kind(partial=partial_expert_data_parallel)
    return STATE.size(kind) if dist.is_initialized() else 0


def get_intra_distributed_optimizer_instance_group(check_initialized: bool = True) -> Any:
    """Return the group that has one copy of a sharded optimizer."""
    return STATE.group("intra_dist_opt", check_initialized=check_initialized)


def get_inter_distributed_optimizer_instance_group(check_initialized: bool = True) -> Any:
    """Return the group of the same part of all its copies."""
    return STATE.group("inter_ep_dp", check_initialized=check_initialized)
