"""Operations of a model's layers, counted on the meta device: no memory, no time, any size.

Each operation of a forward is counted with two and with three rows, which shows the part that grows
with the rows. Views cost nothing, and attention is one operation, as its kernels compute it: it
never writes the matrix of scores.

    x (rows, 16, 64) @ weight (64, 192)      393,216 FLOPs a row, 16 KiB a row and 48 KiB
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from braid.comm.autograd.nested import map_tensors
from braid.errors import ConfigError
from braid.parallel.expert_parallel import expert_modules, expert_params
from braid.parallel.pipeline.layer_runs import Skips, bytes_of_layer, run_all
from braid.plan.described.experts import ExpertOperation, even_experts
from braid.plan.lone_rank import LoneRank
from braid.plan.profiling.profile import PerRows
from braid.runtime.torch_internals import (
    TorchDispatchMode,
    own_buffers,
    own_parameters,
    pytree,
    storage_id,
    without_modes,
)

__all__ = ["DescribedOperation", "LayerOperations", "count_operations"]

ROWS = (2, 3)  # a batch of one row lies in memory otherwise
FREE = ("empty", "detach", "_unsafe_view")  # operators without work, besides views


class DescribedOperation(NamedTuple):
    """One operation of a forward pass, with its work and bytes.

    Attributes:
        name: Name of torch's operator.
        flops: Floating point operations of its matrix products.
        nbytes: Bytes that it reads and writes.
        has_weight: Whether one factor is a parameter; backward then computes its gradient by
            another product.
    """

    name: str
    flops: PerRows
    nbytes: PerRows
    has_weight: bool


class LayerOperations(NamedTuple):
    """Operations of a layer's forward, with its bytes and all-reduces; see `MicrobatchCost`."""

    name: str
    operations: tuple[DescribedOperation, ...]
    saved_bytes: PerRows
    output_bytes: PerRows
    param_bytes: float
    params: tuple[int, ...]
    reduces: int
    reduced_bytes: PerRows
    kv_bytes: PerRows = PerRows()
    routed_bytes: PerRows = PerRows()
    expert_bytes: float = 0.0


class _Counted(NamedTuple):
    operations: list[tuple[str, float, float, bool]]
    saved_bytes: int
    output_bytes: int
    reduced: list[int]
    kv_bytes: int
    routed_bytes: int


def count_operations(
    named: Sequence[tuple[str, nn.Module]],
    sample: Callable[[int], Any],
    *,
    dtype: torch.dtype = torch.float32,
    ranks: LoneRank | None = None,
) -> list[LayerOperations]:
    """Return the operations of each layer in a list, counted without computing them.

    Args:
        named: Layers with their names; each layer takes the output of the previous one. The layers
            are moved to the meta device.
        sample: Function that returns an input of the first layer with a number of rows.
        dtype: Dtype of parameters and activations.
        ranks: Group over which the layers are sharded; None for whole layers.

    Raises:
        ConfigError: The sequence of operations of a layer depends on the number of rows.
    """
    shared: dict[int, nn.Parameter] = {}
    numbers: dict[int, int] = {}
    for _, layer in named:
        _to_meta(layer, dtype, shared)
        for param in layer.parameters():
            numbers.setdefault(id(param), len(numbers))
    counts: list[list[_Counted]] = []
    for rows in ROWS:
        counted: list[_Counted] = []
        x = map_tensors(sample(rows), lambda t: t.to("meta"))
        run_all(named, x, torch.device("meta"), _counting(counted, ranks))
        counts.append(counted)
    return [
        _layer(name, layer, both, numbers)
        for (name, layer), both in zip(named, zip(*counts, strict=True), strict=True)
    ]


def _to_meta(layer: nn.Module, dtype: torch.dtype, shared: dict[int, nn.Parameter]) -> None:
    """Move a layer; parameters that layers share stay shared."""
    for module in layer.modules():
        for name, param in list(own_parameters(module).items()):
            if param is None or (param.device.type == "meta" and param.dtype == dtype):
                continue
            if id(param) not in shared:
                moved = nn.Parameter(param.detach().to("meta", dtype), param.requires_grad)
                shared[id(param)] = moved
                moved.__dict__["braid_origin"] = param  # keeps its id from being used again
            own_parameters(module)[name] = shared[id(param)]
        for name, buffer in list(own_buffers(module).items()):
            if buffer is not None:
                floats = buffer.is_floating_point()
                own_buffers(module)[name] = buffer.to("meta", dtype if floats else None)


def _counting(
    counts: list[_Counted], ranks: LoneRank | None
) -> Callable[[nn.Module, Any, Skips], Any]:
    def run(layer: nn.Module, x: Any, skips: Skips) -> Any:
        operations: list[tuple[str, float, float, bool]] = []
        kernels, routed = _Kernels(operations), [0]
        if ranks is not None:
            ranks.reduced.clear()

        def on_experts(nbytes: int, products: Sequence[ExpertOperation]) -> None:
            routed[0] += nbytes
            operations.extend(("experts", flops, moved, True) for flops, moved in products)

        counting = _Operations(operations, layer)
        with torch.enable_grad(), even_experts(layer, on_experts), kernels, counting:
            output, saved_bytes, output_bytes = bytes_of_layer(layer, x, skips)
        reduced = [] if ranks is None else list(ranks.reduced)
        counts.append(
            _Counted(operations, saved_bytes, output_bytes, reduced, kernels.kv_bytes, routed[0])
        )
        return output

    return run


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    """Records each operator that is not a view, with its FLOPs and bytes."""

    def __init__(self, operations: list[tuple[str, float, float, bool]], layer: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations = operations
        self._weights = {_storage(param) for param in layer.parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and count it."""
        output = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if func.is_view or any(word in packet.__name__ for word in FREE):
            return output
        inputs, outputs = _tensors_of([args, kwargs or {}]), _tensors_of(output)
        has_weight = any(t.dim() > 1 and _storage(t) in self._weights for t in inputs)
        if packet is torch.ops.aten.embedding:  # reads the rows that it returns
            inputs = outputs
        count = flop_registry.get(packet)
        flops = count(*args, **(kwargs or {}), out_val=output) if count is not None else 0
        nbytes = sum(t.nbytes for t in (*inputs, *outputs))
        self._operations.append((packet.__name__, flops, nbytes, has_weight))
        return output


class _Kernels(TorchFunctionMode):
    """Counts attention as one operation, and runs none of it.

    Attributes:
        kv_bytes: Bytes of the keys and values of all calls.
    """

    def __init__(self, operations: list[tuple[str, float, float, bool]]) -> None:
        super().__init__()
        self._operations = operations
        self.kv_bytes = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, or count it."""
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, key, value = args[:3]
        flops = 4.0 * query.numel() * key.shape[-2]
        if (kwargs or {}).get("is_causal"):
            flops /= 2
        with _paused():
            output: torch.Tensor = _FusedAttention.apply(query, key, value)  # type: ignore[no-untyped-call]
        nbytes = sum(t.nbytes for t in (query, key, value, output))
        self._operations.append(("attention", flops, nbytes, False))
        self.kv_bytes += key.nbytes + value.nbytes
        return output


@contextmanager
def _paused() -> Iterator[None]:
    """Count nothing meanwhile."""
    with without_modes():
        yield


class _FusedAttention(torch.autograd.Function):
    """Attention as a kernel that keeps its inputs and its output for backward."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        ctx.save_for_backward(query, key, value, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        raise NotImplementedError


def _layer(
    name: str, layer: nn.Module, both: Sequence[_Counted], numbers: dict[int, int]
) -> LayerOperations:
    few, many = both
    if [op[0] for op in few.operations] != [op[0] for op in many.operations]:
        msg = (
            f"layer {name} runs other operations with {ROWS[1]} rows than with {ROWS[0]}: its cost "
            "cannot be estimated; make its forward independent of the number of rows"
        )
        raise ConfigError(msg)
    params = list(dict.fromkeys(layer.parameters()))
    return LayerOperations(
        name,
        tuple(
            DescribedOperation(op, _line(a, c), _line(b, d), has_weight)
            for (op, a, b, has_weight), (_, c, d, _) in zip(
                few.operations, many.operations, strict=True
            )
        ),
        _line(few.saved_bytes, many.saved_bytes),
        _line(few.output_bytes, many.output_bytes),
        sum(p.nbytes for p in params),
        tuple(numbers[id(p)] for p in params),
        len(few.reduced),
        _line(sum(few.reduced), sum(many.reduced)),
        _line(few.kv_bytes, many.kv_bytes),
        _line(few.routed_bytes, many.routed_bytes),
        sum(p.nbytes for module in expert_modules(layer).values() for p in expert_params(module)),
    )


def _tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in arguments or results of an operator."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _storage(x: torch.Tensor) -> int:
    return storage_id(x.untyped_storage())


def _line(few: float, many: float) -> PerRows:
    """Return the linear cost through the values at both numbers of rows."""
    per_row = max(0.0, (many - few) / (ROWS[1] - ROWS[0]))
    return PerRows(max(0.0, few - ROWS[0] * per_row), per_row)
