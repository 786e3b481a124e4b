"""Linear layers with the weight sharded over ranks, by outputs or by inputs.

    column   Y = X [A1 A2]            each rank has some columns of Y       f before the layer
    row      Y = [X1 X2] [A1; A2]     each rank has a partial sum of Y      g after the layer

f returns X unchanged, and sums the gradients of X over ranks; g sums the partial results Y, and
returns the gradient unchanged. A column layer followed by a row layer, with elementwise operations
between them, costs one all_reduce forward and one backward. The bias of a row layer is added once,
after the sum.

    MLP        X ─ f ─▶ A (column) ─▶ gelu ─▶ B (row) ─ g ─▶ Y
    attention  X ─ f ─▶ QKV (column, whole heads) ─▶ attention ─▶ projection (row) ─ g ─▶ Y

Source: M. Shoeybi et al., Megatron-LM: training multi-billion parameter language models using model
parallelism, 2019, section 3.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from braid.comm import Group
from braid.comm.autograd import (
    all_gather_forward_split_backward,
    all_reduce_forward_identity_backward,
    identity_forward_all_reduce_backward,
    split_forward_all_gather_backward,
)
from braid.errors import ConfigError
from braid.parallel.gradients.incomplete import PartOfModel, mark_part
from braid.parallel.tensor_parallel.slices import Slicing
from braid.runtime.torch_internals import version_of

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "autocast_inputs",
    "column_linear",
    "slice_param",
]

CALLS = PartOfModel(
    "braid.parallel.tensor_parallel.clip_grad_norm_(model, max_norm, group)",
    "braid.parallel.gradients.AgreedGradScaler([group], device)",
)


class ColumnParallelLinear(nn.Linear):
    """Linear layer with the output dimension sharded: each rank computes some outputs.

    Args:
        in_features: Length of an input.
        out_features: Length of an output over all ranks.
        group: Ranks that share the layer.
        bias: Whether the layer has a bias.
        gather_output: Whether to gather the whole output on each rank.
        blocks: Number of packed matrices, such as 3 for query, key and value.

    Raises:
        ConfigError: `out_features` cannot be divided; the message has the valid numbers of ranks.
    """

    group: Group
    gather_output: bool
    shares_input: bool
    slicing: Slicing

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: Group,
        *,
        bias: bool = True,
        gather_output: bool = False,
        blocks: int = 1,
    ) -> None:
        super().__init__(in_features, out_features, bias)
        self.shard(self, group, gather_output=gather_output, blocks=blocks)

    @classmethod
    def shard(
        cls,
        linear: nn.Linear,
        group: Group,
        *,
        gather_output: bool = False,
        blocks: int = 1,
        shares_input: bool = False,
        name: str = "out_features",
    ) -> ColumnParallelLinear:
        """Shard a layer in place: the object, its parameters and their names are kept.

        Args:
            linear: Layer, equal on all ranks.
            group: Ranks that share the layer.
            gather_output: See the class.
            blocks: See the class.
            shares_input: Whether other column layers have the same input, for example query, key
                and value: their gradients of the input are then summed before one all_reduce.
            name: Name of the layer in messages.
        """
        slicing = Slicing(0, blocks)
        slicing.check(name, linear.out_features, group.size)
        linear.__class__ = cls
        layer = cast("ColumnParallelLinear", linear)
        layer.group, layer.gather_output, layer.slicing = group, gather_output, slicing
        layer.shares_input = shares_input
        slice_param(layer.weight, slicing, group)
        if layer.bias is not None:
            slice_param(layer.bias, slicing, group)
        layer.out_features //= group.size
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's outputs, or all of them with `gather_output`."""
        if self.shares_input:
            y = functional.linear(_shared_f(self.group, x), self.weight, self.bias)
        else:
            y = column_linear(self.group, x, self.weight, self.bias)
        if not self.gather_output:
            return y
        gathered = all_gather_forward_split_backward(self.group, y, dim=y.dim() - 1)
        if self.slicing.blocks == 1:
            return gathered
        return self.slicing._replace(dim=gathered.dim() - 1).whole_of(
            list(gathered.chunk(self.group.size, -1))
        )

    def extra_repr(self) -> str:
        """Return the sizes of this rank, for `repr`."""
        return f"{super().extra_repr()}, rank {self.group.rank} of {self.group.size}"


class RowParallelLinear(nn.Linear):
    """Linear layer with the input dimension sharded; each rank computes a partial output.

    Args:
        in_features: Length of an input over all ranks.
        out_features: Length of an output.
        group: Ranks that share the layer.
        bias: Whether the layer has a bias, which is replicated on all ranks.
        input_is_parallel: Whether inputs are sharded already; otherwise the layer splits them.

    Raises:
        ConfigError: `in_features` cannot be divided; the message has the valid numbers of ranks.
    """

    group: Group
    input_is_parallel: bool
    slicing: Slicing

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: Group,
        *,
        bias: bool = True,
        input_is_parallel: bool = True,
    ) -> None:
        super().__init__(in_features, out_features, bias)
        self.shard(self, group, input_is_parallel=input_is_parallel)

    @classmethod
    def shard(
        cls,
        linear: nn.Linear,
        group: Group,
        *,
        input_is_parallel: bool = True,
        name: str = "in_features",
    ) -> RowParallelLinear:
        """Shard a layer in place; see `ColumnParallelLinear.shard`."""
        slicing = Slicing(1)
        slicing.check(name, linear.in_features, group.size)
        linear.__class__ = cls
        layer = cast("RowParallelLinear", linear)
        layer.group, layer.input_is_parallel, layer.slicing = group, input_is_parallel, slicing
        slice_param(layer.weight, slicing, group)
        layer.in_features //= group.size
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the whole output."""
        if not self.input_is_parallel:
            x = split_forward_all_gather_backward(self.group, x, dim=x.dim() - 1)
        if x.shape[-1] != self.in_features:
            msg = (
                f"a row-parallel layer has {self.in_features} of "
                f"{self.in_features * self.group.size} inputs on this rank, got {x.shape[-1]}: the "
                "layer before it must be column-parallel, or pass input_is_parallel=False"
            )
            raise ConfigError(msg)
        term = functional.linear(x, self.weight)
        y = all_reduce_forward_identity_backward(self.group, term)
        bias: torch.Tensor | None = self.bias
        return y if bias is None else y + bias

    def extra_repr(self) -> str:
        """Return the sizes of this rank, for `repr`."""
        return f"{super().extra_repr()}, rank {self.group.rank} of {self.group.size}"


def column_linear(
    group: Group, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return this rank's outputs of a linear layer; backward sums the gradient of `x` over ranks.

    Args:
        group: Ranks that share the layer.
        x: Whole input.
        weight: Rows of the weight for this rank's outputs.
        bias: This rank's part of the bias.

    Backward: the all_reduce of the gradient of `x` overlaps with the gradient of the weight.
    """
    y = _Column.apply(group, *autocast_inputs(x, weight, bias))  # type: ignore[no-untyped-call]
    return cast("torch.Tensor", y)


def autocast_inputs(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the arguments of a linear layer in autocast's dtype, if autocast is enabled.

    Autocast does not apply to the backward of a layer that computes its own gradients.
    """
    kind = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return x, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _shared_f(group: Group, x: torch.Tensor) -> torch.Tensor:
    """Return f of a tensor, the same result object for each layer with this input."""
    kept = x.__dict__.get("braid_shared")
    if kept is None or kept[0] is not group or kept[2:] != (version_of(x), torch.is_grad_enabled()):
        y = identity_forward_all_reduce_backward(group, x) if torch.is_grad_enabled() else x
        if y is x:
            return x
        kept = x.__dict__["braid_shared"] = (group, y, version_of(x), True)
    return cast("torch.Tensor", kept[1])


def slice_param(param: torch.Tensor, slicing: Slicing, group: Group) -> None:
    """Replace a parameter and its gradient by this rank's shard; no-op if already sharded.

    Raises:
        ConfigError: The parameter is shared, and another layer has sharded it in another way.
    """
    known = getattr(param, "braid_slicing", None)
    if known is not None:
        if known == slicing:
            return
        msg = (
            f"a parameter of shape {list(param.shape)} that layers share is sharded as {known}, "
            f"but should be sharded as {slicing}: give shared parameters the same entry in the "
            "plan"
        )
        raise ConfigError(msg)
    grad, param.grad = param.grad, None
    param.data = slicing.part_of(param.data, group.rank, group.size)
    if grad is not None:
        param.grad = slicing.part_of(grad, group.rank, group.size)
    param.__dict__["braid_slicing"] = slicing
    if group.size > 1:
        part = f"tensor shard {group.rank} of {group.size}"
        mark_part(param, CALLS._replace(part=part))


class _Column(torch.autograd.Function):
    """Linear layer after f; the all_reduce of f overlaps with the gradient of the weight."""

    @staticmethod
    def forward(
        ctx: Any, group: Group, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.group, ctx.has_bias = group, bias is not None
        ctx.save_for_backward(x, weight)
        return functional.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[1:]
        grad_x = work = None
        if needs_x:
            grad_x = grad @ weight
            work = ctx.group.starting().all_reduce(grad_x, async_op=True)
        rows = grad.flatten(0, -2) if grad.dim() > 1 else grad.unsqueeze(0)
        inputs = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
        grad_weight = rows.t() @ inputs if needs_weight else None
        grad_bias = rows.sum(0) if ctx.has_bias and needs_bias else None
        if work is not None:
            work.wait()
        return None, grad_x, grad_weight, grad_bias
