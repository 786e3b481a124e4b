"""Norm of all gradients, and clipping by it, with the same result on all ranks.

After backward every rank holds the averaged gradients, so the norm of its gradients is the norm of
all and nothing is sent. Clip after the average: clipping before it, or the gradients of each rank
alone, gives another result. Sums are in 32 bits at least, for any dtype of the gradients. Sparse
gradients are included.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from braid.errors import ConfigError
from braid.runtime.torch_internals import sparse_values

__all__ = ["clip_grad_norm_", "grad_norm"]


def grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor], norm_type: float = 2.0
) -> torch.Tensor:
    """Return the norm of all gradients as if they were one vector.

    Args:
        parameters: Parameters after backward; parameters without a gradient are skipped, and
            duplicates count once.
        norm_type: p of the p-norm; may be infinite.

    Raises:
        ConfigError: `norm_type` is not positive.
    """
    if not norm_type > 0:
        msg = f"norm_type must be above 0, got {norm_type}"
        raise ConfigError(msg)
    unique_params = (
        [parameters] if isinstance(parameters, torch.Tensor) else dict.fromkeys(parameters)
    )
    norms = [_norm(param.grad, norm_type) for param in unique_params if param.grad is not None]
    if not norms:
        return torch.zeros(())
    device = norms[0].device
    total: torch.Tensor = torch.linalg.vector_norm(
        torch.stack([norm.to(device) for norm in norms]), norm_type
    )
    return total


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; return the norm before scaling.

    Args:
        parameters: Parameters with averaged gradients.
        max_norm: Largest norm of all gradients together.
        norm_type: Order of the norm, such as 2 or infinity.
        error_if_nonfinite: Whether to raise an error if the norm is NaN or infinite.

    Raises:
        ConfigError: The norm is not finite and `error_if_nonfinite` is set, or `max_norm` is
            negative.
    """
    if not max_norm >= 0:
        msg = f"max_norm must not be negative, got {max_norm}"
        raise ConfigError(msg)
    unique_params = (
        [parameters] if isinstance(parameters, torch.Tensor) else list(dict.fromkeys(parameters))
    )
    total = grad_norm(unique_params, norm_type)
    if error_if_nonfinite and not bool(total.isfinite()):
        msg = (
            f'the norm of the gradients is {total.item()}: pass nonfinite="raise" to '
            "DistributedDataParallel to see which rank and parameter"
        )
        raise ConfigError(msg)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for param in unique_params:
        if param.grad is not None:
            # values() needs a coalesced tensor
            numbers = sparse_values(param.grad) if param.grad.is_sparse else param.grad
            numbers.mul_(factor.to(numbers.device))  # in 16 bits a small factor would be zero
    return total


def _norm(grad: torch.Tensor, norm_type: float) -> torch.Tensor:
    numbers = grad.coalesce().values() if grad.is_sparse else grad
    wide = torch.float64 if numbers.dtype == torch.float64 else torch.float32
    if not numbers.numel():  # the infinity norm of an empty tensor raises
        return torch.zeros((), dtype=wide, device=numbers.device)
    norm: torch.Tensor = torch.linalg.vector_norm(
        numbers.abs() if numbers.is_complex() else numbers, norm_type, dtype=wide
    )
    return norm
