"""Dtypes and memory of sharded parameters, under the names of FSDP2.

The policies of `torch.distributed.fsdp` are accepted as well: only their attributes are used.
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
    """Dtypes of a sharded model.

    Attributes:
        param_dtype: Dtype in which parameters are gathered and used; None for the model's dtype.
            The optimizer updates parameters in the model's dtype.
        reduce_dtype: Dtype in which gradients are summed; None for `param_dtype`.
        output_dtype: Dtype of floating-point outputs of the model; None for no conversion.
        cast_forward_inputs: Whether floating-point inputs of units are converted to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    """Offload policy that keeps everything on the device."""


@dataclass(frozen=True, slots=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Offload policy that keeps pieces, their gradients and optimizer states in host memory.

    Attributes:
        pin_memory: Whether host memory is pinned, so that copies overlap with computation.
    """

    pin_memory: bool = True


@dataclass(frozen=True, slots=True)
class DiskOffloadPolicy(CPUOffloadPolicy):
    """Offload policy that also moves optimizer states to memory-mapped files, from step 1 on.

    Attributes:
        directory: Directory of the files, on a local disk; each rank creates one below it.
    """

    directory: str | Path = ""

    def __post_init__(self) -> None:
        if not str(self.directory):
            msg = "DiskOffloadPolicy needs a directory for its files: pass directory=..."
            raise ConfigError(msg)


def precision_of(policy: Any) -> MixedPrecisionPolicy:
    """Return a policy of dtypes, converted from torch's policy if necessary.

    Raises:
        ConfigError: The type of the argument is not supported.
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
    """Return an offload policy, converted from torch's policy if necessary.

    Raises:
        ConfigError: The type of the argument is not supported.
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
