"""broadcast, reduce, gather and scatter with gradients.

If a result exists only on the root, other ranks get zeros or a tensor without elements. It keeps
the rank in the graph: if backward is called on the root's result, it must be called on these
results as well (`loss + y.sum()` adds nothing, or use `join`).

n = size of the group, l = bytes of the whole tensor; costs count the bytes that the busiest rank
receives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from braid.comm import Group
from braid.comm.autograd.arguments import check_call
from braid.comm.autograd.linear_map import collective
from braid.comm.autograd.parts import check_sizes
from braid.errors import ConfigError

__all__ = ["broadcast", "gather", "reduce", "scatter"]


def broadcast(group: Group, x: torch.Tensor, root: int = 0) -> torch.Tensor:
    """Return `x` of rank `root` on every rank.

    Args:
        group: Ranks that take part.
        x: Tensor of the same shape on all ranks; its values are used on the root only.
        root: Group rank of the sender.

    Backward: reduce(root, sum). The root gets the sum of all ranks' gradients, other ranks zeros.

    Cost: l bytes forward, (n-1) l on the root backward (see `Group.reduce`).
    """
    check_call("broadcast", group, x)
    is_root = group.rank == root

    def run(t: torch.Tensor) -> torch.Tensor:
        return group.broadcast(t.detach().clone() if is_root else torch.empty_like(t), root)

    return collective(run, lambda g: reduce(group, g, root), x)


def reduce(group: Group, x: torch.Tensor, root: int = 0, op: str = "sum") -> torch.Tensor:
    """Return the sum of all ranks' `x` on rank `root`; zeros elsewhere (one element, expanded).

    Args:
        group: Ranks that take part.
        x: Tensor of the same shape on all ranks.
        root: Group rank of the receiver.
        op: Reduction, sum or avg.

    Backward: broadcast(root) (divided by n for avg). Every rank gets the root's gradient.

    Cost: (n-1) l bytes on the root forward, l backward.

    Raises:
        ConfigError: Another op.
    """
    check_call("reduce", group, x)
    if op not in ("sum", "avg"):
        msg = (
            f"op of a differentiable reduce must be sum or avg, got {op!r}: use "
            f"all_reduce(group, x, {op!r}), which sends the gradient to the right rank"
        )
        raise ConfigError(msg)
    scale = 1 if op == "sum" else group.size

    def run(t: torch.Tensor) -> torch.Tensor:
        if group.rank == root:
            return group.reduce(t, root, op, out=torch.empty_like(t))
        group.reduce(t, root, op)
        return t.new_zeros(()).expand(t.shape)

    def dual(g: torch.Tensor) -> torch.Tensor:
        whole = broadcast(group, g, root)
        return whole if scale == 1 else whole / scale

    return collective(run, dual, x)


def gather(
    group: Group, x: torch.Tensor, root: int = 0, *, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """Return all ranks' tensors, concatenated along dim 0, on `root`; an empty tensor elsewhere.

    Args:
        group: Ranks that take part.
        x: This rank's part; a zero-dim tensor counts as (1,).
        root: Group rank of the receiver.
        sizes: Length of each rank's part in dim 0; None if they are equal.

    Shape:
        x: (d, ...) -> (n d, ...) on the root.

    Backward: scatter(root). Every rank gets its part of the root's gradient.

    Cost: l bytes on the root forward, l / n backward.
    """
    check_call("gather", group, x)
    rows = None if sizes is None else check_sizes(group, sizes, x.shape[0], "gather")
    shape = tuple(x.shape)

    def run(t: torch.Tensor) -> torch.Tensor:
        rest = t.shape[1:]
        if group.rank != root:
            group.gather(t, root)
            return t.new_empty((0, *rest))
        if rows is None:
            return group.gather(t, root)  # type: ignore[no-any-return]
        whole = t.new_empty((sum(rows), *rest))
        group.gather(t, root, out=list(whole.split_with_sizes(rows)))
        return whole

    def dual(g: torch.Tensor) -> torch.Tensor:
        return scatter(group, g, root, like=g.new_empty(()).expand(shape), sizes=rows)

    return collective(run, dual, x)


def scatter(
    group: Group,
    x: torch.Tensor | None = None,
    root: int = 0,
    *,
    like: torch.Tensor,
    sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return this rank's part of the tensor on rank `root`.

    Args:
        group: Ranks that take part.
        x: On the root, all parts concatenated along dim 0. Elsewhere None, or a tensor without
            elements, such as the result of `gather`, which keeps the graph connected.
        root: Group rank of the sender.
        like: Tensor with the shape, dtype and device of this rank's part.
        sizes: Length of each rank's part in dim 0, on the root; None if they are equal.

    Shape:
        x: (n d, ...) -> (d, ...).

    Backward: gather(root). The root gets the gradients of all parts.

    Cost: l / n bytes forward, l on the root backward.

    Raises:
        ConfigError: `x` is None on the root, or has elements elsewhere.
    """
    check_call("scatter", group, like if x is None else x)
    check_call("scatter", group, like, name="like")
    shape, dtype, device = tuple(like.shape), like.dtype, like.device
    is_root = group.rank == root
    rows = None if sizes is None else check_sizes(group, sizes, like.shape[0], "scatter")
    if x is None and is_root:
        msg = f"x is None on the root (group rank {root}): pass the parts to scatter there"
        raise ConfigError(msg)
    if x is not None and x.numel() and not is_root:
        msg = (
            f"x has shape {list(x.shape)} on group rank {group.rank}, but only the root (group "
            f"rank {root}) scatters: pass None"
        )
        raise ConfigError(msg)
    if x is not None and is_root and rows is not None and sum(rows) != x.shape[0]:
        msg = (
            f"dim 0 of x is {x.shape[0]} long, but sizes {rows} sum to {sum(rows)}: pass sizes "
            "that sum to the length"
        )
        raise ConfigError(msg)
    source = like.new_empty((0, *shape[1:])) if x is None else x

    def run(t: torch.Tensor) -> torch.Tensor:
        out = torch.empty(shape, dtype=dtype, device=device)
        if is_root:
            group.scatter(t if rows is None else list(t.split_with_sizes(rows)), root, out=out)
        else:
            group.scatter(None, root, out=out)
        return out

    return collective(run, lambda g: gather(group, g, root, sizes=rows), source)
