"""all_gather, reduce_scatter and all_to_all with gradients: every rank holds a part of a tensor.

Parts are slices of one dim. They are equal unless `sizes` gives each rank's length. Equal parts
along dim 0 are moved without a copy; for other dims, torch moves the dim to the front and back.

n = size of the group, l = bytes of the whole tensor; costs count the bytes that a rank receives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from braid.comm import Group
from braid.comm.autograd.arguments import check_call
from braid.comm.autograd.linear_map import collective
from braid.errors import ConfigError

__all__ = ["all_gather", "all_to_all", "check_sizes", "reduce_scatter"]


def all_gather(
    group: Group, x: torch.Tensor, *, dim: int = 0, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """Return the tensors of all ranks, concatenated along `dim`.

    Args:
        group: Ranks that take part.
        x: This rank's part; a zero-dim tensor counts as (1,).
        dim: Dim along which to concatenate.
        sizes: Length of each rank's part in `dim`; None if they are equal.

    Shape:
        x: (..., d, ...) -> (..., n d, ...), or the sum of `sizes`.

    Backward: reduce_scatter(sum), the sum of all ranks' gradients for this rank's part. If all
    ranks compute the same loss from the result, use `all_gather_forward_split_backward` instead,
    or divide the loss by n.

    Cost: (n-1)/n l bytes forward and backward.
    """
    check_call("all_gather", group, x, dim)
    if dim:
        return all_gather(group, x.movedim(dim, 0), sizes=sizes).movedim(0, dim)
    if sizes is None:
        shape = tuple(x.shape)
        return collective(
            group.all_gather,
            lambda g: reduce_scatter(group, g).reshape(shape),
            x,
        )
    rows = check_sizes(group, sizes, x.shape[0], "all_gather")

    def run(t: torch.Tensor) -> torch.Tensor:
        whole = t.new_empty((sum(rows), *t.shape[1:]))
        group.all_gather(t, out=list(whole.split_with_sizes(rows)))
        return whole

    return collective(run, lambda g: reduce_scatter(group, g, sizes=rows), x)


def reduce_scatter(
    group: Group,
    x: torch.Tensor,
    op: str = "sum",
    *,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return this rank's part of the sum of all ranks' `x`.

    Args:
        group: Ranks that take part.
        x: Tensor of the same shape on all ranks.
        op: Reduction, sum or avg.
        dim: Dim to divide.
        sizes: Length of each rank's part in `dim`; None if they are equal.

    Shape:
        x: (..., n d, ...) -> (..., d, ...), or `sizes[rank]`.

    Backward: all_gather (divided by n for avg). Each part's gradient comes from the rank that got
    the part.

    Cost: (n-1)/n l bytes forward and backward.

    Raises:
        ConfigError: Another op, or a dim that cannot be divided.
    """
    check_call("reduce_scatter", group, x, dim)
    if op not in ("sum", "avg"):
        msg = (
            f"op of a differentiable reduce_scatter must be sum or avg, got {op!r}: take this "
            f"rank's part of all_reduce(group, x, {op!r}), which sends the gradient to the right "
            "rank"
        )
        raise ConfigError(msg)
    if dim:
        return reduce_scatter(group, x.movedim(dim, 0), op, sizes=sizes).movedim(0, dim)
    rows = None if sizes is None else check_sizes(group, sizes, None, "reduce_scatter")
    if rows is not None and sum(rows) != x.shape[0]:
        msg = (
            f"dim {dim} of x is {x.shape[0]} long, but sizes {rows} sum to {sum(rows)}: pass sizes "
            "that sum to the length"
        )
        raise ConfigError(msg)
    scale = 1 if op == "sum" else group.size

    def run(t: torch.Tensor) -> torch.Tensor:
        return group.reduce_scatter(t if rows is None else list(t.split_with_sizes(rows)), op)

    def dual(g: torch.Tensor) -> torch.Tensor:
        whole = all_gather(group, g, sizes=rows)
        return whole if scale == 1 else whole / scale

    return collective(run, dual, x)


def all_to_all(
    group: Group,
    x: torch.Tensor,
    *,
    send_sizes: Sequence[int] | None = None,
    receive_sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Send part r of dim 0 to rank r; return the received parts in the order of ranks.

    Args:
        group: Ranks that take part.
        x: Parts for all ranks, concatenated.
        send_sizes: Length of the part for each rank; None, as `receive_sizes`, if all parts of all
            ranks are equal.
        receive_sizes: Length of the part from each rank.

    Shape:
        x: (n d, ...) -> (n d, ...), or (sum of send_sizes, ...) -> (sum of receive_sizes, ...).

    Backward: all_to_all with the sizes exchanged. Every gradient is sent to the rank that sent the
    number.

    Cost: (n-1)/n l bytes forward and backward.

    Raises:
        ConfigError: Only one of the two sizes was passed, or sizes do not match.
    """
    check_call("all_to_all", group, x)
    if send_sizes is None and receive_sizes is None:
        return collective(group.all_to_all, lambda g: all_to_all(group, g), x)
    if send_sizes is None or receive_sizes is None:
        passed = "receive_sizes" if send_sizes is None else "send_sizes"
        msg = (
            f"all_to_all got {passed} without the other sizes: pass both send_sizes and "
            "receive_sizes, or neither"
        )
        raise ConfigError(msg)
    to = check_sizes(group, send_sizes, None, "all_to_all send")
    source = check_sizes(group, receive_sizes, None, "all_to_all receive")
    if sum(to) != x.shape[0]:
        msg = (
            f"dim 0 of x is {x.shape[0]} long, but send_sizes {to} sum to {sum(to)}: pass sizes "
            "that sum to the length"
        )
        raise ConfigError(msg)

    def run(t: torch.Tensor) -> torch.Tensor:
        whole = t.new_empty((sum(source), *t.shape[1:]))
        group.all_to_all(list(t.split_with_sizes(to)), out=list(whole.split_with_sizes(source)))
        return whole

    return collective(run, lambda g: all_to_all(group, g, send_sizes=source, receive_sizes=to), x)


def check_sizes(
    group: Group, sizes: Sequence[int], length: int | None, operation: str
) -> list[int]:
    """Return `sizes` as a list, after checking that they fit the group and this rank's part.

    Args:
        group: Ranks that take part.
        sizes: One length per rank.
        length: Length of this rank's part; None if unknown.
        operation: Name in the message.

    Raises:
        ConfigError: There is not one size per rank, one is negative, or this rank's part has
            another length.
    """
    rows = [int(size) for size in sizes]
    if len(rows) != group.size or min(rows) < 0:
        msg = (
            f"{operation} sizes must be {group.size} integers of at least 0, one for every rank, "
            f"got {rows}"
        )
        raise ConfigError(msg)
    if length is not None and rows[group.rank] != length:
        msg = (
            f"part of group rank {group.rank} has length {length}, but {operation} got sizes "
            f"{rows}, with {rows[group.rank]} for this rank: pass the length of each rank's part"
        )
        raise ConfigError(msg)
    return rows
