"""The part of `megatron.core.parallel_state` for pipelines: stages, neighbours and embeddings."""

from __future__ import annotations

import warnings
from typing import Any

import torch.distributed as dist

from braid.compat.megatron.failure import UsageError
from braid.compat.megatron.state import STATE

__all__ = [
    "get_embedding_group",
    "get_pipeline_model_parallel_first_rank",
    "get_pipeline_model_parallel_group",
    "get_pipeline_model_parallel_last_rank",
    "get_pipeline_model_parallel_next_rank",
    "get_pipeline_model_parallel_prev_rank",
    "get_pipeline_model_parallel_rank",
    "get_pipeline_model_parallel_world_size",
    "get_position_embedding_group",
    "get_virtual_pipeline_model_parallel_rank",
    "get_virtual_pipeline_model_parallel_world_size",
    "is_pipeline_first_stage",
    "is_pipeline_last_stage",
    "is_rank_in_embedding_group",
    "is_rank_in_position_embedding_group",
    "set_pipeline_model_parallel_rank",
    "set_pipeline_model_parallel_world_size",
    "set_virtual_pipeline_model_parallel_rank",
    "set_virtual_pipeline_model_parallel_world_size",
]


def get_pipeline_model_parallel_group(check_initialized: bool = True) -> Any:
    """Return the group of a pipeline's stages."""
    return STATE.group("pp", check_initialized=check_initialized)


def get_pipeline_model_parallel_world_size() -> int:
    """Return the number of its ranks."""
    return STATE.size("pp")


def get_pipeline_model_parallel_rank() -> int:
    """Return the rank in it."""
    return STATE.rank("pp")


def set_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Set the number of ranks that the function returns; None for the group's."""
    STATE.override("pp size", world_size)


def set_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Set the rank that the function returns; None for the group's."""
    STATE.override("pp rank", rank)


def get_pipeline_model_parallel_first_rank() -> int:
    """Return the rank of the first stage, counted in the world."""
    return STATE.members("pp")[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """Return the rank of the last stage, counted in the world."""
    return STATE.members("pp")[STATE.size("pp") - 1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Return the rank of the next stage, counted in the world; after the last comes the first."""
    return STATE.members("pp")[(STATE.rank("pp") + 1) % STATE.size("pp")]


def get_pipeline_model_parallel_prev_rank() -> int:
    """Return the rank of the previous stage, counted in the world."""
    return STATE.members("pp")[(STATE.rank("pp") - 1) % STATE.size("pp")]


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Return the number of stages of this rank; None without interleaving."""
    return STATE.virtual_size


def set_virtual_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Set the number of stages of this rank."""
    STATE.virtual_size = world_size


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """Return the stage of this rank that runs; None without interleaving."""
    return STATE.virtual_rank


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Set the stage of this rank that runs; deprecated: pass `vp_stage`."""
    msg = "pass vp_stage to is_pipeline_first_stage and others instead of setting it for all"
    warnings.warn(msg, DeprecationWarning, stacklevel=2)
    STATE.virtual_rank = rank


def _is_virtual_stage(wanted: int, vp_stage: int | None) -> bool:
    """Return whether this rank's stage is that of a number, counted from the end if negative."""
    if STATE.virtual_size is None:
        return True
    if vp_stage is None:
        msg = (
            f"vp_stage must be passed, since this rank has {STATE.virtual_size} stages: 0 to "
            f"{STATE.virtual_size - 1}"
        )
        raise UsageError(msg)
    return vp_stage == wanted % STATE.virtual_size


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this rank, or its stage `vp_stage`, is the first of the pipeline."""
    if not ignore_virtual and not _is_virtual_stage(0, vp_stage):
        return False
    return STATE.rank("pp") == 0


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this rank, or its stage `vp_stage`, is the last of the pipeline."""
    if not ignore_virtual and not _is_virtual_stage(-1, vp_stage):
        return False
    return STATE.rank("pp") == STATE.size("pp") - 1


def get_embedding_group(check_initialized: bool = True) -> Any:
    """Return the group of the stages that share the embedding."""
    return STATE.group("embd", check_initialized=check_initialized)


def get_position_embedding_group(check_initialized: bool = True) -> Any:
    """Return the group of the stages with embeddings of positions."""
    return STATE.group("pos_embd", check_initialized=check_initialized)


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
    """Return whether this rank has embeddings of positions."""
    return dist.get_rank() in STATE.ranks.get("pos_embd", [])
