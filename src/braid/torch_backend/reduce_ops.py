"""torch's reductions by braid's names.

`ReduceOp.SUM` is a `RedOpType`, `options.reduceOp` is a `ReduceOp` that wraps one, and `RedOpType.SUM == ReduceOp(SUM)` is
False while the reverse is True. So operations are looked up by the wrapped value, never compared.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed.distributed_c10d import ReduceOp

from braid.errors import ConfigError

__all__ = ["Reduction", "reduction"]

_KINDS = ReduceOp.RedOpType
_NAMES: dict[Any, str] = {
    _KINDS.SUM: "sum",
    _KINDS.AVG: "avg",
    _KINDS.PRODUCT: "product",
    _KINDS.MIN: "min",
    _KINDS.MAX: "max",
    _KINDS.BAND: "band",
    _KINDS.BOR: "bor",
    _KINDS.BXOR: "bxor",
}


class Reduction(NamedTuple):
    """A reduction of braid, and what every rank multiplies its own part with before (PREMUL_SUM)."""

    op: str
    factor: float | torch.Tensor | None = None


_REDUCTIONS = {kind: Reduction(name) for kind, name in _NAMES.items()}


def reduction(op: Any) -> Reduction:
    """Translate a `ReduceOp` or `RedOpType`.

    Raises:
        ConfigError: torch has invented another one.
    """
    kind = getattr(op, "op", op)
    known = _REDUCTIONS.get(kind)
    if known is not None:
        return known
    if kind == _KINDS.PREMUL_SUM:
        return Reduction("sum", op.factor if hasattr(op, "factor") else op.__getstate__()[1])
    msg = (
        f"expected a reduction out of {', '.join(k.name for k in _NAMES)}, PREMUL_SUM, found {op!r}"
    )
    raise ConfigError(msg)
