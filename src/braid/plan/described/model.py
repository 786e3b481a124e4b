"""Costs of a model with counted operations on a described device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from braid.plan.costs import MicrobatchCost, Origin
from braid.plan.described.operations import DescribedOperation, LayerOperations
from braid.programs.topology import Device

__all__ = ["DescribedModel"]

READ_AGAIN = 1.5  # a backward reads a gradient and what was kept, and writes a gradient


class DescribedModel:
    """Costs of a model's layers, estimated from counted operations.

    The time of an operation is the larger of its compute time and its memory time, plus a constant.
    Backward computes each matrix product twice: for a product with a weight, once for the input's
    gradient and once for the weight's. Any other operation reads one tensor more than in forward.

    Args:
        model: Name of the model.
        operations: Operations of all layers, by the number of ranks that share them.
        device: Device that computes.
        dtype: Dtype of its matrix products.
        sequence_sizes: Numbers of ranks over which sequences can be sharded.
        expert_sizes: Numbers of ranks over which experts can be sharded.
        left_out: Sentences about axes that the model could use, but a plan cannot.
    """

    origin: Origin = "estimated"
    spread = 0.0

    def __init__(
        self,
        model: str,
        operations: Mapping[int, Sequence[LayerOperations]],
        device: Device,
        dtype: str,
        *,
        sequence_sizes: Sequence[int] = (1,),
        expert_sizes: Sequence[int] = (1,),
        left_out: Sequence[str] = (),
    ) -> None:
        self.model = model
        self.sequence_sizes, self.expert_sizes = sequence_sizes, expert_sizes
        self.left_out = left_out
        self._operations = operations
        self._peak = device.peak(dtype) * device.efficiency.flops
        self._bytes_per_s = device.bytes_per_s * device.efficiency.memory
        self._constant_s = device.efficiency.operation_s
        self.layers = cache(self._layers)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self._operations[1])

    @property
    def tensor_sizes(self) -> Sequence[int]:
        """Numbers of ranks over which each layer can be sharded."""
        return sorted(self._operations)

    def _layers(self, rows: float, tensor: int) -> Sequence[MicrobatchCost]:
        made: dict[object, MicrobatchCost] = {}
        costs = []
        for layer in self._operations[tensor]:
            alike = layer._replace(name="", params=())
            if alike not in made:
                made[alike] = self._layer(layer, rows)
            costs.append(made[alike]._replace(params=layer.params))
        return costs

    def _layer(self, layer: LayerOperations, rows: float) -> MicrobatchCost:
        forward_s = input_s = weight_s = 0.0
        for operation in layer.operations:
            seconds = self._seconds(operation, rows)
            forward_s += seconds
            if operation.has_weight:
                input_s += seconds
                weight_s += seconds
            elif operation.flops.per_row:
                input_s += 2 * seconds
            else:
                input_s += self._seconds(operation, rows, READ_AGAIN)
        return MicrobatchCost(
            forward_s,
            input_s,
            weight_s,
            layer.saved_bytes.of(rows),
            layer.output_bytes.of(rows),
            layer.param_bytes,
            layer.params,
            layer.reduces,
            layer.reduced_bytes.of(rows),
            # gradients of the inputs and outputs of the largest operation
            max((op.nbytes.of(rows) for op in layer.operations), default=0.0),
            layer.kv_bytes.of(rows),
            layer.routed_bytes.of(rows),
            layer.expert_bytes,
        )

    def _seconds(self, operation: DescribedOperation, rows: float, times: float = 1.0) -> float:
        compute_s = operation.flops.of(rows) / self._peak
        memory_s = times * operation.nbytes.of(rows) / self._bytes_per_s
        return max(compute_s, memory_s) + self._constant_s
