"""Reductions over the tensors of all ranks: Average, Sum, Adasum, Min, Max and Product."""

from __future__ import annotations

import enum
import warnings
from typing import Any

import torch

from braid.errors import ConfigError

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "Sum",
    "chosen_op",
    "engine_op",
]


class ReduceOp(enum.IntEnum):
    """Reduction of the tensors of all ranks."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

ADASUM_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def chosen_op(op: Any, average: Any = None) -> ReduceOp:
    """Return the reduction for `op` or the older `average`.

    Raises:
        ConfigError: Both are passed, or `op` is not a reduction.
    """
    if average is not None:
        if op is not None:
            msg = (
                f"op={op!r} and average={average!r} were both passed: pass op only, average is "
                "deprecated"
            )
            raise ConfigError(msg)
        warnings.warn(
            "average= is deprecated: pass op=hvd.Average or op=hvd.Sum",
            DeprecationWarning,
            stacklevel=4,  # the program calls an operation, which calls another function
        )
        return Average if average else Sum
    if op is None:
        return Average
    try:
        return ReduceOp(op)
    except ValueError as error:
        msg = f"op must be Average, Sum, Adasum, Min, Max or Product, got {op!r}"
        raise ConfigError(msg) from error


def engine_op(op: ReduceOp, tensor: torch.Tensor) -> str:
    """Return the name under which braid's engine knows a reduction.

    Raises:
        ConfigError: Adasum does not support the dtype.
    """
    if op is Adasum and tensor.dtype not in ADASUM_DTYPES:
        msg = (
            f"Adasum needs a floating-point tensor of at least 16 bits, got {tensor.dtype}: "
            "convert it"
        )
        raise ConfigError(msg)
    return "avg" if op is Average else op.name.lower()
