"""Rules of operations that are replaced by modules; see `special`.

Each rule returns whether it has replaced the operation; otherwise the rule of its family applies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from torch import nn

from braid.comm.redistribute import AxisCost
from braid.parallel.tensor_parallel.insertion.calls import (
    OperatorCall,
    length_of,
    shape_of,
    tensor_of,
)
from braid.parallel.tensor_parallel.insertion.moves import Groups, MoveStep, StepCollective
from braid.parallel.tensor_parallel.insertion.special import (
    DividedAttention,
    DividedDropout,
    OwnPart,
    VocabLoss,
    VocabRows,
)
from braid.programs.layout import Layout

if TYPE_CHECKING:
    from braid.parallel.tensor_parallel.insertion.insert import Insertion

__all__ = ["SPECIAL", "Part"]

Part: TypeAlias = MoveStep | Callable[[Groups], nn.Module]
"""A module of the graph: a step between layouts, or a function of the groups that creates it."""

LOSS_NUMBER_BYTES = 4


def _embedding(insertion: Insertion, call: OperatorCall) -> bool:
    weight, ids = call["weight"], call["indices"]
    (axes, columns) = insertion.layout(weight).dims
    if len(axes) != 1 or columns:
        return False
    (axis,) = axes
    padding = call["padding_idx"]
    whole_ids = insertion.whole(len(shape_of(ids)))
    ids = insertion.convert(ids, whole_ids, "ids of an embedding are whole", call.node)
    partial = Layout(insertion.mesh, ((),) * (len(whole_ids.dims) + 1), (axis,))
    rows = insertion.replace(
        call,
        lambda groups: VocabRows(groups(axis).rank, groups(axis).size, padding),
        (weight, ids),
        partial,
    )
    insertion.reduce(rows)
    return True


def _cross_entropy(insertion: Insertion, call: OperatorCall) -> bool:
    logits, target = call["self"], call["target"]
    layout = insertion.layout(logits)
    shape = shape_of(target)
    by_classes = len(layout.dims) == 2 and not layout.dims[0] and len(layout.dims[1]) == 1
    classes = tensor_of(target)
    if not by_classes or layout.blocks or len(shape) != 1 or call["weight"] is not None:
        return False
    if classes is None or classes.is_floating_point():
        return False
    ((axis,),) = layout.dims[1:]
    target = insertion.convert(target, insertion.whole(1), "targets are whole", call.node)
    smoothing = call["label_smoothing"]
    reduction, ignored = call["reduction"], call["ignore_index"]
    num_rows = math.prod(length_of(size) for size in shape)
    n = insertion.mesh.axes[axis]
    cost = insertion.options.costs.get(axis, AxisCost())
    collectives = []
    for numbers in (1, 3 if smoothing else 2):
        nbytes = round(2 * (n - 1) / n * numbers * num_rows * LOSS_NUMBER_BYTES)
        seconds = cost.latency_s + nbytes * cost.s_per_byte
        collectives.append(StepCollective("all_reduce", axis, nbytes, seconds, backward=False))
    value = tensor_of(call.node)
    assert value is not None, "a loss is a tensor"
    insertion.replace(
        call,
        lambda groups: VocabLoss(groups(axis), reduction, ignored, smoothing),
        (logits, target),
        insertion.whole(value.dim()),
        tuple(collectives),
    )
    return True


def _dropout(insertion: Insertion, call: OperatorCall) -> bool:
    (x,), p = call.tensors(), call["p"]
    layout = insertion.layout(x)
    if not call["train"] or not 0 < p < 1 or not any(layout.dims):
        return False
    features, inplace = call.name.startswith("aten.feature"), call.name.endswith("_")
    insertion.replace(
        call,
        lambda groups: DividedDropout(_part(layout, groups), p, features=features, inplace=inplace),
        (x,),
        layout,
    )
    return True


def _attention(insertion: Insertion, call: OperatorCall) -> bool:
    query, p = call["query"], call["dropout_p"]
    layout = insertion.layout(query)
    alike = all(insertion.layout(call[name]).dims == layout.dims for name in ("key", "value"))
    if not p or not any(layout.dims[:-2]) or any(layout.dims[-2:]) or not alike:
        return False
    inputs = [query, call["key"], call["value"]]
    if any(length_of(shape_of(x)[-3]) % insertion.count(layout.dims[-3]) for x in inputs):
        return False
    if call["attn_mask"] is not None:
        inputs.append(_mask(insertion, call, layout))
    insertion.replace(
        call,
        lambda groups: DividedAttention(
            _part(layout, groups),
            p,
            is_causal=call["is_causal"],
            scale=call["scale"],
            gqa=call["enable_gqa"],
        ),
        inputs,
        layout,
    )
    return True


def _mask(insertion: Insertion, call: OperatorCall, heads: Layout) -> object:
    """Return the mask of attention for this rank's heads."""
    mask = call["attn_mask"]
    shape = shape_of(mask)
    lead = heads.dims[len(heads.dims) - len(shape) :]
    dims = tuple(
        axes if not isinstance(size, int) or size > 1 else ()
        for axes, size in zip(lead, shape, strict=True)
    )
    along = {axis for axes in heads.dims for axis in axes}
    split_axes = {axis for axes in dims for axis in axes}
    varying = tuple(along - split_axes) if insertion.has_grad(mask) else ()
    target = Layout(insertion.mesh, dims, (), varying)
    return insertion.convert(mask, target, "a mask is split as the heads", call.node)


def _part(layout: Layout, groups: Groups) -> OwnPart:
    """Return the module for this rank's part of a whole value."""
    splits = []
    for dim, axes in enumerate(layout.dims):
        index, count = 0, 1
        for axis in axes:
            group = groups(axis)
            index, count = index * group.size + group.rank, count * group.size
        if count > 1:
            splits.append((dim, count, layout.blocks[dim] if layout.blocks else 1, index))
    return OwnPart(splits)


SPECIAL: dict[str, Callable[[Insertion, OperatorCall], bool]] = {
    "aten.embedding": _embedding,
    "aten.cross_entropy_loss": _cross_entropy,
    "aten.dropout": _dropout,
    "aten.dropout_": _dropout,
    "aten.feature_dropout": _dropout,
    "aten.feature_dropout_": _dropout,
    "aten.scaled_dot_product_attention": _attention,
}
