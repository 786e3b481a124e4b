"""`megatron.core.tensor_parallel.layers`: linear layers divided among ranks.

A layer returns `(output, bias)`; the bias is None unless `skip_bias_add` is True, so that the
caller adds it.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from braid.compat.megatron.failure import UnsupportedError, UsageError
from braid.compat.megatron.model_parallel_config import ModelParallelConfig
from braid.compat.megatron.tensor_parallel.attributes import (
    copy_tensor_model_parallel_attributes,
    param_is_not_tensor_parallel_duplicate,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)
from braid.compat.megatron.tensor_parallel.divided_layer import DividedLinear, InitMethod
from braid.compat.megatron.tensor_parallel.embedding import VocabParallelEmbedding
from braid.compat.megatron.tensor_parallel.linear import (
    linear_with_frozen_weight,
    linear_with_grad_accumulation_and_async_allreduce,
)
from braid.compat.megatron.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from braid.compat.megatron.utils import part_size
from braid.errors import raise_all
from braid.parallel.tensor_parallel import Slicing

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "copy_tensor_model_parallel_attributes",
    "linear_with_frozen_weight",
    "linear_with_grad_accumulation_and_async_allreduce",
    "param_is_not_tensor_parallel_duplicate",
    "set_defaults_if_not_set_tensor_model_parallel_attributes",
    "set_tensor_model_parallel_attributes",
]

Output = tuple[torch.Tensor, torch.Tensor | None]


class ColumnParallelLinear(DividedLinear):
    """Linear layer with the output dimension sharded.

    Args:
        input_size: Number of input features.
        output_size: Number of output features over all ranks.
        config: Megatron's configuration of the model.
        init_method: Function that fills the weight in place. The bias is zero.
        bias: Whether to have a bias.
        gather_output: Whether each rank gets the whole output.
        stride: Number of packed matrices, such as 2 for gate and up.
        keep_master_weight_for_test: Whether to keep the whole weight in `master_weight`.
        skip_bias_add: Whether to return the bias instead of adding it.
        skip_weight_param_allocation: Whether the weight is passed to `forward`.
        embedding_activation_buffer: Must be None.
        grad_output_buffer: Must be None.
        is_expert: Whether the layer is a part of an expert.
        tp_comm_buffer_name: No effect.
        disable_grad_reduce: Whether to skip the all_reduce of input gradients.
        tp_group: Group of ranks; the tensor parallel group when None.

    Raises:
        UsageError: `output_size` is not divisible by the number of ranks.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: InitMethod,
        bias: bool = True,
        gather_output: bool = False,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        embedding_activation_buffer: list[torch.Tensor] | None = None,
        grad_output_buffer: list[torch.Tensor] | None = None,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,  # noqa: ARG002 - no effect in Megatron either
        disable_grad_reduce: bool = False,
        tp_group: Any = None,
    ) -> None:
        super().__init__(config, tp_group, is_expert=is_expert)
        if embedding_activation_buffer is not None or grad_output_buffer is not None:
            msg = (
                "embedding_activation_buffer and grad_output_buffer are not supported, as "
                "gradients of weights are never delayed: leave them out"
            )
            raise UnsupportedError(msg)
        self.input_size, self.output_size = input_size, output_size
        self.gather_output, self.skip_bias_add = gather_output, skip_bias_add
        self.disable_grad_reduce = disable_grad_reduce
        size = self.group.size
        self.output_size_per_partition = part_size("output_size", output_size, size)
        self.weight: nn.Parameter | None = None
        if not skip_weight_param_allocation:
            self.weight = self.make_weight(
                (output_size, input_size),
                Slicing(0, stride),
                init_method,
                keep_master_weight=keep_master_weight_for_test,
            )
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = self.make_bias(self.output_size_per_partition)
            set_tensor_model_parallel_attributes(self.bias, True, 0, stride)
        self.mark(self.weight, self.bias)
        self.sequence_parallel = config.sequence_parallel and size > 1
        if config.sequence_parallel and size == 1:
            msg = "`sequence_parallel` has no effect in a tensor parallel group of 1 rank"
            warnings.warn(msg, stacklevel=2)
        self.allreduce_dgrad = size > 1 and not self.sequence_parallel and not disable_grad_reduce

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> Output:
        """Return outputs and bias.

        Args:
            input_: Input, shape [positions, batch, input_size]; with sequence parallelism this
                rank's positions.
            weight: Weight to use instead of the layer's weight.
            runtime_gather_output: Overrides `gather_output`.
        """
        used_weight = self.weight if weight is None else weight
        if used_weight is None:
            msg = (
                "weight was not supplied to ColumnParallelLinear forward pass, and "
                "skip_weight_param_allocation is True: pass weight="
            )
            raise UsageError(msg)
        expected = (self.output_size_per_partition, self.input_size)
        if tuple(used_weight.shape) != expected:
            msg = (
                f"supplied weight's shape is {tuple(used_weight.shape)}, not {expected} as expected"
            )
            raise UsageError(msg)
        output = linear_with_grad_accumulation_and_async_allreduce(
            input_,
            used_weight,
            None if self.skip_bias_add else self.bias,
            gradient_accumulation_fusion=False,
            allreduce_dgrad=self.allreduce_dgrad and not self.explicit_expert_comm,
            sequence_parallel=self.sequence_parallel and not self.explicit_expert_comm,
            tp_group=self.tp_group,
        )
        gather = self.gather_output if runtime_gather_output is None else runtime_gather_output
        if gather:
            output = gather_from_tensor_model_parallel_region(output, self.tp_group)
        return output, self.bias if self.skip_bias_add else None

    def extra_repr(self) -> str:
        """Return the sizes of the layer for `repr`, in Megatron's format."""
        return (
            f"in_features={self.input_size}, out_features={self.output_size}, "
            f"bias={self.bias is not None}, TP={self.output_size // self.output_size_per_partition}"
        )


class RowParallelLinear(DividedLinear):
    """Linear layer with the input dimension sharded; ranks compute partial sums of the output.

    Args:
        input_size: Number of input features over all ranks.
        output_size: Number of output features.
        config: Megatron's configuration of the model.
        init_method: Function that fills the weight in place. The bias is zero.
        bias: Whether to have a bias, which is replicated on all ranks.
        input_is_parallel: Whether the input is sharded already; otherwise it is split here.
        skip_bias_add: Whether to return the bias instead of adding it.
        stride: Number of packed matrices.
        keep_master_weight_for_test: Whether to keep the whole weight in `master_weight`.
        is_expert: Whether the layer is a part of an expert.
        tp_comm_buffer_name: No effect.
        tp_group: Group of ranks; the tensor parallel group when None.

    Raises:
        UsageError: `input_size` is not divisible by the number of ranks, or options contradict
            each other.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: InitMethod,
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,  # noqa: ARG002 - no effect in Megatron either
        tp_group: Any = None,
    ) -> None:
        super().__init__(config, tp_group, is_expert=is_expert)
        self.input_size, self.output_size = input_size, output_size
        self.input_is_parallel, self.skip_bias_add = input_is_parallel, skip_bias_add
        self.sequence_parallel = config.sequence_parallel
        problems = []
        if self.sequence_parallel and not input_is_parallel:
            problems.append("sequence_parallel=True needs input_is_parallel=True: pass both")
        if self.explicit_expert_comm and not skip_bias_add:
            problems.append("is_expert=True needs skip_bias_add=True: pass both")
        raise_all(problems, UsageError)
        self.input_size_per_partition = part_size("input_size", input_size, self.group.size)
        self.weight = self.make_weight(
            (output_size, input_size),
            Slicing(1, stride),
            init_method,
            keep_master_weight=keep_master_weight_for_test,
        )
        self.bias = self.make_bias(output_size) if bias else None
        if self.bias is not None:
            self.bias.__dict__["sequence_parallel"] = self.sequence_parallel
        self.mark(self.weight, self.bias)

    def forward(self, input_: torch.Tensor) -> Output:
        """Return outputs and bias; with sequence parallelism only this rank's positions."""
        if not self.input_is_parallel:
            input_ = scatter_to_tensor_model_parallel_region(input_, self.tp_group)
        if input_.shape[-1] != self.input_size_per_partition:
            msg = (
                f"a row-parallel layer has {self.input_size_per_partition} of {self.input_size} "
                f"inputs on this rank, got {input_.shape[-1]}: the layer in front of it must be "
                "column-parallel with gather_output=False, or pass input_is_parallel=False"
            )
            raise UsageError(msg)
        term = functional.linear(input_, self.weight)
        if self.explicit_expert_comm:
            output = term
        elif self.sequence_parallel:
            output = reduce_scatter_to_sequence_parallel_region(term, self.tp_group)
        else:
            output = reduce_from_tensor_model_parallel_region(term, self.tp_group)
        if self.skip_bias_add:
            return output, self.bias
        return output if self.bias is None else output + self.bias, None

    def extra_repr(self) -> str:
        """Return the sizes of the layer for `repr`, in Megatron's format."""
        return (
            f"in_features={self.input_size}, out_features={self.output_size}, "
            f"bias={self.bias is not None}, TP={self.input_size // self.input_size_per_partition}"
        )
