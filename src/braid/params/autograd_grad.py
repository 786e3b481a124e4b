"""`torch.autograd.grad` of parameters, noticed: its results are this rank's alone, and nobody would average them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from braid.errors import ConfigError
from braid.params.table import ParamRecord

__all__ = ["refuse_grad"]


def refuse_grad(records: Sequence[ParamRecord]) -> None:
    """Called at the end of a backward in which no gradient has been accumulated: was it `torch.autograd.grad` of a parameter?

    Raises:
        ConfigError: It was.
    """
    for record in records:
        if not record.param.requires_grad:
            continue
        node = torch.autograd.graph.get_gradient_edge(record.param).node
        try:
            torch._C._will_engine_execute_node(node)  # noqa: SLF001 - no public way
        except RuntimeError as exc:
            if "autograd.grad" not in str(exc):
                raise
            msg = (
                f"expected backward(), which averages gradients over ranks, found torch.autograd.grad of {record.name!r}: its result is "
                "this rank's alone; call loss.backward() and read .grad, or, for gradients of one rank, use the "
                "wrapped module itself (.module), or no_sync() of a DistributedOptimizer"
            )
            raise ConfigError(msg) from exc
