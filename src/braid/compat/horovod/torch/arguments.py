"""Checks of operations' arguments; an invalid argument raises an error on all ranks.

Problem: if one rank raises because of its arguments, it never starts its operation, and the ranks
with valid arguments wait for it. Idea: the rank sends the error instead of the operation, so that
the other ranks' operation of that name fails with the same error.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from braid.compat.horovod.common.process_sets import ProcessSet
from braid.compat.horovod.fusion import Request
from braid.compat.horovod.torch.reductions import ReduceOp
from braid.errors import BraidError, ConfigError, encodable

__all__ = [
    "CallArguments",
    "check_tensor",
    "check_tensors",
    "factor",
    "refused_on_all",
    "root_of",
    "splits_of",
]

LONGEST_REASON = 1000  # characters that are sent


class CallArguments(NamedTuple):
    """Arguments of an operation, in addition to its tensors.

    Attributes:
        name: Name that the caller has passed.
        process_set: Ranks that take part.
        grouped: Whether the operation takes a group of several tensors.
        op: Reduction; Average when None.
        average: Deprecated form of `op`: True for Average, False for Sum.
        factors: Factors before and after the reduction.
    """

    name: str | None
    process_set: ProcessSet
    grouped: bool = False
    op: ReduceOp | None = None
    average: bool | None = None
    factors: tuple[float, float] = (1.0, 1.0)


@contextlib.contextmanager
def refused_on_all(kind: str, call: CallArguments) -> Iterator[None]:
    """If the code in the context raises, make the operation fail on all ranks of the set.

    Args:
        kind: Kind of operation, as in its name.
        call: Arguments of the operation.
    """
    try:
        yield
    except Exception as error:
        with contextlib.suppress(BraidError, AttributeError):  # set or name may be invalid
            member = call.process_set.member
            base = member.name(kind, call.name)
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, BraidError):
                reason = str(error)
            reason = encodable(reason[:LONGEST_REASON])
            group = {"group": base, "group_size": 1} if call.grouped else {}
            asked = Request(f"{base}.0" if call.grouped else base, kind, refusal=reason, **group)  # type: ignore[arg-type]
            member.engine.refuse(asked)
        raise


def check_tensor(tensor: Any) -> None:
    """Check that a tensor can be sent.

    Raises:
        ConfigError: The value is not a tensor, is not dense, or has no valid memory.
    """
    if not isinstance(tensor, torch.Tensor):
        msg = f"operations work on tensors, got {type(tensor).__name__}: pass torch.tensor(...)"
        raise ConfigError(msg)
    if tensor.layout is not torch.strided or tensor.is_quantized:
        what = "quantized" if tensor.is_quantized else str(tensor.layout)
        msg = (
            f"tensor of shape {list(tensor.shape)} is a {what} one, which cannot be sent: use "
            "sparse_allreduce_async, or convert it (to_dense, dequantize)"
        )
        raise ConfigError(msg)
    if tensor.device.type == "meta":
        msg = (
            f"tensor of shape {list(tensor.shape)} is on the meta device, so it has no values: "
            "create it on the CPU or a GPU"
        )
        raise ConfigError(msg)
    reach = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((n - 1) * stride for n, stride in reach)
    nbytes = tensor.untyped_storage().nbytes()
    if tensor.numel() and (last + 1) * tensor.element_size() > nbytes:
        msg = (
            f"tensor of shape {list(tensor.shape)} is larger than its memory of {nbytes} bytes, "
            "which was perhaps freed: pass a tensor with its storage"
        )
        raise ConfigError(msg)


def check_tensors(tensors: Any) -> None:
    """Check the tensors of a grouped operation.

    Raises:
        ConfigError: The list is empty, or one of the tensors cannot be sent.
    """
    if not isinstance(tensors, list | tuple):
        msg = (
            f"grouped operations work on a list of tensors, got {type(tensors).__name__}: pass a "
            "list"
        )
        raise ConfigError(msg)
    if not tensors:
        msg = "the list of tensors is empty: pass at least one"
        raise ConfigError(msg)
    for tensor in tensors:
        check_tensor(tensor)


def factor(value: Any, what: str) -> float:
    """Return a prescale or postscale factor as a float; `what` names it in errors.

    Raises:
        ConfigError: The value is not a number.
    """
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError of tensors
        number = math.nan
    if math.isnan(number):
        msg = f"{what} must be a number, got {repr(value)[:100]}"
        raise ConfigError(msg)
    return number


def root_of(root_rank: int, process_set: ProcessSet) -> int:
    """Return the position in a process set of the root, which is given as a global rank.

    Raises:
        ConfigError: The root is not in the set.
    """
    ranks = process_set.member.ranks
    if root_rank not in ranks:
        msg = f"root_rank must be one of the ranks {list(ranks)}, got {root_rank}"
        raise ConfigError(msg)
    return ranks.index(root_rank)


def splits_of(tensor: torch.Tensor, splits: Any, size: int) -> tuple[int, ...]:
    """Return the number of rows for each of `size` ranks.

    Args:
        tensor: Tensor with the rows to send.
        splits: Numbers of rows from the caller; equal numbers when None.
        size: Number of ranks.

    Raises:
        ConfigError: The splits do not fit the rows or the ranks.
    """
    rows = tensor.shape[0] if tensor.dim() else -1
    if splits is None:
        if rows < 0 or rows % size:
            given_rows = "a scalar" if rows < 0 else f"{rows} rows"
            msg = f"{given_rows} cannot be divided equally among {size} ranks: pass splits"
            raise ConfigError(msg)
        return (rows // size,) * size
    if rows < 0:
        msg = "a scalar cannot be split by rows: pass a tensor with a dim 0"
        raise ConfigError(msg)
    shares = _whole_numbers(splits)
    if len(shares) != size or min(shares) < 0 or sum(shares) != rows:
        msg = (
            f"splits must list the rows for each of {size} ranks and add up to the {rows} rows "
            f"of dim 0, got {_short(shares)}, which add up to {sum(shares)}"
        )
        raise ConfigError(msg)
    return shares


def _whole_numbers(splits: Any) -> tuple[int, ...]:
    numbers = splits.tolist() if isinstance(splits, torch.Tensor) else splits
    try:
        shares = tuple(operator.index(share) for share in numbers)
    except TypeError as error:
        what = type(splits).__name__
        if isinstance(splits, torch.Tensor):
            what = f"a tensor of {splits.dtype} and shape {list(splits.shape)}"
        msg = f"splits must be whole numbers, one for each rank, got {what}"
        raise ConfigError(msg) from error
    return shares


def _short(shares: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shares[:8]))}{', ...' if len(shares) > 8 else ''}]"
