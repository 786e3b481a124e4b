"""Base classes of layers with a weight divided among ranks: their group and initialization.

Weights are initialized as in Megatron: with `use_cpu_initialization` every rank draws the whole
weight and keeps its part; otherwise each rank draws its part from its state of the tracker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from braid.comm import Group
from braid.compat.megatron.failure import UnsupportedError
from braid.compat.megatron.groups import braid_group
from braid.compat.megatron.model_parallel_config import ModelParallelConfig, check_served
from braid.compat.megatron.tensor_parallel.attributes import set_tensor_model_parallel_attributes
from braid.compat.megatron.tensor_parallel.rng_tracker import (
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
)
from braid.compat.megatron.utils import divide, get_tensor_model_parallel_group_if_none
from braid.parallel.tensor_parallel import Slicing

__all__ = ["DividedLayer", "DividedLinear", "InitMethod"]

InitMethod = Callable[[torch.Tensor], Any]


class DividedLayer(nn.Module):
    """Layer with a weight sharded over tensor parallel ranks.

    Args:
        config: Megatron's configuration of the model.
        tp_group: Process group of the ranks; the tensor parallel group when None.
        is_expert: Whether the layer belongs to an expert, which has a separate group.
    """

    def __init__(self, config: ModelParallelConfig, tp_group: Any, *, is_expert: bool) -> None:
        super().__init__()
        check_served(config)
        self.config = config
        self.is_expert = is_expert
        self.expert_parallel = config.expert_model_parallel_size > 1
        self.tp_group = get_tensor_model_parallel_group_if_none(tp_group, is_expert)
        size = self.group.size
        self.explicit_expert_comm = is_expert and (size > 1 or self.expert_parallel)
        self.master_weight: torch.Tensor | None = None

    @property
    def group(self) -> Group:
        """Braid's group of the layer's tensor parallel ranks, for `tp_group`."""
        return braid_group(self.tp_group)

    def _device(self) -> torch.device:
        on_cpu = self.config.use_cpu_initialization or not torch.cuda.is_available()
        return torch.device("cpu" if on_cpu else "cuda")

    def make_weight(
        self,
        shape: tuple[int, int],
        slicing: Slicing,
        init_method: InitMethod,
        *,
        keep_master_weight: bool = False,
    ) -> nn.Parameter:
        """Return this rank's shard of a weight.

        Args:
            shape: Shape of the whole weight.
            slicing: Dim that is sharded.
            init_method: Function that initializes a tensor in place.
            keep_master_weight: Whether to keep the whole weight in `master_weight`.
        """
        config, group = self.config, self.group
        part = list(shape)
        part[slicing.dim] = divide(shape[slicing.dim], group.size)
        divide(part[slicing.dim], slicing.blocks)
        weight = nn.Parameter(torch.empty(part, dtype=config.params_dtype, device=self._device()))
        set_tensor_model_parallel_attributes(weight, True, slicing.dim, slicing.blocks)
        if not config.perform_initialization:
            return weight
        if config.use_cpu_initialization:
            master = torch.empty(shape, dtype=torch.float32)
            init_method(master)
            with torch.no_grad():
                weight.copy_(slicing.part_of(master, group.rank, group.size))
            self.master_weight = master.to(config.params_dtype) if keep_master_weight else None
        else:
            state = [get_expert_parallel_rng_tracker_name()] if self.is_expert else []
            with get_cuda_rng_tracker().fork(*state):
                init_method(weight)
        return weight

    def make_bias(self, length: int) -> nn.Parameter:
        """Return a bias of zeros."""
        bias = nn.Parameter(
            torch.empty(length, dtype=self.config.params_dtype, device=self._device())
        )
        if self.config.perform_initialization:
            nn.init.zeros_(bias)
        return bias

    def mark(self, *params: nn.Parameter | None) -> None:
        """Set Megatron's attribute `allreduce`: whether data parallelism averages the gradients."""
        for param in params:
            if param is not None:
                param.__dict__["allreduce"] = not (self.is_expert and self.expert_parallel)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise, since Megatron's `dist_checkpointing` is not supported."""
        del args, kwargs
        msg = (
            "sharded_state_dict belongs to megatron.core.dist_checkpointing, which is not "
            "supported: save the state_dict() of each rank, or save the model with braid.save"
        )
        raise UnsupportedError(msg)


class DividedLinear(DividedLayer):
    """Linear layer with a sharded weight; state dicts have Megatron's entry `_extra_state`."""

    def __init__(self, config: ModelParallelConfig, tp_group: Any, *, is_expert: bool) -> None:
        super().__init__(config, tp_group, is_expert=is_expert)
        self.register_load_state_dict_pre_hook(_with_extra_state)  # type: ignore[no-untyped-call]

    def set_extra_state(self, state: Any) -> None:
        """Do nothing: the layer has no extra state."""

    def get_extra_state(self) -> None:
        """Return None, so that checkpoints have Megatron's key."""
        return

    def backward_dw(self) -> None:
        """Do nothing: gradients of weights are not delayed."""


def _with_extra_state(
    module: nn.Module,  # noqa: ARG001 - torch's signature of hooks
    state_dict: dict[str, Any],
    prefix: str,
    *args: Any,  # noqa: ARG001
) -> None:
    state_dict.setdefault(f"{prefix}_extra_state", None)
