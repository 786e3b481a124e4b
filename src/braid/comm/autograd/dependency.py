"""Order without data: one backward runs after another.

Autograd runs whatever is ready, in an order that nobody promises across devices and threads. Work
that must keep one (the microbatches of a stage, messages between two ranks) needs an edge between
things that exchange no numbers. `fork` gives a tensor and a phony that hangs on it; `join` ties a
phony to another tensor. Everything behind the join then runs backward before anything in front of
the fork:

    ── made x ──▶ fork ──▶ ...
                    ╲ edge
           y ──────▶ join ──▶ used y ──▶ ...        backward: used y, join, fork, made x

They keep no data and save nothing, so checkpointing inside or around them changes nothing. Tensors
that require no grad are welcome: without a graph there is nothing to order.

Source: Kim et al., torchgpipe (2020), section 3.2, figure 3.
"""

from __future__ import annotations

import torch

from braid.comm.autograd.linear_map import linear_map
from braid.comm.autograd.phony import phony

__all__ = ["depend", "fork", "join"]


def fork(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x` and a phony.

    Operations that made `x` run backward after all operations behind the phony's join.
    """
    nothing = phony(x.device, False)
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x, nothing
    y, edge = linear_map(lambda t: (t.detach(), nothing.detach()), lambda g, _: (g,), x)
    return y, edge


def join(x: torch.Tensor, edge: torch.Tensor) -> torch.Tensor:
    """Return `x`; users of the result run backward before what was forked into `edge`.

    Where `edge` belongs to a graph the result requires grad, even if `x` does not.

    Args:
        x: Tensor that is handed on.
        edge: A phony from `fork`, or the token that `send` returned.
    """
    if not (torch.is_grad_enabled() and (x.requires_grad or edge.requires_grad)):
        return x
    (y,) = linear_map(lambda t, _: (t.detach(),), lambda g: (g, None), x, edge)
    return y


def depend(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both; all uses of `second` run backward before the operations that made `first`."""
    first, edge = fork(first)
    return first, join(second, edge)
