"""Rules of operations that change shapes, which map input dims to output dims.

view   [b, t, h d] -> [b, t, h, d]     a split of the merged dim becomes a split of its first part
view   [b, t, 3 h d] -> [b, t, 3, h, d]    three packed blocks: a split of its second part
split  [b, t, 3 h d] -> 3 of [b, t, h d]   three packed blocks: each is split
"""

from __future__ import annotations

from collections.abc import Callable

from braid.parallel.tensor_parallel.insertion.calls import (
    OperatorCall,
    shape_of,
    tensor_of,
)
from braid.parallel.tensor_parallel.insertion.labels import Labels, equal, grouped, kept

__all__ = ["VIEWS", "Rule"]

ENDLESS = 2**62

Rule = Callable[[OperatorCall], Labels]


def _view(call: OperatorCall) -> Labels:
    (x, *_) = call.tensors()
    before, after = shape_of(x), shape_of(call.node)
    blocks = call.blocks or (1,) * len(before)
    ins: list[int | None] = [None] * len(before)
    outs: list[int | None] = [None] * len(after)
    unpacked = False
    for label, (sources, targets) in enumerate(grouped(before, after)):
        first = next((dim for dim in sources if not equal(before[dim], 1)), None)
        lead = next((dim for dim in targets if not equal(after[dim], 1)), None)
        if first is None or lead is None:
            continue
        if blocks[first] > 1 and len(targets) > 1:
            later = [dim for dim in targets if dim > lead]
            if not later or not equal(after[lead], blocks[first]):
                continue
            lead, unpacked = later[0], True
        ins[first] = outs[lead] = label
    names = ("size", "shape", "sizes", "other")
    sizes = next((n for n in names if isinstance(call.arguments.get(n), list | tuple)), None)
    return Labels([tuple(ins)], [tuple(outs)], sizes=sizes, unpacked=unpacked)


def _permute(call: OperatorCall) -> Labels:
    num_dims = len(shape_of(call["self"]))
    match call.name:
        case "aten.permute":
            order = [dim % num_dims for dim in call["dims"]]
        case "aten.movedim":
            return Labels([(None,) * num_dims], [(None,) * num_dims])
        case "aten.mT" | "aten.mH":
            order = [*range(num_dims - 2), num_dims - 1, num_dims - 2]
        case "aten.t" | "aten.numpy_T":
            order = list(range(num_dims))[::-1]
        case _:
            order = list(range(num_dims))
            names = ("dim0", "dim1") if "dim0" in call.arguments else ("axis0", "axis1")
            a, b = (call[name] % num_dims for name in names)
            order[a], order[b] = order[b], order[a]
    return Labels([kept(num_dims)], [tuple(order)])


def _expand(call: OperatorCall) -> Labels:
    before, after = shape_of(call["self"]), shape_of(call.node)
    lead = len(after) - len(before)
    ins = tuple(
        lead + dim if equal(size, after[lead + dim]) else None for dim, size in enumerate(before)
    )
    if call.name == "aten.expand_as":
        return Labels([ins, kept(len(after))], [kept(len(after))])
    outs = tuple(dim if dim in ins else None for dim in range(len(after)))
    return Labels([ins], [outs], sizes="size")


def _slice(call: OperatorCall) -> Labels:
    shape, after = shape_of(call["self"]), shape_of(call.node)
    dim = call["dim"] % len(shape)
    end = call["end"]
    everything = equal(shape[dim], after[dim]) and (
        end is None or (isinstance(end, int) and end >= ENDLESS)
    )
    labels = kept(len(shape), () if everything and call["start"] in {0, None} else (dim,))
    return Labels([labels], [labels])


def _select(call: OperatorCall) -> Labels:
    num_dims = len(shape_of(call["self"]))
    dim = call["dim"] % num_dims
    labels = kept(num_dims, (dim,))
    return Labels([labels], [labels[:dim] + labels[dim + 1 :]])


def _split(call: OperatorCall) -> Labels:
    """Split into equal parts, which may be the packed blocks of a dim."""
    shape = shape_of(call["self"])
    dim = call["dim"] % len(shape)
    parts = call.node.meta["val"]
    packed = bool(call.blocks) and call.blocks[dim] == len(parts)
    alike = all(equal(part.shape[dim], parts[0].shape[dim]) for part in parts)
    if packed and alike:
        labels = kept(len(shape))
        counts: dict[str, int] = {
            str(name): dim for name in ("split_size", "split_sizes") if name in call.arguments
        }
        return Labels([labels], [labels] * len(parts), counts=counts, unpacked=True)
    labels = kept(len(shape), (dim,))
    return Labels([labels], [labels] * len(parts))


def _unbind(call: OperatorCall) -> Labels:
    labels = _select(call)
    return Labels(labels.inputs, labels.outputs * len(call.node.meta["val"]))


def _stack(call: OperatorCall) -> Labels:
    xs = call.tensors()
    num_dims = len(shape_of(xs[0]))
    dim = call["dim"] % (num_dims + 1)
    labels = kept(num_dims)
    return Labels([labels for _ in xs], [(*labels[:dim], None, *labels[dim:])])


def _repeat_interleave(call: OperatorCall) -> Labels:
    """Repeat each element along a dim, so that a rank's part becomes the repeated part."""
    shape = shape_of(call["self"])
    if call.arguments.get("dim") is None or tensor_of_argument(call["repeats"]):
        return Labels([(None,) * len(shape_of(x)) for x in call.tensors()], [(None,)])
    return Labels([kept(len(shape))], [kept(len(shape))])


def _diagonal(call: OperatorCall) -> Labels:
    num_dims = len(shape_of(call["self"]))
    return Labels([kept(num_dims, (-1, -2))], [kept(num_dims, (-1, -2))])


def tensor_of_argument(value: object) -> bool:
    """Return whether an argument is a tensor."""
    return hasattr(value, "meta") and tensor_of(value) is not None  # type: ignore[arg-type]


VIEWS: dict[str, Rule] = {
    **dict.fromkeys(
        (
            *("aten.view", "aten.reshape", "aten._unsafe_view", "aten.flatten", "aten.unflatten"),
            *("aten.unsqueeze", "aten.squeeze", "aten.view_as", "aten._reshape_copy"),
        ),
        _view,
    ),
    **dict.fromkeys(
        (
            *("aten.permute", "aten.transpose", "aten.t", "aten.numpy_T", "aten.swapaxes"),
            *("aten.mT", "aten.mH"),
        ),
        _permute,
    ),
    **dict.fromkeys(("aten.expand", "aten.expand_as"), _expand),
    "aten.slice": _slice,
    "aten.select": _select,
    **dict.fromkeys(
        ("aten.split", "aten.chunk", "aten.split_with_sizes", "aten.tensor_split"), _split
    ),
    "aten.unbind": _unbind,
    "aten.stack": _stack,
    "aten.repeat_interleave": _repeat_interleave,
    "aten.tril": _diagonal,
    "aten.triu": _diagonal,
}
