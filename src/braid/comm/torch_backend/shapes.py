"""Translation of torch's arguments, tensors and reductions, to the arguments of a Group.

torch accepts one tensor or a list with one tensor, results that are concatenated or stacked, and
lists of lists. A `Group` takes tensors that are divided equally along dim 0, or one tensor per
rank. Results are views unless a docstring differs.

`ReduceOp.SUM` is a `RedOpType`, `options.reduceOp` is a `ReduceOp` that wraps one, and
`RedOpType.SUM == ReduceOp(SUM)` is False while the reverse is True. So reductions are looked up by
their number, never compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.distributed_c10d import ReduceOp

from braid.errors import ConfigError

__all__ = [
    "Reduction",
    "by_input",
    "cut",
    "divided",
    "flat_outputs",
    "in_shared_memory",
    "premultiplied",
    "reduction",
    "rows",
    "tensors_of",
]

Parts = torch.Tensor | list[torch.Tensor]


def in_shared_memory(x: torch.Tensor) -> bool:
    """Return whether a Group accepts tensors like `x`."""
    return x.is_cpu and x.layout is torch.strided


def tensors_of(x: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a list of tensors: `x` itself if it is one, else a list of the tensor `x`."""
    if type(x) is list:
        return x
    return [x] if isinstance(x, torch.Tensor) else list(x)


def rows(x: torch.Tensor, like: torch.Tensor, size: int) -> Parts:
    """Return torch's tensor of all ranks' parts in a form that the calls of a Group accept.

    That is one flat tensor if `x` is contiguous, else one tensor per rank.

    Args:
        x: Parts concatenated (size * d0, ...) or stacked (size, d0, ...); any shape if contiguous.
        like: One rank's part.
        size: Number of ranks.

    Raises:
        ConfigError: `x` has another number of elements, or another shape and is not contiguous.
    """
    if x.numel() != size * like.numel():
        msg = (
            f"tensor of shape {list(x.shape)} cannot hold {size} x {like.numel()} elements "
            f"(one part of shape {list(like.shape)} per rank): make it {size} times as large "
            "as a part"
        )
        raise ConfigError(msg)
    x = x.detach()
    if x.is_contiguous():
        return x.view(-1)
    if x.dim() == like.dim() + 1 and x.shape[0] == size:
        return list(x.unbind(0))
    if x.shape[1:] == like.shape[1:]:
        return list(x.chunk(size))
    msg = (
        f"tensor of shape {list(x.shape)} with strides {x.stride()} is not contiguous: pass a "
        f"contiguous tensor, or one of shape {[size, *like.shape]}"
    )
    raise ConfigError(msg)


def divided(x: torch.Tensor, like: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input and the output of a reduce-scatter, both flat if the output allows it.

    The input is copied if it is not contiguous.

    Args:
        x: Input, with the parts of all ranks.
        like: Output, the part of one rank.
        size: Number of ranks.

    Raises:
        ConfigError: `x` does not have `size` times the elements of `like`.
    """
    if x.numel() != size * like.numel():
        msg = (
            f"input of shape {list(x.shape)} must have {size} x {like.numel()} elements for "
            f"results of shape {list(like.shape)}: make it {size} times as large"
        )
        raise ConfigError(msg)
    like = like.detach()
    if like.is_contiguous():
        return x.detach().reshape(-1), like.view(-1)
    return x.detach().reshape(size * like.shape[0], *like.shape[1:]), like


def cut(x: torch.Tensor, splits: Sequence[int], size: int) -> Parts:
    """Split dim 0 into one tensor per rank with the lengths `splits`; equal lengths if empty."""
    x = x.detach()
    if len(splits):
        return list(torch.split(x, list(splits)))
    return x if x.dim() and x.shape[0] % size == 0 and x.is_contiguous() else list(x.chunk(size))


def premultiplied(x: torch.Tensor, factor: float | torch.Tensor | None) -> torch.Tensor:
    """Return `x` times this rank's factor in a new tensor, or `x` itself without a factor."""
    return x if factor is None else x.detach() * factor


def flat_outputs(outputs: Sequence[Any]) -> list[torch.Tensor]:
    """Return one list of the tensors in `outputs`, a list of tensors or of lists of tensors."""
    return [x for item in outputs for x in tensors_of(item)]


def by_input(output_lists: Any, inputs: Sequence[torch.Tensor], size: int) -> list[list[Any]]:
    """Return outputs as one list per input, from outputs as one list per rank or per input.

    If both forms fit (equal numbers of inputs and ranks, all of one shape), the lists are taken as
    one per rank.

    Raises:
        ConfigError: The lists have neither form.
    """
    lists = [list(outputs) for outputs in output_lists]
    columns = [list(column) for column in zip(*lists, strict=False)]
    is_whole = all(len(outputs) == len(inputs) for outputs in lists)
    for nested in (columns, lists) if is_whole and len(lists) == size else (lists,):
        if len(nested) == len(inputs) and all(
            [x.shape for x in outputs] == [inputs[i].shape] * size
            for i, outputs in enumerate(nested)
        ):
            return nested
    msg = (
        f"outputs must be {size} lists (one per rank) of {len(inputs)} tensors with the shapes "
        f"{[list(x.shape) for x in inputs]}, got {[[list(x.shape) for x in out] for out in lists]}"
    )
    raise ConfigError(msg)


_KINDS: Any = ReduceOp.RedOpType
_NAMES = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")


class Reduction(NamedTuple):
    """Reduction of braid, with the factor of this rank's part for PREMUL_SUM."""

    op: str
    factor: float | torch.Tensor | None = None


# by hash, which both types define as the number: unwrapping costs as much as a synchronisation
_REDUCTIONS = {hash(getattr(_KINDS, name.upper())): Reduction(name) for name in _NAMES}


def reduction(op: Any) -> Reduction:
    """Translate a `ReduceOp` or `RedOpType`.

    Raises:
        ConfigError: The operation is unknown to braid.
    """
    known = _REDUCTIONS.get(hash(op))
    if known is not None:
        return known
    if getattr(op, "op", op) == _KINDS.PREMUL_SUM:
        return Reduction("sum", op.factor if hasattr(op, "factor") else op.__getstate__()[1])
    msg = f"reduction {op!r} is unknown: choose one of {', '.join(_NAMES)}, premul_sum"
    raise ConfigError(msg)
