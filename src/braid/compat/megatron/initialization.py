"""Megatron's `initialize_model_parallel`: compare the arguments of all ranks, then create groups.

Ranks that create different groups would wait for each other until a timeout that does not name the
cause. Here they first exchange their arguments through torch's store, and raise the same error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist

from braid.compat.megatron.failure import UnsupportedError, UsageError
from braid.compat.megatron.group_plan import (
    Parallelism,
    default_embedding_ranks,
    default_position_embedding_ranks,
)
from braid.compat.megatron.groups import OWN_BACKENDS, check_initialized
from braid.compat.megatron.state import STATE
from braid.runtime.store import exchange
from braid.runtime.store.torch_store import TorchStore
from braid.runtime.torch_internals import default_store
from braid.types import ranks_text

__all__ = ["initialize_model_parallel"]

DEADLINE_S = 600.0  # ranks may load their data sets before they create groups


def check_alike(call: str, arguments: Mapping[str, object]) -> None:
    """Check that all ranks have passed the same arguments.

    Args:
        call: Name of the function.
        arguments: Arguments by name; functions are compared by their names.

    Raises:
        UsageError: Arguments differ; raised on all ranks, with their values and ranks.
        RanksMissingError: Some ranks did not call the function.
    """
    texts = {name: getattr(value, "__qualname__", repr(value)) for name, value in arguments.items()}
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    store = TorchStore(default_store())
    number = store.add(f"braid/{call}/{rank}", 1)
    topic = f"{call}, call {number}"
    sent = json.dumps(texts).encode()
    values = [
        json.loads(value)
        for value in exchange(store, topic, rank, ranks, sent, timeout_s=DEADLINE_S)
    ]
    problems = []
    for name in texts:
        members: dict[str, list[int]] = {}
        for other, theirs in enumerate(values):
            members.setdefault(theirs[name], []).append(other)
        if len(members) > 1:
            parts = (f"{v} on {ranks_text(ranks_of_v)}" for v, ranks_of_v in members.items())
            problems.append(f"{name} is {' and '.join(parts)}")
    if problems:
        msg = (
            f"{call} was called with different arguments: {'; '.join(problems)}. Pass the same "
            "arguments on all ranks"
        )
        raise UsageError(msg)


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    pipeline_model_parallel_comm_backend: str | None = None,
    use_sharp: bool = False,
    context_parallel_size: int = 1,
    hierarchical_context_parallel_sizes: Sequence[int] | None = None,
    hybrid_context_parallel: bool = False,
    expert_model_parallel_size: int = 1,
    num_distributed_optimizer_instances: int = 1,
    expert_tensor_parallel_size: int | None = None,
    nccl_communicator_config_path: str | None = None,
    distributed_timeout_minutes: float = 30,
    order: str = "tp-cp-ep-dp-pp",
    get_embedding_ranks: Callable[[list[int]], Sequence[int]] | None = None,
    get_position_embedding_ranks: Callable[[list[int]], Sequence[int]] | None = None,
    create_gloo_process_groups: bool = True,
    high_priority_stream_groups: Sequence[str] | None = None,
    sharp_enabled_group: str | None = None,
    create_all_gather_group: bool | None = False,
) -> None:
    """Create the groups of all kinds of parallelism; all ranks call this with the same arguments.

    Args:
        tensor_model_parallel_size: Number of ranks that share each layer.
        pipeline_model_parallel_size: Number of ranks in a pipeline.
        virtual_pipeline_model_parallel_size: Number of stages on each rank of a pipeline.
        pipeline_model_parallel_comm_backend: None, "braid", "nccl" or "gloo".
        use_sharp: Must be False.
        context_parallel_size: Number of ranks that share a sequence.
        hierarchical_context_parallel_sizes: Sizes of levels, with `context_parallel_size` as their
            product.
        hybrid_context_parallel: Whether to also create groups of 2, 4, ... adjacent ranks.
        expert_model_parallel_size: Number of ranks among which experts are divided.
        num_distributed_optimizer_instances: Number of copies of a sharded optimizer.
        expert_tensor_parallel_size: Number of ranks that share each expert; when None,
            `tensor_model_parallel_size`.
        nccl_communicator_config_path: Must be None.
        distributed_timeout_minutes: Minutes after which an operation fails.
        order: Kinds of parallelism, the fastest varying kind first.
        get_embedding_ranks: Function that returns the ranks of a pipeline with embeddings.
        get_position_embedding_ranks: Function that returns the ranks of a pipeline with position
            embeddings.
        create_gloo_process_groups: Whether the functions for Gloo groups work; they return the same
            group, which takes CPU tensors.
        high_priority_stream_groups: Must be empty.
        sharp_enabled_group: Must be None.
        create_all_gather_group: Whether to create a separate group for all_gather.

    Raises:
        GroupNotInitializedError: torch.distributed has not been initialized.
        UnsupportedError: An option of NCCL or UCC is set; all are named.
        UsageError: Sizes do not fit, arguments differ between ranks, or groups exist already.
    """
    arguments = dict(locals())
    check_initialized()
    arguments["whether there are groups already"] = bool(STATE.alive())
    check_alike("initialize_model_parallel", arguments)
    _refuse(
        {
            "use_sharp": use_sharp,
            "sharp_enabled_group": sharp_enabled_group,
            "nccl_communicator_config_path": nccl_communicator_config_path,
            "high_priority_stream_groups": high_priority_stream_groups,
            "pipeline_model_parallel_comm_backend": (
                pipeline_model_parallel_comm_backend not in OWN_BACKENDS
                and pipeline_model_parallel_comm_backend
            ),
        }
    )
    if not distributed_timeout_minutes > 0:
        msg = f"distributed_timeout_minutes must be more than 0, got {distributed_timeout_minutes}"
        raise UsageError(msg)
    parallelism = Parallelism(
        world_size=dist.get_world_size(),
        tp=tensor_model_parallel_size,
        pp=pipeline_model_parallel_size,
        cp=context_parallel_size,
        ep=expert_model_parallel_size,
        expert_tp=expert_tensor_parallel_size,
        virtual_pp=virtual_pipeline_model_parallel_size,
        instances=num_distributed_optimizer_instances,
        order=order,
        hierarchical_cp=tuple(hierarchical_context_parallel_sizes or ()),
        hybrid_cp=hybrid_context_parallel,
        all_gather_group=bool(create_all_gather_group),
        embedding_ranks=get_embedding_ranks or default_embedding_ranks,
        position_embedding_ranks=get_position_embedding_ranks or default_position_embedding_ranks,
    )
    STATE.open(parallelism.groups(), timedelta(minutes=distributed_timeout_minutes))
    STATE.with_gloo = create_gloo_process_groups
    if virtual_pipeline_model_parallel_size is not None:
        STATE.virtual_size, STATE.virtual_rank = virtual_pipeline_model_parallel_size, 0


def _refuse(options: dict[str, object]) -> None:
    """Raise UnsupportedError if an option is set."""
    named = [f"{name}={value!r}" for name, value in options.items() if value]
    if named:
        msg = (
            f"initialize_model_parallel does not support {', '.join(named)}: groups of braid "
            "have no settings of NCCL, SHARP or UCC. Leave them out; NCCL reads its environment "
            "variables"
        )
        raise UnsupportedError(msg)
