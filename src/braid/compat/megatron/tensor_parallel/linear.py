"""Functional linear layers with communication in backward that overlaps with computation."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from braid.compat.megatron.failure import UnsupportedError, UsageError
from braid.compat.megatron.utils import tensor_group
from braid.parallel.tensor_parallel import column_linear, sequence_column_linear

__all__ = ["linear_with_frozen_weight", "linear_with_grad_accumulation_and_async_allreduce"]


def linear_with_grad_accumulation_and_async_allreduce(
    input: torch.Tensor,  # noqa: A002 - the original's name
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    grad_output_buffer: list[torch.Tensor] | None = None,
    wgrad_deferral_limit: int | None = 0,
    async_grad_allreduce: bool | None = None,
    tp_group: Any = None,
) -> torch.Tensor:
    """Return a linear layer's output; communication in backward overlaps with computation.

    Args:
        input: Input; with `sequence_parallel` this rank's positions (dim 0) of it.
        weight: Weight.
        bias: Bias; None for no bias.
        gradient_accumulation_fusion: Must be False.
        allreduce_dgrad: Whether to all_reduce the gradients of the input.
        sequence_parallel: Whether the input is gathered, and its gradient reduce-scattered.
        grad_output_buffer: Must be None.
        wgrad_deferral_limit: No effect.
        async_grad_allreduce: Earlier name of `allreduce_dgrad`.
        tp_group: Group of ranks; the tensor parallel group when None.

    Raises:
        UsageError: `allreduce_dgrad` and `sequence_parallel` are both True.
    """
    del wgrad_deferral_limit
    if gradient_accumulation_fusion or grad_output_buffer is not None:
        msg = (
            "gradient_accumulation_fusion and grad_output_buffer are not supported, as autograd "
            "accumulates gradients: leave them out"
        )
        raise UnsupportedError(msg)
    if async_grad_allreduce is not None:
        allreduce_dgrad = async_grad_allreduce
    if allreduce_dgrad and sequence_parallel:
        msg = (
            "`allreduce_dgrad` and `sequence_parallel` cannot be enabled at the same time: pass "
            "one of the two"
        )
        raise UsageError(msg)
    if sequence_parallel:
        return sequence_column_linear(tensor_group(tp_group), input, weight, bias, dim=0)
    if allreduce_dgrad:
        return column_linear(tensor_group(tp_group), input, weight, bias)
    return functional.linear(input, weight, bias)


def linear_with_frozen_weight(
    input: torch.Tensor,  # noqa: A002 - the original's name
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: Any = None,
    grad_output_buffer: list[torch.Tensor] | None = None,
    wgrad_deferral_limit: int | None = None,
    async_grad_allreduce: bool | None = None,
) -> torch.Tensor:
    """Return the output of a linear layer with a frozen weight.

    See `linear_with_grad_accumulation_and_async_allreduce` for the arguments.
    """
    return linear_with_grad_accumulation_and_async_allreduce(
        input,
        weight,
        bias,
        gradient_accumulation_fusion,
        allreduce_dgrad,
        sequence_parallel,
        grad_output_buffer,
        wgrad_deferral_limit,
        async_grad_allreduce,
        tp_group,
    )
