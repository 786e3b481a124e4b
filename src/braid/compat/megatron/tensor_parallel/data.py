"""`megatron.core.tensor_parallel.data`: broadcast of a batch to tensor parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from braid.compat.megatron.failure import UsageError
from braid.compat.megatron.utils import tensor_group

__all__ = ["broadcast_data"]


def broadcast_data(
    keys: Sequence[str],
    data: Mapping[str, torch.Tensor] | None,
    datatype: torch.dtype,
    tp_group: Any = None,
) -> dict[str, torch.Tensor]:
    """Return the tensors of the group's first rank on all ranks of the group.

    Args:
        keys: Names of tensors, the same on all ranks.
        data: Tensors by name; used on the first rank only.
        datatype: Dtype of all tensors.
        tp_group: Group of ranks; the tensor parallel group when None.

    Returns:
        Tensors by name, on the GPU if there is one.

    Raises:
        UsageError: A tensor is missing or has another dtype; raised on all ranks, with all
            problems.

    Cost: two broadcasts, of the shapes and of all elements.
    """
    group = tensor_group(tp_group)
    tensors = data or {}
    announced: list[Any] = []
    if group.rank == 0:
        problems = [f"{key!r} is missing" for key in keys if key not in tensors]
        problems += [
            f"{key!r} has dtype {tensors[key].dtype}"
            for key in keys
            if key in tensors and tensors[key].dtype != datatype
        ]
        announced = [problems, {} if problems else {key: list(tensors[key].shape) for key in keys}]
    problems, shapes = group.objects.broadcast(announced)
    if problems:
        msg = (
            f"broadcast_data needs {', '.join(keys)} of {datatype} on rank 0: "
            f"{'; '.join(problems)}. Correct the tensors on rank 0"
        )
        raise UsageError(msg)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = [torch.Size(shapes[key]).numel() for key in keys]
    if group.rank == 0:
        flat = torch.cat([tensors[key].to(device).reshape(-1) for key in keys])
    else:
        flat = torch.empty(sum(sizes), dtype=datatype, device=device)
    group.broadcast(flat)
    parts = flat.split_with_sizes(sizes)
    return {key: part.view(shapes[key]) for key, part in zip(keys, parts, strict=True)}
