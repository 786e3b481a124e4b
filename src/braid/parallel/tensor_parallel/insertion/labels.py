"""Labels of dims, which define the dims of inputs and outputs that belong together.

    linear      x [b, t, k]   weight [n, k]   bias [n]      ->  y [b, t, n]      k is summed
    softmax     x [b, h, t, None]                           ->  y [b, h, t, None]

Dims with the same label may be split along the same axes; the operation is then computed on the
parts. A dim without a label must be whole. If a summed label is split, the output is partial.

Source: the named dims of Mesh-TensorFlow (N. Shazeer et al., 2018); the letters of einsum.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from braid.parallel.tensor_parallel.insertion.calls import OperatorCall, shape_of

__all__ = ["Dims", "Labels", "Size", "broadcast", "divide_sizes", "equal", "grouped", "kept"]

Size = object  # int or torch.SymInt
Dims = tuple[int | None, ...]


@dataclass
class Labels:
    """Labels of the dims of an operation, as in an einsum: equal labels are split alike.

    Attributes:
        inputs: Labels of each tensor argument.
        outputs: Labels of each output.
        summed: Labels over which the operation sums.
        sizes: Name of the argument that lists the sizes of the first output, if any.
        counts: Arguments that are the length of a label's dim, with the label.
        unpacked: Whether packed blocks of the input become dims or separate tensors.
        added: Index of the input that is added to the sum, such as a bias; None if there is none.
    """

    inputs: list[Dims]
    outputs: list[Dims]
    summed: frozenset[int] = frozenset()
    sizes: str | None = None
    counts: dict[str, int] = field(default_factory=dict)
    unpacked: bool = False
    added: int | None = None


def divide_sizes(
    call: OperatorCall, labels: Labels, num_parts: Callable[[int | None], int]
) -> None:
    """Divide sizes in an operation's arguments, such as a view's, by the number of parts.

    Args:
        call: The operation, such as a view; its arguments are changed.
        labels: Labels of its tensors.
        num_parts: Function that returns the number of parts of a label.
    """

    def part(size: Any, label: int | None) -> Any:
        count = num_parts(label)
        if count == 1 or (isinstance(size, int) and size == -1):
            return size
        if isinstance(size, int):
            return size // count
        with call.node.graph.inserting_before(call.node):
            return call.node.graph.call_function(operator.floordiv, (size, count))

    if labels.sizes is not None:
        sizes = call[labels.sizes]
        if call.name == "aten.unflatten":
            start = call["dim"] % len(shape_of(call["self"]))
            dims = labels.outputs[0][start : start + len(sizes)]
        else:
            dims = labels.outputs[0]
        call.set(labels.sizes, [part(s, d) for s, d in zip(sizes, dims, strict=True)])
    for name, label in labels.counts.items():
        value = call[name]
        several = isinstance(value, list | tuple)
        call.set(name, [part(v, label) for v in value] if several else part(value, label))


def equal(a: Size, b: Size) -> bool:
    """Return whether two sizes, possibly symbolic, are equal for any input."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    from torch.fx.experimental.symbolic_shapes import (  # noqa: PLC0415 - imports sympy
        statically_known_true,
    )

    return bool(statically_known_true(a == b))


def kept(num_dims: int, whole: Sequence[int] = ()) -> Dims:
    """Return labels 0, 1, ... for a tensor's dims; dims that must stay whole have no label."""
    away = {dim % num_dims for dim in whole} if num_dims else set()
    return tuple(None if dim in away else dim for dim in range(num_dims))


def broadcast(shapes: Sequence[Sequence[Size]], out: Sequence[Size]) -> list[Dims]:
    """Return labels of tensors that are broadcast to the shape `out` with labels 0, 1, ...

    Dims of length 1 that are expanded have no label.
    """
    labels = []
    for shape in shapes:
        lead = len(out) - len(shape)
        labels.append(
            tuple(
                lead + dim if equal(size, out[lead + dim]) else None
                for dim, size in enumerate(shape)
            )
        )
    return labels


def grouped(before: Sequence[Size], after: Sequence[Size]) -> list[tuple[list[int], list[int]]]:
    """Return the smallest groups of dims of two shapes that contain the same elements.

    >>> grouped((2, 12, 5), (2, 3, 4, 5))
    [([0], [0]), ([1], [1, 2]), ([2], [3])]
    """
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        ins, outs = [], []
        if i < len(before):
            ins.append(i)
        if j < len(after):
            outs.append(j)
        i, j = i + len(ins), j + len(outs)
        while not equal(_product(before, ins), _product(after, outs)):
            # varying sizes use the example's
            grow_in = _hint(_product(before, ins)) < _hint(_product(after, outs))
            if (grow_in and i < len(before)) or j >= len(after):
                if i >= len(before):
                    break
                ins.append(i)
                i += 1
            else:
                outs.append(j)
                j += 1
        groups.append((ins, outs))
    return groups


def _product(shape: Sequence[Size], dims: Sequence[int]) -> Size:
    product: Size = 1
    for dim in dims:
        product = product * shape[dim]  # type: ignore[operator]
    return product


def _hint(size: Size) -> int:
    return size if isinstance(size, int) else int(size.node.hint)  # type: ignore[attr-defined]
