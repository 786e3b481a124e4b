"""torch's reductions by braid's names.

`ReduceOp.SUM` is a `RedOpType`, `options.reduceOp` is a `ReduceOp` that wraps one, and
`RedOpType.SUM == ReduceOp(SUM)` is False while the reverse is True. So operations are looked up by
their number, never compared.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed.distributed_c10d import ReduceOp

from braid.errors import ConfigError

__all__ = ["Reduction", "reduction"]

_KINDS: Any = ReduceOp.RedOpType
_NAMES = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")


class Reduction(NamedTuple):
    """A reduction of braid, and the factor of each rank's own part (PREMUL_SUM)."""

    op: str
    factor: float | torch.Tensor | None = None


# by hash, which is the number of both kinds: to unwrap one costs as much as a synchronisation
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
    msg = f"reduction {op!r} is unknown: choose out of {', '.join(_NAMES)}, premul_sum"
    raise ConfigError(msg)
