"""Forward of a micro-batch with its loss, and its backward, as in Megatron's schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from braid.compat.megatron.failure import UsageError
from braid.compat.megatron.utils import get_attr_wrapped_model, timed

__all__ = ["LossScaling", "backward_step", "forward_step"]

Output = torch.Tensor | torch.autograd.graph.GradientEdge


class LossScaling(NamedTuple):
    """Scaling of losses, and the values that are collected.

    Attributes:
        num_microbatches: Number of micro-batches of a batch.
        context_size: Number of context parallel ranks.
        collect_non_loss_data: Whether loss functions return data that is collected unchanged.
    """

    num_microbatches: int
    context_size: int
    collect_non_loss_data: bool


class ForwardResult(NamedTuple):
    """Result of a forward.

    Attributes:
        output: Output of the stage; the scaled loss on the last stage.
        num_tokens: Number of tokens of the micro-batch, if its loss function returns one, else 0.
        collected: Data for the caller of the schedule; empty unless this is the last stage.
    """

    output: Any
    num_tokens: Any
    collected: list[Any]


def forward_step(
    step: Callable[..., Any],
    data_iterator: Iterator[Any] | None,
    model: nn.Module,
    input_tensor: torch.Tensor | None,
    options: LossScaling,
    *,
    is_last_stage: bool,
    checkpoint: bool | None = None,
) -> ForwardResult:
    """Run the forward of one micro-batch, and its loss on the last stage.

    Args:
        step: The program's `forward_step_func`.
        data_iterator: Iterator over micro-batches; passed to `step`.
        model: Part of the model.
        input_tensor: Output of the previous stage; None for the first stage.
        options: Scaling of losses.
        is_last_stage: Whether `step` returns the output of the last stage.
        checkpoint: Third argument of `step`; None to leave it out.
    """
    config = get_attr_wrapped_model(model, "config", allow_none=False)
    with timed(config, "forward-compute"):
        get_attr_wrapped_model(model, "set_input_tensor")([input_tensor])
        extra = () if checkpoint is None else (checkpoint,)
        with _autocast(config, model):
            output, loss_func = step(data_iterator, model, *extra)
        if not is_last_stage:
            return ForwardResult(output, 0, [])
        if loss_func is None:
            return ForwardResult(output, 0, [output])
        if options.collect_non_loss_data:
            return ForwardResult(output, 0, [loss_func(output, non_loss_data=True)])
        return _scaled_loss(loss_func(output), options, config)


def _scaled_loss(returned: Any, options: LossScaling, config: Any) -> ForwardResult:
    """Divide the loss of a micro-batch; in place as in Megatron, also if it is reported as well."""
    if len(returned) == 3:
        loss, num_tokens, reported = returned
        if not getattr(config, "calculate_per_token_loss", False):
            loss /= torch.clamp(num_tokens, min=1)
            loss /= options.num_microbatches
        return ForwardResult(loss, num_tokens, [reported])
    if len(returned) != 2:
        msg = (
            f"the loss function returned {len(returned)} values: return (loss, reported) or "
            "(loss, num_tokens, reported)"
        )
        raise UsageError(msg)
    loss, reported = returned
    loss *= options.context_size
    loss /= options.num_microbatches
    return ForwardResult(loss, 0, [reported])


def _autocast(config: Any, model: nn.Module) -> AbstractContextManager[Any]:
    if not config.enable_autocast:
        return nullcontext()
    device = next(model.parameters()).device.type
    return torch.autocast(device, dtype=config.autocast_dtype)


def backward_step(
    input_tensor: torch.Tensor | None,
    output: Output | None,
    output_grad: torch.Tensor | None,
    config: Any,
) -> torch.Tensor | None:
    """Run the backward of one micro-batch; return the gradient of the stage's input.

    Args:
        input_tensor: Input of the stage; None for the first stage.
        output: Output of the stage, as a tensor or as the edge of the graph behind it; None if the
            output does not require a gradient, which skips the backward.
        output_grad: Gradient of the output; None for a loss.
        config: Megatron's configuration of the model.
    """
    with timed(config, "backward-compute"):
        if isinstance(output, torch.Tensor) and config.grad_scale_func is not None:
            output = config.grad_scale_func(output)
        if output is not None:
            torch.autograd.backward(output, output_grad)
    if input_tensor is None or input_tensor.grad is not None:
        return None if input_tensor is None else input_tensor.grad
    return torch.zeros_like(input_tensor)  # the output does not depend on the input
