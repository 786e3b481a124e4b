"""Choice of the labels of an operation that are split, given the layouts of its inputs.

Parameters decide first, since they cannot be moved; then the largest input. A split label is split
in all inputs that have it; inputs with other layouts are moved. A summed label is not split if a
whole parameter has it: the other input is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from torch import fx

from braid.parallel.tensor_parallel.insertion.calls import (
    OperatorCall,
    length_of,
    module_of,
    shape_of,
    source_of,
)
from braid.parallel.tensor_parallel.insertion.labels import Dims, Labels
from braid.parallel.tensor_parallel.insertion.rules import outputs_of
from braid.programs.layout import Layout, Mesh

__all__ = ["Chosen", "choose", "indivisible"]

Chosen = Mapping[int | None, tuple[tuple[str, ...], int]]
"""Axes and packed blocks of each label that is split."""

MOST_VALID = 64  # numbers of ranks that a message lists


def choose(
    call: OperatorCall,
    xs: Sequence[fx.Node],
    labels: Labels,
    layout_of: Callable[[fx.Node], Layout],
    planned: AbstractSet[str],
) -> tuple[Chosen, list[tuple[fx.Node, str]]]:
    """Return which dims (labels) an operation splits, and which inputs' splits are impossible.

    Args:
        call: The operation.
        xs: Tensor arguments of the call.
        labels: Labels of the tensors' dims.
        layout_of: Function that returns the layout of a tensor.
        planned: Names of the parameters that a plan shards.
    """
    chosen: dict[int | None, tuple[tuple[str, ...], int]] = {}
    problems: list[tuple[fx.Node, str]] = []
    used: set[str] = set()
    pairs = list(zip(xs, labels.inputs, strict=True))
    whole = {
        label
        for x, dims in pairs
        for label, axes in zip(dims, layout_of(x).dims, strict=True)
        if not axes and str(x.target) not in planned and is_parameter(x)
    }
    for x, dims in sorted(pairs, key=_rank):
        layout = layout_of(x)
        blocks = layout.blocks or (1,) * len(dims)
        for label, axes, count in zip(dims, layout.dims, blocks, strict=True):
            if not axes or label is None or label in chosen or used.intersection(axes):
                continue
            if label in labels.summed and label in whole:
                continue
            num_parts = math.prod(layout.mesh.axes[axis] for axis in axes)
            problem = _indivisible(call, xs, labels, label, num_parts, count)
            if problem is None:
                chosen[label] = (axes, count)
                used.update(axes)
            else:
                problems.append((x, problem))
    return chosen, problems


def indivisible(
    call: OperatorCall,
    xs: Sequence[fx.Node],
    labels: Labels,
    forced: Mapping[int, tuple[str, ...]],
    mesh: Mesh,
) -> list[tuple[fx.Node, str]]:
    """Return reasons why tensors of an operation cannot be split as its annotation demands.

    Args:
        call: The operation.
        xs: Tensor arguments of the call.
        labels: Labels of the tensors' dims.
        forced: Mesh axes by which the annotation splits each label.
        mesh: Named axes.
    """
    reasons = [
        _indivisible(call, xs, labels, label, math.prod(mesh.axes[axis] for axis in axes), 1)
        for label, axes in forced.items()
    ]
    return [(call.node, problem) for problem in reasons if problem is not None]


def is_parameter(x: fx.Node) -> bool:
    """Return whether a value is a parameter or a view of one."""
    if x.op == "call_function" and len(x.all_input_nodes) == 1:
        return is_parameter(x.all_input_nodes[0])
    return x.op == "get_attr"


def _rank(pair: tuple[fx.Node, Dims]) -> tuple[bool, int]:
    x, _ = pair
    return x.op != "get_attr", -math.prod(length_of(size) for size in shape_of(x))


def _indivisible(
    call: OperatorCall,
    xs: Sequence[fx.Node],
    labels: Labels,
    label: int,
    count: int,
    blocks: int,
) -> str | None:
    """Return why a label cannot be split in `count` parts; None if it can."""
    inputs = [(shape_of(x), dims, blocks) for x, dims in zip(xs, labels.inputs, strict=True)]
    outputs = [
        (tuple(x.shape), dims, 1 if labels.unpacked else blocks)
        for x, dims in zip(outputs_of(call.node), labels.outputs, strict=False)
    ]
    for shape, dims, packed in (*inputs, *outputs):
        for size, other in zip(shape, dims, strict=True):
            if other != label or not isinstance(size, int) or size % (count * packed) == 0:
                continue
            block_size = size // packed if size % packed == 0 else size
            valid = [n for n in range(1, min(block_size, MOST_VALID) + 1) if block_size % n == 0]
            lengths = [length_of(s) for s in shape]
            return (
                f"{module_of(call.node) or 'the model'} has a dim of {size} in {call.name} of "
                f"shape {lengths} ({source_of(call.node)}), which cannot be split over {count} "
                f"ranks; valid numbers of ranks: {', '.join(map(str, valid))}"
            )
    return None
