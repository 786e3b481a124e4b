"""Order without data: one backward runs after another.

Autograd runs any node that is ready, and guarantees no order across devices and threads. Work that
needs an order (the microbatches of a stage, messages between two ranks) needs an edge between nodes
that exchange no numbers. `fork` returns a tensor and a phony that depends on it; `join` connects a
phony to another tensor. All operations after the join then run backward before any operation that
precedes the fork:

    ── made x ──▶ fork ──▶ ...
                    ╲ edge
           y ──────▶ join ──▶ used y ──▶ ...        backward: used y, join, fork, made x

Both functions keep no data and save nothing, so they do not affect checkpointing. They accept
tensors that do not require grad: without a graph there is no order to enforce.

Source: Kim et al., torchgpipe (2020), section 3.2, figure 3.
"""

from __future__ import annotations

import torch

from braid.comm.autograd.linear_map import linear_map
from braid.comm.autograd.phony import phony

__all__ = ["depend", "fork", "join"]


def fork(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x`, and a tensor without elements (a phony) that depends on it; for `join`.

    In backward, operations that use the result of `join` with the phony run before the operations
    that made `x`.
    """
    nothing = phony(x.device, False)
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x, nothing
    y, edge = linear_map(lambda t: (t.detach(), nothing.detach()), lambda g, _: (g,), x)
    return y, edge


def join(x: torch.Tensor, edge: torch.Tensor) -> torch.Tensor:
    """Return `x` with an added dependency on the tensor that `fork` split into `edge`.

    In backward, operations that use the result run before the operations that made that tensor. If
    `edge` belongs to a graph, the result requires grad even if `x` does not.

    Args:
        x: Tensor to return.
        edge: A phony from `fork`, or the token from `send`.
    """
    if not (torch.is_grad_enabled() and (x.requires_grad or edge.requires_grad)):
        return x
    (y,) = linear_map(lambda t, _: (t.detach(),), lambda g: (g, None), x, edge)
    return y


def depend(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both tensors, with an added dependency of `second` on `first`.

    In backward, operations that use `second` run before the operations that made `first`.
    """
    first, edge = fork(first)
    return first, join(second, edge)
