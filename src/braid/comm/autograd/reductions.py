"""all_reduce and scan with gradients: every rank contributes, and every rank gets a result.

n = size of the group, l = bytes of the tensor; costs count the bytes that a rank receives in the
two-phase algorithm.
"""

from __future__ import annotations

from functools import reduce as fold

import torch

from braid.comm import Group
from braid.comm.autograd.arguments import check_call
from braid.comm.autograd.linear_map import collective
from braid.comm.autograd.parts import all_gather
from braid.errors import ConfigError

__all__ = ["all_reduce", "scan"]

SHORT = (torch.float16, torch.bfloat16)


def all_reduce(group: Group, x: torch.Tensor, op: str = "sum") -> torch.Tensor:
    """Return the reduction of all ranks' `x` on every rank; `x` is unchanged.

    Args:
        group: Ranks that take part.
        x: Tensor of the same shape on all ranks.
        op: Reduction: sum, avg, max, min or product.

    Backward: all_reduce again. The gradient of each `x` is the sum (or average) of all ranks'
    gradients of the result. For a loss that all ranks compute from the result, divide it by n or
    use `all_reduce_forward_identity_backward`.

    max and min: the whole gradient goes to the rank that holds the extreme value; in a tie, to the
    lowest rank. NaN counts as an extreme value.

    product: each rank gets the product of the other ranks' `x` times the summed gradient, exact
    also for zeros.

    Cost: sum and avg 2 (n-1)/n l bytes forward and backward. max and min 4 (n-1)/n l and 2 (n-1)/n
    bytes of an int32 per element forward, 2 (n-1)/n l backward. product (n-1) l both ways: every
    rank gathers all `x`.

    Raises:
        ConfigError: Another op; bitwise operations have no gradient.
    """
    check_call("all_reduce", group, x)
    if op in ("sum", "avg"):
        return collective(
            lambda t: group.all_reduce(t, op, out=torch.empty_like(t)),
            lambda g: all_reduce(group, g, op),
            x,
        )
    if op in ("max", "min"):
        return _extreme(group, x, op)
    if op == "product":
        return _product(group, x)
    msg = (
        f"op of a differentiable all_reduce must be sum, avg, max, min or product, got {op!r}: "
        "bitwise operations have no gradient, call group.all_reduce for them"
    )
    raise ConfigError(msg)


def scan(group: Group, x: torch.Tensor, *, exclusive: bool = False) -> torch.Tensor:
    """Return the sum of `x` of all ranks up to this one.

    Args:
        group: Ranks that take part.
        x: Tensor of the same shape on all ranks.
        exclusive: Whether to leave out this rank's `x`; rank 0 then gets zeros.

    Backward: the sum of the gradients of this rank and all later ranks (without this rank if
    `exclusive`).

    Cost: (n-1) l bytes forward and backward.
    """
    check_call("scan", group, x)
    return collective(
        lambda t: group.scan(t, exclusive=exclusive),
        lambda g: _sum_after(group, g, exclusive=exclusive),
        x,
    )


def _sum_after(group: Group, x: torch.Tensor, *, exclusive: bool) -> torch.Tensor:
    """Apply the transpose of `scan`.

    The difference of total and prefix would be cheaper, but loses precision by cancellation.
    """
    start = group.rank + exclusive

    def run(t: torch.Tensor) -> torch.Tensor:
        rows = group.all_gather(t.unsqueeze(0))[start:]
        wide = rows.float() if t.dtype in SHORT else rows
        return fold(torch.add, wide.unbind(), torch.zeros_like(wide[:1].sum(0))).to(t.dtype)

    return collective(run, lambda g: scan(group, g, exclusive=exclusive), x)


def _extreme(group: Group, x: torch.Tensor, op: str) -> torch.Tensor:
    """Return the maximum or minimum as a sum to which only the rank that holds it contributes."""
    if not (x.is_floating_point() and torch.is_grad_enabled()):
        return group.all_reduce(x.detach(), op, out=torch.empty_like(x))
    with torch.no_grad():
        y = group.all_reduce(x, op, out=torch.empty_like(x))
        holds = (x == y) | (x.isnan() & y.isnan())
        holder = torch.where(holds, group.rank, group.size).to(torch.int32)
        mine = group.all_reduce(holder, "min") == group.rank
    return all_reduce(group, torch.where(mine, x, torch.zeros_like(x)))


def _product(group: Group, x: torch.Tensor) -> torch.Tensor:
    """Multiply in the order of ranks, with the same bits as `Group.all_reduce`."""
    rows = all_gather(group, x.unsqueeze(0))
    wide = rows.float() if x.dtype in SHORT and group.size > 2 else rows
    return fold(torch.mul, wide.unbind()).to(x.dtype)
