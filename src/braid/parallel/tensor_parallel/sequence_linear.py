"""Column-parallel layer on a sequence that is sharded over ranks.

    forward    gather x ─▶ Y = X A                                saved: this rank's positions of x
    backward   gather x again ──────────────┐
               dX = dY A^T ─▶ reduce_scatter ┴─▶ dA = X^T dY       both waits overlap

The gathered sequence is not saved for backward, because that would undo the memory savings: it is
gathered a second time, while the gradient of the sequence is computed.

Source: V. A. Korthikanti et al., Reducing activation recomputation in large transformer models,
2022, section 4.2.2.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.nn import functional

from braid.comm import Group
from braid.errors import ConfigError
from braid.parallel.tensor_parallel.linear import autocast_inputs

__all__ = ["sequence_column_linear"]


def sequence_column_linear(
    group: Group,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dim: int = 1,
) -> torch.Tensor:
    """Return this rank's outputs of a linear layer for the whole sequence.

    Args:
        group: Ranks that share the layer and the sequence.
        x: This rank's positions, of the same shape on all ranks.
        weight: Rows of the weight for this rank's outputs.
        bias: This rank's part of the bias.
        dim: Dim of positions; not the last dim, which has the inputs.

    Backward: reduce_scatter of the gradient of the sequence, and all_gather of `x` again.

    Cost: (n-1)/n l bytes forward and 2 (n-1)/n l backward, with l the bytes of the sequence.

    Raises:
        ConfigError: The dim does not exist, or is the last one.
    """
    if not -x.dim() <= dim < x.dim() or dim % x.dim() == x.dim() - 1:
        msg = (
            f"x of shape {list(x.shape)} has no positions in dim {dim}: pass another dim than "
            "the last, which has the features"
        )
        raise ConfigError(msg)
    args = autocast_inputs(x, weight, bias)
    y = _SequenceColumn.apply(group, *args, dim % x.dim())  # type: ignore[no-untyped-call]
    return cast("torch.Tensor", y)


class _SequenceColumn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        group: Group,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dim: int,
    ) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.has_bias = group, dim, bias is not None
        ctx.save_for_backward(x, weight)
        whole = group.all_gather(x.movedim(dim, 0).contiguous()).movedim(0, dim)
        return functional.linear(whole, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[1:4]
        first = x.movedim(ctx.dim, 0).contiguous()
        starter = ctx.group.starting()
        gathering = scattering = grad_x = grad_weight = None
        if needs_weight:
            whole = first.new_empty((first.shape[0] * ctx.group.size, *first.shape[1:]))
            gathering = starter.all_gather(first, out=whole)
        if needs_x:
            part = torch.empty_like(first)
            grad_whole = (grad @ weight).movedim(ctx.dim, 0).contiguous()
            scattering = starter.reduce_scatter(grad_whole, out=part)
            grad_x = part.movedim(0, ctx.dim)
        rows = grad.flatten(0, -2)
        grad_bias = rows.sum(0) if ctx.has_bias and needs_bias else None
        if gathering is not None:
            gathering.wait()
            grad_weight = rows.t() @ whole.movedim(0, ctx.dim).flatten(0, -2)
        if scattering is not None:
            scattering.wait()
        return None, grad_x, grad_weight, grad_bias, None
