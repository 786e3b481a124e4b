"""Averaging of sparse gradients, such as the used rows of an embedding.

Ranks have different rows, and different numbers of rows, so they cannot be added in place: rows and
their indices are gathered, and each rank adds them in the order of ranks. One process that sums the
ranks' gradients in order computes the same.

Cost: one all_gather of a count, and two of the largest number of rows of any rank.
"""

from __future__ import annotations

import torch

from braid.comm import Group

__all__ = ["average_sparse"]


def average_sparse(
    group: Group, param: torch.Tensor, grad: torch.Tensor | None, mean_weight: float
) -> torch.Tensor:
    """Average a parameter's gradients over all ranks; a collective.

    Args:
        group: Ranks that average together.
        param: Parameter of the gradients.
        grad: Gradient, sparse in the first dim or dense; None if the parameter was not used.
        mean_weight: Divisor of the mean over ranks.

    Returns:
        A coalesced sparse tensor.
    """
    local_rows = _rows(param, grad)
    indices, values = local_rows.indices()[0], local_rows.values()
    counts = group.all_gather(torch.tensor([len(indices)], device=param.device)).tolist()
    most = max(counts)
    padded = indices.new_zeros(most)
    padded[: len(indices)] = indices
    full = values.new_zeros((most, *values.shape[1:]))
    full[: len(values)] = values
    all_indices = group.all_gather(padded).view(group.size, most)
    all_values = group.all_gather(full).view(group.size, *full.shape)
    total = torch.cat([row[:count] for row, count in zip(all_indices, counts, strict=True)])
    rows, places = torch.unique(total, return_inverse=True)
    summed = values.new_zeros((len(rows), *values.shape[1:]))
    start = 0
    for own_values, count in zip(all_values, counts, strict=True):  # distinct rows
        summed[places[start : start + count]] += own_values[:count]
        start += count
    summed /= group.size
    if mean_weight != 1.0:
        summed /= mean_weight
    return torch.sparse_coo_tensor(
        rows[None], summed, param.shape, is_coalesced=True, check_invariants=False
    )


def _rows(param: torch.Tensor, grad: torch.Tensor | None) -> torch.Tensor:
    if grad is None:
        return torch.sparse_coo_tensor(
            torch.zeros((1, 0), dtype=torch.int64, device=param.device),
            param.new_zeros((0, *param.shape[1:])),
            param.shape,
            is_coalesced=True,
            check_invariants=False,
        )
    return (grad if grad.is_sparse else grad.to_sparse(1)).coalesce()
