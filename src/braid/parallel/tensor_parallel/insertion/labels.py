"""Labels of dims: which dims of inputs and outputs of an operation belong together.

    linear      x [b, t, k]   weight [n, k]   bias [n]      ->  y [b, t, n]      k is summed
    softmax     x [b, h, t, None]                           ->  y [b, h, t, None]

Dims with one label may be split along the same axes, and the operation is then done on the parts.
A dim without a label must be whole. If a label that is summed is split, the output is partial.

Source: the named dims of Mesh-TensorFlow (N. Shazeer et al., 2018); the letters of einsum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Dims", "Labels", "Size", "broadcast", "equal", "grouped", "kept"]

Size = object  # int or torch.SymInt
Dims = tuple[int | None, ...]


@dataclass
class Labels:
    """Labels of an operation.

    Attributes:
        inputs: Labels of each tensor among the arguments.
        outputs: Labels of each output.
        summed: Labels over which the operation adds.
        sizes: Argument that lists sizes of the first output, if there is one.
        counts: Arguments that are lengths of a label, and it.
        unpacked: Whether packed blocks of the input are dims or tensors of their own afterwards.
        added: Number of the input that is added to the sum, such as a bias; None if there is none.
    """

    inputs: list[Dims]
    outputs: list[Dims]
    summed: frozenset[int] = frozenset()
    sizes: str | None = None
    counts: dict[str, int] = field(default_factory=dict)
    unpacked: bool = False
    added: int | None = None


def equal(a: Size, b: Size) -> bool:
    """Whether two sizes are equal for any input."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    from torch.fx.experimental.symbolic_shapes import (  # noqa: PLC0415 - imports sympy
        statically_known_true,
    )

    return bool(statically_known_true(a == b))


def kept(num_dims: int, whole: Sequence[int] = ()) -> Dims:
    """Return labels of a tensor whose dims stay, but for some that must be whole."""
    away = {dim % num_dims for dim in whole} if num_dims else set()
    return tuple(None if dim in away else dim for dim in range(num_dims))


def broadcast(shapes: Sequence[Sequence[Size]], out: Sequence[Size]) -> list[Dims]:
    """Return labels of tensors that are broadcast to one shape: its dims are 0, 1, ...

    Dims of length 1 that are stretched have no label.
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
    """Return which dims of a shape become which dims of another with as many elements.

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
            grow_in = _fewer(_product(before, ins), _product(after, outs))
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


def _fewer(a: Size, b: Size) -> bool:
    """Whether one product is less than another, by the example's sizes if they vary."""
    return _hint(a) < _hint(b)


def _hint(size: Size) -> int:
    return size if isinstance(size, int) else int(size.node.hint)  # type: ignore[attr-defined]
