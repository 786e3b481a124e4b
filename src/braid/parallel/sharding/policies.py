"""Data types and places of sharded parameters, under the names that FSDP2's users know.

The policies of `torch.distributed.fsdp` are accepted as well: only their attributes are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from braid.errors import ConfigError

__all__ = [
    "CPUOffloadPolicy",
    "DiskOffloadPolicy",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "offload_of",
    "precision_of",
]


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """Data types of a sharded model.

    Attributes:
        param_dtype: Data type in which parameters are gathered and compute; their own when None.
            The optimizer changes them in their own.
        reduce_dtype: Data type in which gradients are summed; `param_dtype` when None.
        output_dtype: Data type of floating-point outputs of the model; as they are when None.
        cast_forward_inputs: Whether floating-point inputs of units are converted to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    """A policy that offloads nothing."""


@dataclass(frozen=True, slots=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Pieces of parameters, their gradients and the optimizer's states are in the host's memory.

    Attributes:
        pin_memory: Whether that memory is pinned, so that copies overlap with computation.
    """

    pin_memory: bool = True


@dataclass(frozen=True, slots=True)
class DiskOffloadPolicy(CPUOffloadPolicy):
    """The optimizer's states are in files that are mapped into memory, from the first step on.

    Attributes:
        directory: Directory of the files, on a local disk; each rank makes one below it.
    """

    directory: str | Path = ""

    def __post_init__(self) -> None:
        if not str(self.directory):
            msg = "DiskOffloadPolicy needs the directory of its files: pass directory=..."
            raise ConfigError(msg)


def precision_of(policy: Any) -> MixedPrecisionPolicy:
    """Return a policy of data types, also from that of torch.

    Raises:
        ConfigError: The argument is something else.
    """
    if policy is None:
        return MixedPrecisionPolicy()
    try:
        return MixedPrecisionPolicy(
            policy.param_dtype,
            policy.reduce_dtype,
            policy.output_dtype,
            policy.cast_forward_inputs,
        )
    except AttributeError:
        msg = (
            f"mp_policy must be a MixedPrecisionPolicy, got {policy!r}: pass "
            "braid.parallel.sharding.MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
        )
        raise ConfigError(msg) from None


def offload_of(policy: Any) -> OffloadPolicy:
    """Return a policy of places, also from that of torch.

    Raises:
        ConfigError: The argument is something else.
    """
    if policy is None:
        return OffloadPolicy()
    if isinstance(policy, OffloadPolicy):
        return policy
    kind = type(policy).__name__
    if kind == "CPUOffloadPolicy":
        return CPUOffloadPolicy(pin_memory=bool(policy.pin_memory))
    if kind == "OffloadPolicy":
        return OffloadPolicy()
    msg = (
        f"offload_policy must be a CPUOffloadPolicy or DiskOffloadPolicy, got {policy!r}: pass one "
        "of braid.parallel.sharding, or None"
    )
    raise ConfigError(msg)
