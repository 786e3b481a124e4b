"""Options of sharding, checked when they are set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from braid.errors import raise_all
from braid.parallel.sharding.flat_shard import Dtypes
from braid.parallel.sharding.layouts import STAGES
from braid.parallel.sharding.policies import CPUOffloadPolicy, OffloadPolicy

__all__ = ["ShardingOptions"]

NOT_OFFLOADED = OffloadPolicy()


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingOptions:
    """Options of sharding.

    Attributes:
        stage: 1 (optimizer states sharded), 2 (gradients as well) or 3 (parameters as well).
        units: Modules with parameters that are gathered together; None for the elements of the
            outermost ModuleLists.
        whole: Whether each parameter belongs to one rank, for optimizers that use shapes or norms;
            if False, all ranks own the same number of elements.
        reshard_after_forward: Whether parameters are freed between forward and backward, at stage
            3; None for all units but the root and the last one.
        param_dtype: Dtype of parameters in forward and backward; None for the model's dtype.
        reduce_dtype: Dtype in which gradients are summed; None for the dtype of parameters in
            backward.
        master_dtype: Dtype of the optimizer's pieces; None for the model's dtype.
        offload: Policy for the memory of the pieces and of the optimizer's states: device, host or
            disk.
        ignored: Names of parameters that are not sharded.
        init_sync: Whether values of the first rank are copied to all ranks, including buffers.
    """

    stage: int = 3
    units: Sequence[nn.Module] | None = None
    whole: bool = False
    reshard_after_forward: bool | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    master_dtype: torch.dtype | None = None
    offload: OffloadPolicy = NOT_OFFLOADED
    ignored: frozenset[str] = frozenset()
    init_sync: bool = True

    def __post_init__(self) -> None:
        problems = []
        if self.stage not in STAGES:
            problems.append(f"stage must be 1, 2 or 3, got {self.stage!r}")
        for name in ("param_dtype", "reduce_dtype", "master_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (
                isinstance(dtype, torch.dtype) and dtype.is_floating_point
            ):
                problems.append(f"{name} must be a floating-point dtype, got {dtype!r}")
        if self.stage != STAGES[-1] and self.param_dtype is not None:
            problems.append(
                f"param_dtype={self.param_dtype} needs stage 3, got stage {self.stage}: call "
                "model.to(dtype) instead, and pass master_dtype=torch.float32"
            )
        raise_all(problems)

    def dtypes_of(self, dtype: torch.dtype) -> Dtypes:
        """Return the dtypes in which a flat vector of parameters is computed, kept and reduced."""
        compute = self.param_dtype or dtype
        return Dtypes(
            compute=compute,
            master=self.master_dtype or dtype,
            reduce=self.reduce_dtype or compute,
            on_host=isinstance(self.offload, CPUOffloadPolicy),
            pinned=isinstance(self.offload, CPUOffloadPolicy) and self.offload.pin_memory,
        )

    def in_common(self) -> dict[str, object]:
        """Return the options that must be equal on all ranks, in a form that compares as text."""
        names = ("stage", "whole", "reshard_after_forward", "param_dtype", "reduce_dtype")
        common = {name: getattr(self, name) for name in names}
        common["master_dtype"] = self.master_dtype
        common["ignored"] = sorted(self.ignored)
        return common
