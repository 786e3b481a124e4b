"""`torch.autograd.grad` of parameters, noticed: its results are this rank's alone, and nobody would average them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from braid.errors import ConfigError
from braid.params.table import ParamRecord

__all__ = ["is_returned", "refuse_grad"]


def is_returned(param: torch.Tensor) -> bool:
    """In the middle or at the end of a backward: whether it is `torch.autograd.grad`, which returns the gradient of `param`."""
    node = torch.autograd.graph.get_gradient_edge(param).node
    try:
        torch._C._will_engine_execute_node(node)  # noqa: SLF001 - no public way
    except RuntimeError as exc:
        if "autograd.grad" not in str(exc):
            raise
        return True
    return False


def refuse_grad(records: Sequence[ParamRecord]) -> None:
    """Called at the end of a backward in which no gradient has been accumulated: was it `torch.autograd.grad` of a parameter?

    Raises:
        ConfigError: It was.
    """
    for record in records:
        if record.param.requires_grad and is_returned(record.param):
            msg = (
                f"expected backward(), which averages gradients over ranks, found torch.autograd.grad of {record.name!r}: its result is "
                "this rank's alone; call loss.backward() and read .grad, or, for gradients of one rank, use the "
                "wrapped module itself (.module), or no_sync() of a DistributedOptimizer"
            )
            raise ConfigError(msg)
