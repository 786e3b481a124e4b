"""`megatron.core.distributed.finalize_model_grads`: gradients after all backwards of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from braid.compat.megatron.distributed.distributed_data_parallel import shared_weight
from braid.compat.megatron.failure import UsageError
from braid.compat.megatron.groups import braid_group
from braid.compat.megatron.model_parallel_config import check_served
from braid.compat.megatron.process_groups_config import ProcessGroupCollection
from braid.compat.megatron.utils import get_attr_wrapped_model, get_model_config, timed

__all__ = ["finalize_model_grads"]

REFUSED = {
    "has_cond_embedder": "leave it False, and sum gradients of conditional embedders yourself",
    "moe_router_enable_expert_bias": "leave it False: braid has no router of experts to update",
}


def finalize_model_grads(
    model: Sequence[nn.Module],
    num_tokens: torch.Tensor | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool | None = False,
) -> None:
    """Reduce gradients over all ranks that share parameters.

    1. Data parallel ranks average all gradients.
    2. Tensor parallel ranks sum gradients of parameters with `sequence_parallel`, and average
       gradients of parameters with `average_gradients_across_tp_domain`.
    3. The first and the last stage sum the gradients of a shared embedding.
    4. All gradients are divided by the number of tokens, if there is one.

    Args:
        model: Chunks of this rank, each in DistributedDataParallel.
        num_tokens: Number of tokens of the last stage's micro-batches.
        pg_collection: Groups of the model; the groups of `parallel_state` when None.
        force_all_reduce: See `DistributedDataParallel.finish_grad_sync`.

    Raises:
        UsageError: A chunk is not in DistributedDataParallel.
    """
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    config = get_model_config(model[0])
    check_served(config, REFUSED)
    wrappers = [_wrapper(chunk) for chunk in model]
    with timed(config, "all-grads-sync", log_level=1):
        for wrapper in wrappers:
            wrapper.finish_grad_sync(force_all_reduce=force_all_reduce)
    with timed(config, "non-tensor-parallel-grads-all-reduce", log_level=1):
        _reduce_over_tensor_ranks(model, config, groups)
    with timed(config, "embedding-grads-all-reduce", log_level=1):
        _reduce_embeddings(model, groups)
    if num_tokens is None:
        return
    pipeline = braid_group(groups.pp)
    pipeline.broadcast(num_tokens, pipeline.size - 1)
    braid_group(groups.dp_cp).all_reduce(num_tokens)
    if (count := int(num_tokens)) > 0:
        for wrapper in wrappers:
            wrapper.scale_gradients(1.0 / count)


def _wrapper(chunk: nn.Module) -> Any:
    if not hasattr(chunk, "finish_grad_sync"):
        msg = (
            f"a model chunk is a {type(chunk).__name__}, which has no finish_grad_sync: wrap it in "
            "braid.compat.megatron.distributed.DistributedDataParallel"
        )
        raise UsageError(msg)
    return chunk


def _reduce_over_tensor_ranks(
    model: Sequence[nn.Module], config: Any, groups: ProcessGroupCollection
) -> None:
    """Sum or average the gradients of parameters that are replicated on tensor parallel ranks."""
    if groups.tp.size() == 1:
        return
    reduced: dict[str, list[torch.Tensor]] = {"sum": [], "avg": []}
    for chunk in model:
        for name, param in chunk.named_parameters():
            if not param.requires_grad:
                continue
            is_sequence = config.sequence_parallel and getattr(param, "sequence_parallel", False)
            is_norm = "q_layernorm" in name or "k_layernorm" in name
            if getattr(param, "average_gradients_across_tp_domain", False):
                reduced["avg"].append(param.__dict__["main_grad"])
            elif is_sequence or (is_norm and getattr(config, "qk_layernorm", False)):
                reduced["sum"].append(param.__dict__["main_grad"])
    group = braid_group(groups.tp)
    for op, grads in reduced.items():
        for dtype in dict.fromkeys(grad.dtype for grad in grads):
            members = [grad for grad in grads if grad.dtype == dtype]
            flat = group.all_reduce(torch.cat([grad.flatten() for grad in members]), op)
            parts = flat.split_with_sizes([grad.numel() for grad in members])
            for grad, part in zip(members, parts, strict=True):
                grad.copy_(part.view_as(grad))


def _reduce_embeddings(model: Sequence[nn.Module], groups: ProcessGroupCollection) -> None:
    """Sum the gradients of embeddings that several stages have."""
    chunk = model[0] if groups.pp.rank() == 0 else model[-1]
    for group, find in ((groups.embd, shared_weight), (groups.pos_embd, _position_weight)):
        if group is None or group.size() == 1:
            continue
        module = get_attr_wrapped_model(chunk, "set_input_tensor", return_model_obj=True)
        weight = find(module)
        if weight is not None and weight.requires_grad:
            braid_group(group).all_reduce(weight.__dict__["main_grad"])


def _position_weight(module: nn.Module) -> Any:
    return get_attr_wrapped_model(module, "position_embeddings").weight
