"""Norm of all gradients, and clipping by it, with the same result on all ranks.

After backward every rank with a replica holds the averaged gradients, so the norm of its gradients
is the norm of the whole and nothing is sent. Clip after the average: clipping before it, or each
rank's own part, computes something else. Sums are in 32 bits at least, whatever the gradients'
dtype. Sparse gradients are included.
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
        parameters: Parameters after backward; those without a gradient are left out, and one that
            comes twice counts once.
        norm_type: p of the p-norm; may be infinite.

    Raises:
        ConfigError: `norm_type` is not positive.
    """
    if not norm_type > 0:
        msg = f"norm_type must be above 0, got {norm_type}"
        raise ConfigError(msg)
    given = [parameters] if isinstance(parameters, torch.Tensor) else dict.fromkeys(parameters)
    norms = [_norm(param.grad, norm_type) for param in given if param.grad is not None]
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

    Raises:
        ConfigError: The norm is not finite and `error_if_nonfinite` is set, or `max_norm` is
            negative.
    """
    if not max_norm >= 0:
        msg = f"max_norm must not be negative, got {max_norm}"
        raise ConfigError(msg)
    given = (
        [parameters] if isinstance(parameters, torch.Tensor) else list(dict.fromkeys(parameters))
    )
    total = grad_norm(given, norm_type)
    if error_if_nonfinite and not bool(total.isfinite()):
        msg = (
            f"norm of the gradients is {total.item()}: see nonfinite= of DistributedDataParallel "
            "for whose they are"
        )
        raise ConfigError(msg)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for param in given:
        if param.grad is not None:
            # values() wants it coalesced
            numbers = sparse_values(param.grad) if param.grad.is_sparse else param.grad
            numbers.mul_(factor.to(numbers.device))  # not in 16 bits, where a small factor is zero
    return total


def _norm(grad: torch.Tensor, norm_type: float) -> torch.Tensor:
    numbers = grad.coalesce().values() if grad.is_sparse else grad
    wide = torch.float64 if numbers.dtype == torch.float64 else torch.float32
    if not numbers.numel():  # has no largest number
        return torch.zeros((), dtype=wide, device=numbers.device)
    own: torch.Tensor = torch.linalg.vector_norm(
        numbers.abs() if numbers.is_complex() else numbers, norm_type, dtype=wide
    )
    return own
