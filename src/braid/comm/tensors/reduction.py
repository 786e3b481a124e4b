"""Reductions in the order of ranks, so that every rank gets the same bits.

Floating-point addition is not associative. If the order of a sum depends on arrival, on the
algorithm or on the rank, results differ between ranks and between runs. Here the order is 0, 1,
..., n-1 everywhere, as in a loop in one process. float16 and bfloat16 are combined, divided and
scaled in float32 and rounded once at the end (a sum of two is rounded once in any case), so the
sum behind an average never overflows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from braid.errors import ConfigError
from braid.programs.reductions import refusal
from braid.types import dtype_name

__all__ = ["OPS", "check_op", "combine", "early_factor", "finish", "identity"]

Combine = Callable[..., torch.Tensor]

OPS: dict[str, Combine] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_WIDENED = (torch.float16, torch.bfloat16)


def check_op(op: str, dtype: torch.dtype) -> None:
    """Raise for a reduction that is unknown or not defined for `dtype`.

    Raises:
        ConfigError: The message contains the possible reductions.
    """
    if op not in OPS:
        msg = f"there is no reduction {op!r}: choose one of {', '.join(OPS)}"
        raise ConfigError(msg)
    if why := refusal(op, dtype_name(dtype)):
        raise ConfigError(why)


def identity(op: str, x: torch.Tensor) -> torch.Tensor:
    """Return the identity of a reduction, in the shape of `x`.

    Raises:
        ConfigError: `op` has no identity that every dtype can represent.
    """
    if op in {"sum", "bor", "bxor"}:
        return torch.zeros_like(x)
    if op == "product":
        return torch.ones_like(x)
    msg = (
        f"an exclusive scan has no result for rank 0 with op {op!r}: use sum, product, bor or bxor"
    )
    raise ConfigError(msg)


def combine(
    sources: Sequence[torch.Tensor], out: torch.Tensor, op: str, scale: float | None
) -> None:
    """Reduce `sources` in order into `out`.

    Args:
        sources: One tensor per rank. Only the first or the second of them may be `out` itself.
        out: Result.
        op: Name of the reduction.
        scale: Factor for the result; None for no factor.
    """
    apply = OPS[op]
    if len(sources) == 1:
        if out.data_ptr() != sources[0].data_ptr():
            out.copy_(sources[0])
    elif out.dtype in _WIDENED and (len(sources) > 2 or op == "avg" or scale is not None):
        wide = sources[0].float()
        for source in sources[1:]:
            apply(wide, source, out=wide)
        finish(wide, op, len(sources), scale)
        out.copy_(wide)
        return
    else:
        apply(sources[0], sources[1], out=out)
        for source in sources[2:]:
            apply(out, source, out=out)
    if op == "avg" or scale is not None:
        finish(out, op, len(sources), scale)


def early_factor(dtype: torch.dtype, op: str, scale: float | None, count: int) -> float | None:
    """Return the factor to apply before a sum of `count` numbers in stages; None for no factor.

    16-bit numbers that are rounded between stages are scaled first, so that no partial sum
    overflows.
    """
    if dtype not in _WIDENED or op not in {"sum", "avg"} or (op == "sum" and scale is None):
        return None
    factor = 1.0 if scale is None else scale
    return factor / count if op == "avg" else factor


def finish(x: torch.Tensor, op: str, count: int, scale: float | None) -> None:
    """Convert a sum to the result: divide by `count` for `avg`, multiply by `scale`."""
    if op == "avg" and count > 1:
        if x.is_floating_point() or x.is_complex():
            x.div_(count)
        else:
            x.copy_(torch.div(x, count, rounding_mode="trunc"))
    if scale is not None:
        x.mul_(scale)
