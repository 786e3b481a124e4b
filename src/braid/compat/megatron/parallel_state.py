"""`megatron.core.parallel_state`: the groups of this rank, their sizes, and its ranks in them.

Groups are torch process groups of the backend "braid". Before `initialize_model_parallel` functions
raise GroupNotInitializedError (an AssertionError), or return None with `check_initialized=False`.
`with_context_parallel` adds context parallel ranks; `partial_*`: one instance of the optimizer.
"""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from braid.compat.megatron.failure import GroupNotInitializedError, UsageError
from braid.compat.megatron.getters import (
    first_of,
    group_of,
    rank_of,
    set_rank_of,
    set_size_of,
    size_of,
)
from braid.compat.megatron.group_plan import (
    default_embedding_ranks,
    default_position_embedding_ranks,
)
from braid.compat.megatron.groups import create_group
from braid.compat.megatron.initialization import initialize_model_parallel
from braid.compat.megatron.rank_generator import (
    RankGenerator,
    generate_masked_orthogonal_rank_groups,
)
from braid.compat.megatron.state import STATE, GlobalMemoryBuffer

__all__ = [
    "RankGenerator",
    "create_group",
    "default_embedding_ranks",
    "default_position_embedding_ranks",
    "destroy_global_memory_buffer",
    "destroy_model_parallel",
    "generate_masked_orthogonal_rank_groups",
    "get_all_ranks",
    "get_amax_reduction_group",
    "get_context_parallel_global_ranks",
    "get_context_parallel_group",
    "get_context_parallel_rank",
    "get_context_parallel_world_size",
    "get_data_modulo_expert_parallel_group",
    "get_data_parallel_group",
    "get_data_parallel_group_gloo",
    "get_data_parallel_rank",
    "get_data_parallel_src_rank",
    "get_data_parallel_world_size",
    "get_embedding_group",
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
    "get_global_memory_buffer",
    "get_hierarchical_context_parallel_groups",
    "get_hybrid_data_context_parallel_groups",
    "get_inter_distributed_optimizer_instance_group",
    "get_intra_distributed_optimizer_instance_group",
    "get_model_parallel_group",
    "get_model_parallel_src_rank",
    "get_pipeline_model_parallel_first_rank",
    "get_pipeline_model_parallel_group",
    "get_pipeline_model_parallel_last_rank",
    "get_pipeline_model_parallel_next_rank",
    "get_pipeline_model_parallel_prev_rank",
    "get_pipeline_model_parallel_rank",
    "get_pipeline_model_parallel_world_size",
    "get_position_embedding_group",
    "get_tensor_and_context_parallel_group",
    "get_tensor_and_context_parallel_rank",
    "get_tensor_and_context_parallel_world_size",
    "get_tensor_and_data_parallel_group",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_src_rank",
    "get_tensor_model_parallel_world_size",
    "get_virtual_pipeline_model_parallel_rank",
    "get_virtual_pipeline_model_parallel_world_size",
    "has_separate_all_gather_group",
    "initialize_model_parallel",
    "is_initialized",
    "is_pipeline_first_stage",
    "is_pipeline_last_stage",
    "is_rank_in_embedding_group",
    "is_rank_in_position_embedding_group",
    "is_unitialized",
    "model_parallel_is_initialized",
    "set_data_parallel_rank",
    "set_expert_model_parallel_rank",
    "set_expert_model_parallel_world_size",
    "set_expert_tensor_parallel_rank",
    "set_expert_tensor_parallel_world_size",
    "set_pipeline_model_parallel_rank",
    "set_pipeline_model_parallel_world_size",
    "set_tensor_model_parallel_rank",
    "set_tensor_model_parallel_world_size",
    "set_virtual_pipeline_model_parallel_rank",
    "set_virtual_pipeline_model_parallel_world_size",
    "update_pg_timeout",
]

ABSENT = {
    "create_hierarchical_groups": "pass hierarchical_context_parallel_sizes to "
    "initialize_model_parallel",
    "create_hybrid_dp_cp_groups": "pass hybrid_context_parallel to initialize_model_parallel",
    "get_nccl_options": "groups of braid have no options of NCCL",
    "overwrite_nccl_comm_cfgs": "groups of braid have no options of NCCL",
    "get_global_symmetric_memory_buffer": "use get_global_memory_buffer",
    "destroy_global_symmetric_memory_buffer": "there is none",
}


def __getattr__(name: str) -> Any:
    if name in ABSENT:
        msg = f"braid.compat.megatron.parallel_state has no {name}: {ABSENT[name]}"
    elif name.startswith("_") and name.isupper():
        msg = (
            f"braid.compat.megatron.parallel_state has no {name}: its groups are not variables of "
            "the module. Call the function that returns the group"
        )
    else:
        msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


# The groups as a whole.


def is_initialized() -> bool:
    """Return whether groups exist."""
    return STATE.initialized


def is_unitialized() -> bool:
    """Return whether no groups exist; deprecated."""
    warnings.warn("is_unitialized: use is_initialized instead", DeprecationWarning, stacklevel=2)
    return not STATE.initialized


def model_parallel_is_initialized() -> bool:
    """Return whether groups of tensor, pipeline and data parallelism exist."""
    return STATE.initialized


def destroy_model_parallel() -> None:
    """Destroy all groups, and reset all values."""
    STATE.close()


def update_pg_timeout(timeout: timedelta, pg: Any = None) -> None:
    """Set the timeout of later operations of a group; of all groups when `pg` is None."""
    groups = set(STATE.groups.values()) if pg is None else {pg}
    for group in groups:
        group.set_timeout(timeout)


def get_all_ranks() -> str:
    """Return this rank's tensor, data, context, pipeline and expert ranks, such as `0_1_0_0_0`."""
    return "_".join(str(STATE.rank(kind)) for kind in ("tp", "dp", "cp", "pp", "ep"))


def get_global_memory_buffer() -> GlobalMemoryBuffer:
    """Return the object that provides temporary buffers by name."""
    if STATE.buffer is None:
        msg = "the global memory buffer is not initialized: call initialize_model_parallel first"
        raise GroupNotInitializedError(msg)
    return STATE.buffer


def destroy_global_memory_buffer() -> None:
    """Free the buffers of `get_global_memory_buffer`."""
    STATE.buffer = None


# Tensor parallelism, and whole models.


get_model_parallel_group = group_of("mp")
get_model_parallel_src_rank = first_of("mp")
get_tensor_model_parallel_group = group_of("tp")
get_tensor_model_parallel_world_size = size_of("tp")
get_tensor_model_parallel_rank = rank_of("tp")
get_tensor_model_parallel_src_rank = first_of("tp")
set_tensor_model_parallel_world_size = set_size_of("tp")
set_tensor_model_parallel_rank = set_rank_of("tp")


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> Any:
    """Return the group of tensor and data (optionally context) parallel ranks of a stage."""
    kind = "tp_dp_cp" if with_context_parallel else "tp_dp"
    return STATE.group(kind, check_initialized=check_initialized)


get_tensor_and_context_parallel_group = group_of("tp_cp")
get_tensor_and_context_parallel_world_size = size_of("tp_cp", alone=0)
get_tensor_and_context_parallel_rank = rank_of("tp_cp", alone=0)


def get_amax_reduction_group(
    with_context_parallel: bool = False, tp_only_amax_red: bool = False
) -> Any:
    """Return the group for reducing absolute maxima: tensor and by default data parallel."""
    if tp_only_amax_red:
        return STATE.group("tp_cp" if with_context_parallel else "tp")
    return STATE.group("tp_dp_cp" if with_context_parallel else "tp_dp")


# Data and context parallelism.


def _data_kind(*, with_cp: bool, partial: bool, all_gather: bool = False) -> str:
    if not with_cp:
        if partial:
            msg = "partial_data_parallel=True needs with_context_parallel=True: pass both"
            raise UsageError(msg)
        return "dp"
    if partial:
        return "intra_dp_cp"
    return "dp_cp_ag" if all_gather else "dp_cp"


def get_data_parallel_group(
    with_context_parallel: bool = False,
    partial_data_parallel: bool = False,
    independent_all_gather: bool = False,
) -> Any:
    """Return the group of ranks with the same part of the model; options as in Megatron."""
    kind = _data_kind(
        with_cp=with_context_parallel,
        partial=partial_data_parallel,
        all_gather=independent_all_gather,
    )
    return STATE.group(kind)


def has_separate_all_gather_group() -> bool:
    """Return whether a separate group for all_gather exists."""
    return "dp_cp_ag" in STATE.groups


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> Any:
    """Return the data parallel group for CPU tensors, which is the same group."""
    return STATE.gloo_group(
        _data_kind(with_cp=with_context_parallel, partial=partial_data_parallel)
    )


def get_data_parallel_world_size(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> int:
    """Return the number of data parallel ranks; 0 without torch.distributed."""
    if not dist.is_initialized():
        return 0
    return STATE.size(_data_kind(with_cp=with_context_parallel, partial=partial_data_parallel))


def get_data_parallel_rank(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> int:
    """Return the data parallel rank; 0 without torch.distributed."""
    if "dp rank" in STATE.overrides:
        return STATE.overrides["dp rank"]
    if not dist.is_initialized():
        return 0
    return STATE.rank(_data_kind(with_cp=with_context_parallel, partial=partial_data_parallel))


set_data_parallel_rank = set_rank_of("dp")


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Return the first global rank of the data parallel group."""
    return STATE.members("dp_cp" if with_context_parallel else "dp")[0]


get_context_parallel_group = group_of("cp")


def get_context_parallel_global_ranks(check_initialized: bool = True) -> list[int] | None:
    """Return the global ranks of the context parallel group."""
    if check_initialized:
        STATE.require("cp")
    return STATE.ranks.get("cp")


get_context_parallel_world_size = size_of("cp", alone=0)
get_context_parallel_rank = rank_of("cp", alone=0)


def get_hierarchical_context_parallel_groups(check_initialized: bool = True) -> list[Any] | None:
    """Return this rank's group in each level of hierarchical context parallelism."""
    groups = [group for kind, group in STATE.groups.items() if kind.startswith("hcp")]
    if check_initialized and not groups:
        STATE.require("hcp0")
    return groups or None


def get_hybrid_data_context_parallel_groups(
    check_initialized: bool = True, group_size: int | None = None
) -> Any:
    """Return this rank's group of `group_size` adjacent data and context parallel ranks."""
    if group_size == get_data_parallel_world_size(with_context_parallel=True):
        return STATE.group("dp_cp", check_initialized=check_initialized)
    return STATE.group(f"hybrid{group_size}", check_initialized=check_initialized)


# Pipelines.


get_pipeline_model_parallel_group = group_of("pp")
get_pipeline_model_parallel_world_size = size_of("pp")
get_pipeline_model_parallel_rank = rank_of("pp")
set_pipeline_model_parallel_world_size = set_size_of("pp")
set_pipeline_model_parallel_rank = set_rank_of("pp")
get_pipeline_model_parallel_first_rank = first_of("pp")


def get_pipeline_model_parallel_last_rank() -> int:
    """Return the global rank of the last stage of this rank's pipeline."""
    return STATE.members("pp")[STATE.size("pp") - 1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Return the global rank of the next stage; the first stage after the last one."""
    return STATE.members("pp")[(STATE.rank("pp") + 1) % STATE.size("pp")]


def get_pipeline_model_parallel_prev_rank() -> int:
    """Return the global rank of the previous stage; the last stage before the first one."""
    return STATE.members("pp")[(STATE.rank("pp") - 1) % STATE.size("pp")]


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Return the number of stages of this rank; None without interleaving."""
    return STATE.virtual_size


def set_virtual_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Set the number of stages of this rank."""
    STATE.virtual_size = world_size


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """Return the current stage of this rank; None without interleaving."""
    return STATE.virtual_rank


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Set the current stage of this rank; deprecated: pass `vp_stage`."""
    msg = "this function is deprecated: pass vp_stage to is_pipeline_first_stage and others"
    warnings.warn(msg, DeprecationWarning, stacklevel=2)
    STATE.virtual_rank = rank


def _is_virtual_stage(wanted: int, vp_stage: int | None) -> bool:
    """Return whether `vp_stage` is the wanted stage, counted from the end if negative."""
    if STATE.virtual_size is None:
        return True
    if vp_stage is None:
        msg = (
            f"this rank has {STATE.virtual_size} virtual stages: pass vp_stage from 0 to "
            f"{STATE.virtual_size - 1}"
        )
        raise UsageError(msg)
    return vp_stage == wanted % STATE.virtual_size


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this rank, or (`ignore_virtual=False`) its stage `vp_stage`, is the first."""
    if not ignore_virtual and not _is_virtual_stage(0, vp_stage):
        return False
    return STATE.rank("pp") == 0


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this rank, or (`ignore_virtual=False`) its stage `vp_stage`, is the last."""
    if not ignore_virtual and not _is_virtual_stage(-1, vp_stage):
        return False
    return STATE.rank("pp") == STATE.size("pp") - 1


get_embedding_group = group_of("embd")
get_position_embedding_group = group_of("pos_embd")


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this rank, or its stage `vp_stage`, has the embedding."""
    ranks, rank = STATE.ranks.get("embd", []), dist.get_rank()
    if ignore_virtual or rank not in ranks:
        return rank in ranks
    if rank == ranks[0]:
        return is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    if rank == ranks[-1]:
        return is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    return True


def is_rank_in_position_embedding_group() -> bool:
    """Return whether this rank has position embeddings of the model."""
    return dist.get_rank() in STATE.ranks.get("pos_embd", [])


# Experts.


get_expert_model_parallel_group = group_of("ep")
get_expert_model_parallel_src_rank = first_of("ep")
get_expert_model_parallel_world_size = size_of("ep", alone=0)
get_expert_model_parallel_rank = rank_of("ep", alone=0)
set_expert_model_parallel_world_size = set_size_of("ep")
set_expert_model_parallel_rank = set_rank_of("ep")
get_expert_tensor_parallel_group = group_of("ep_tp")


def get_expert_tensor_parallel_world_size() -> int | None:
    """Return the number of expert tensor parallel ranks; without groups, the value set for `tp`."""
    if "ep_tp size" in STATE.overrides or STATE.initialized:
        return STATE.size("ep_tp")
    return STATE.overrides.get("tp size")


def get_expert_tensor_parallel_rank() -> int | None:
    """Return the expert tensor parallel rank; without groups, the value set for `tp`."""
    if "ep_tp rank" in STATE.overrides or STATE.initialized:
        return STATE.rank("ep_tp")
    return STATE.overrides.get("tp rank")


set_expert_tensor_parallel_world_size = set_size_of("ep_tp")
set_expert_tensor_parallel_rank = set_rank_of("ep_tp")
get_expert_tensor_and_model_parallel_group = group_of("tp_ep")
get_expert_tensor_and_model_parallel_world_size = size_of("tp_ep", alone=0)
get_expert_tensor_and_model_parallel_rank = rank_of("tp_ep", alone=0)
get_expert_tensor_model_pipeline_parallel_group = group_of("tp_ep_pp")


def _expert_data_kind(*, partial: bool) -> str:
    return "intra_ep_dp" if partial else "ep_dp"


def get_expert_data_parallel_group(
    check_initialized: bool = True, partial_expert_data_parallel: bool = False
) -> Any:
    """Return the group of ranks with the same experts."""
    kind = _expert_data_kind(partial=partial_expert_data_parallel)
    return STATE.group(kind, check_initialized=check_initialized)


def get_data_modulo_expert_parallel_group(partial_expert_data_parallel: bool = False) -> Any:
    """Return the group of ranks with the same experts; deprecated."""
    msg = "get_data_modulo_expert_parallel_group is deprecated: use get_expert_data_parallel_group"
    warnings.warn(msg, DeprecationWarning, stacklevel=2)
    return STATE.group(_expert_data_kind(partial=partial_expert_data_parallel))


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> Any:
    """Return the expert data parallel group for CPU tensors, which is the same group."""
    return STATE.gloo_group(_expert_data_kind(partial=partial_expert_data_parallel))


def get_expert_data_parallel_rank(partial_expert_data_parallel: bool = False) -> int:
    """Return the expert data parallel rank; 0 without torch.distributed."""
    kind = _expert_data_kind(partial=partial_expert_data_parallel)
    return STATE.rank(kind) if dist.is_initialized() else 0


def get_expert_data_parallel_world_size(partial_expert_data_parallel: bool = False) -> int:
    """Return the number of expert data parallel ranks; 0 without torch.distributed."""
    kind = _expert_data_kind(partial=partial_expert_data_parallel)
    return STATE.size(kind) if dist.is_initialized() else 0


get_intra_distributed_optimizer_instance_group = group_of("intra_dist_opt")
get_inter_distributed_optimizer_instance_group = group_of("inter_ep_dp")
