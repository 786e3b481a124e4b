"""Experts on the meta device: their operations, counted for an even load.

Which expert gets a token depends on its values, which do not exist there. So a module of experts is
replaced while it is counted: every choice costs the products of one expert, whatever its number.

    T tokens with k choices, a parameter (E, out, in)      2 T k out in FLOPs
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from braid.parallel.expert_parallel import MixtureOfExperts, expert_modules, expert_params

__all__ = ["ExpertOperation", "even_experts"]


class ExpertOperation(NamedTuple):
    """Products of all chosen experts with one parameter.

    Attributes:
        flops: Floating point operations.
        nbytes: Bytes that they read and write.
    """

    flops: float
    nbytes: float


Record = Callable[[int, Sequence[ExpertOperation]], None]


@contextmanager
def even_experts(layer: nn.Module, record: Record) -> Iterator[None]:
    """Replace the experts of a layer by stand-ins that compute nothing.

    Args:
        layer: Layer on the meta device.
        record: Called in each forward of experts with the bytes of the tokens that are sent to
            experts, and the operations.
    """
    modules = list(expert_modules(layer).values())
    for module in modules:
        is_mixture = isinstance(module, MixtureOfExperts)
        forward: Callable[..., torch.Tensor] = _of_mixture if is_mixture else _of_choices
        module.__dict__["forward"] = partial(forward, module, record)
    try:
        yield
    finally:
        for module in modules:
            del module.__dict__["forward"]


def _of_mixture(module: MixtureOfExperts, record: Record, x: torch.Tensor) -> torch.Tensor:
    """Run the router of a mixture of experts, and stand in for the experts."""
    tokens = x.reshape(-1, x.shape[-1])
    weights = functional.linear(tokens, module.router).softmax(-1)[:, : module.top_k]
    auxiliary = weights.sum()
    module.load_balance_loss = module.router_z_loss = auxiliary
    return _of_choices(module, record, tokens, weights, weights).view(x.shape)


def _of_choices(
    module: nn.Module,
    record: Record,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Stand in for experts that are called with tokens and their choices."""
    num_choices, item = top_k_index.numel(), hidden_states.element_size()
    params = [param for param in expert_params(module) if param.dim() == 3]
    operations = [
        ExpertOperation(
            2.0 * num_choices * param[0].numel(),
            param.nbytes + item * num_choices * sum(param.shape[1:]),
        )
        for param in params
    ]
    width = hidden_states.shape[-1]
    record(item * num_choices * width, operations)
    kept = num_choices * sum(sum(param.shape[1:]) for param in params)
    output: torch.Tensor = _StandIn.apply(hidden_states, top_k_weights, kept)  # type: ignore[no-untyped-call]
    return output


class _StandIn(torch.autograd.Function):
    """Experts that keep the inputs and outputs of their products for backward."""

    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, weights: torch.Tensor, num_kept: int
    ) -> torch.Tensor:
        ctx.save_for_backward(tokens, weights, tokens.new_empty(num_kept))
        return torch.empty_like(tokens)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        raise NotImplementedError
