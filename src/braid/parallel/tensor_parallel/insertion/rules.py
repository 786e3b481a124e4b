"""Rules: the labels of each operation, by families.

    pointwise     dims of the result, broadcast               add, gelu, where, dropout, to, ...
    contraction   rows and columns; summed dims               linear, matmul, bmm, conv, einsum
    along dims    some dims whole, the others unchanged       softmax, norms, cumsum, topk, cat
    reduction     some dims removed; sums may be split        sum, mean, amax
    attention     batch and heads                             scaled_dot_product_attention
    lookup        dims of ids and of rows                     embedding, index_select, gather

Operations that change shapes are in `view_rules`. Operations outside of all families have whole
inputs and outputs. A rule never depends on values or ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from braid.parallel.tensor_parallel.insertion.calls import OperatorCall, shape_of
from braid.parallel.tensor_parallel.insertion.labels import Dims, Labels, broadcast, equal, kept
from braid.parallel.tensor_parallel.insertion.view_rules import VIEWS, Rule

__all__ = ["SHAPES_ONLY", "draws", "is_depthwise", "rule_of"]

POINTWISE = {  # in addition to operations that torch marks as pointwise
    *("aten.dropout", "aten.native_dropout", "aten.to", "aten._to_copy", "aten.type_as"),
    *(
        "aten.fill",
        "aten.zero",
        "aten.clone",
        "aten.contiguous",
        "aten.detach",
        "aten.alias",
        "aten.lift_fresh_copy",
    ),
    *("aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.empty_like", "aten.where"),
    *("aten.masked_fill", "aten.float", "aten.feature_dropout", "aten.silu", "aten.gelu"),
    *("aten.relu", "aten.__and__", "aten.__or__", "aten.copy", "aten.bernoulli", "aten.selu"),
    *("aten.square", "aten.rsub", "aten.softplus", "aten.true_divide", "aten.divide"),
}
SHAPES_ONLY = {  # operations that use only shapes of inputs; the outputs are whole
    *("aten.new_zeros", "aten.new_ones", "aten.new_full", "aten.new_empty"),
}


def rule_of(call: OperatorCall) -> Rule | None:
    """Return the rule that labels the dims of an operation; None if no rule is known."""
    name = call.name.removesuffix("_") if not call.name.endswith("__") else call.name
    tags = getattr(call.node.target, "tags", ())
    if draws(call):  # parts would draw other numbers than the whole
        return None
    if name in POINTWISE or torch.Tag.pointwise in tags:
        return _pointwise
    return FAMILIES.get(name)


def draws(call: OperatorCall) -> bool:
    """Return whether a dropout or attention call draws random numbers in the graph's mode."""
    if torch.Tag.nondeterministic_seeded not in getattr(call.node.target, "tags", ()):
        return False
    flags = [call[n] for n in ("train", "training", "p", "dropout_p") if n in call.arguments]
    return all(value is None or value for value in flags)


def _pointwise(call: OperatorCall) -> Labels:
    out = shape_of(call.node)
    inputs = broadcast([shape_of(x) for x in call.tensors()], out)
    return Labels(inputs, [kept(len(out))])


def _linear(call: OperatorCall) -> Labels:
    rows = len(shape_of(call["input"])) - 1
    inner, outer = rows, rows + 1
    lead = tuple(range(rows))
    inputs: list[Dims] = [(*lead, inner), (outer, inner)]
    added = None
    if call["bias"] is not None:
        inputs.append((outer,))
        added = 2
    return Labels(inputs, [(*lead, outer)], frozenset({inner}), added=added)


def _matmul(call: OperatorCall) -> Labels:
    a, b = (shape_of(x) for x in call.tensors())
    out = shape_of(call.node)
    lead = len(out) - (len(a) > 1) - (len(b) > 1)
    row, column, inner = lead, lead + 1, lead + 2
    batch = broadcast([a[:-2], b[:-2]], out[:lead])
    first = (*batch[0], row, inner) if len(a) > 1 else (inner,)
    second = (*batch[1], inner, column) if len(b) > 1 else (inner,)
    output = (*range(lead), *((row,) if len(a) > 1 else ()), *((column,) if len(b) > 1 else ()))
    return Labels([first, second], [output], frozenset({inner}))


def _einsum(call: OperatorCall) -> Labels:
    """Label dims by their letters; diagonals (`ii`) and `...` are not supported."""
    equation = str(call["equation"]).replace(" ", "")
    before, arrow, after = equation.partition("->")
    terms = [*before.split(","), after]
    if not arrow or "." in equation or any(len(set(term)) < len(term) for term in terms):
        return Labels([], [])
    letters = {letter: index for index, letter in enumerate(sorted(set("".join(terms))))}
    dims: list[Dims] = [tuple(letters[letter] for letter in term) for term in terms]
    *inputs, output = dims
    return Labels(inputs, [output], frozenset(letters.values()).difference(output))


def _convolution(call: OperatorCall) -> Labels:
    spatial = (None,) * (len(shape_of(call["weight"])) - 2)
    if is_depthwise(call):
        channels: Dims = (0, 1, *spatial)[2 + len(spatial) - len(shape_of(call["input"])) :]
        depthwise_inputs: list[Dims] = [channels, (1, None, *spatial), (1,)]
        return Labels(depthwise_inputs[: len(call.tensors())], [channels], counts={"groups": 1})
    one = call["groups"] == 1  # groups of channels belong together
    batch, inner, outer = 0, 1 if one else None, 2 if one else None
    lead = (batch,) if len(shape_of(call["input"])) == len(spatial) + 2 else ()
    inputs: list[Dims] = [(*lead, inner, *spatial), (outer, inner, *spatial)]
    added = None
    if call["bias"] is not None:
        inputs.append((outer,))
        added = 2
    summed = frozenset({inner}) if inner is not None else frozenset()
    return Labels(inputs, [(*lead, outer, *spatial)], summed, added=added)


def _along(*names: str) -> Rule:
    """Return the rule of operations along some dims; all tensors have the same dims."""

    def rule(call: OperatorCall) -> Labels:
        xs = call.tensors()
        num_dims = len(shape_of(xs[0]))
        whole = _dims(call, names) or range(num_dims)
        labels = kept(num_dims, whole)
        shape = shape_of(xs[0])
        inputs = [
            tuple(
                label if equal(size, length) else None
                for label, size, length in zip(labels, shape_of(x), shape, strict=True)
            )
            for x in xs
        ]
        common = tuple(
            None if any(other[dim] is None for other in inputs) else label
            for dim, label in enumerate(labels)
        )
        return Labels([common for _ in xs], [common for _ in outputs_of(call.node)])

    return rule


def is_depthwise(call: OperatorCall) -> bool:
    """Return whether each output channel of a convolution uses one input channel."""
    groups, shape = call.arguments.get("groups", 1), shape_of(call["weight"])
    return groups > 1 and equal(groups, shape[0]) and equal(shape[1], 1)


def _glu(call: OperatorCall) -> Labels:
    """Label the two packed blocks, which are multiplied: each block is split."""
    num_dims = len(shape_of(call["self"]))
    dim = call["dim"] % num_dims
    packed = bool(call.blocks) and call.blocks[dim] == 2
    labels = kept(num_dims, () if packed else (dim,))
    return Labels([labels], [labels], unpacked=True)


def _prelu(call: OperatorCall) -> Labels:
    labels = kept(len(shape_of(call["self"])))
    one = equal(shape_of(call["weight"])[0], 1)
    return Labels([labels, (None if one else 1,)], [labels])


def _dims(call: OperatorCall, names: Sequence[str]) -> list[int]:
    """Return the dims in arguments, which have one or several dims each."""
    values = [call[name] for name in names]
    return [dim for value in values for dim in (value if isinstance(value, list) else [value])]


def _layer_norm(call: OperatorCall) -> Labels:
    shape = shape_of(call["input"])
    num_whole = len(call["normalized_shape"])
    labels = kept(len(shape), range(len(shape) - num_whole, len(shape)))
    rest: list[Dims] = [(None,) * num_whole for _ in call.tensors()[1:]]
    return Labels([labels, *rest], [labels])


def _group_norm(call: OperatorCall) -> Labels:
    labels = (0, *(None,) * (len(shape_of(call["input"])) - 1))
    return Labels([labels, *((None,) for _ in call.tensors()[1:])], [labels])


def _whole(call: OperatorCall) -> Labels:
    """Label nothing: BatchNorm changes statistics in place, and parts' statistics would be lost."""
    inputs: list[Dims] = [(None,) * len(shape_of(x)) for x in call.tensors()]
    return Labels(inputs, [(None,) * x.dim() for x in outputs_of(call.node)])


def _reduction(call: OperatorCall) -> Labels:
    (x,) = call.tensors()
    num_dims = len(shape_of(x))
    dims = call.arguments.get("dim")
    dims = range(num_dims) if dims is None or dims == [] else dims
    away = {dim % num_dims for dim in ([dims] if isinstance(dims, int) else dims)}
    stays = call.arguments.get("keepdim", False)
    summed = call.name == "aten.sum"
    labels = kept(num_dims, () if summed else sorted(away))
    output = tuple(
        None if dim in away else dim for dim in range(num_dims) if stays or dim not in away
    )
    return Labels(
        [labels], [output for _ in outputs_of(call.node)], frozenset(away if summed else ())
    )


def _attention(call: OperatorCall) -> Labels:
    query, key = shape_of(call["query"]), shape_of(call["key"])
    lead = kept(len(query) - 2)
    if not call["enable_gqa"]:
        lead = broadcast([query[:-2]], key[:-2])[0] if len(query) == len(key) else ()
    labels: Dims = (*lead, None, None)
    inputs = [labels, labels, labels]
    mask = call["attn_mask"]
    if mask is not None:
        shape = shape_of(mask)
        inputs.append((*broadcast([shape[:-2]], query[:-2])[0], None, None))
    return Labels(inputs, [labels])


def _embedding(call: OperatorCall) -> Labels:
    ids = kept(len(shape_of(call["indices"])))
    row = len(ids)
    return Labels([(None, row), ids], [(*ids, row)])


def _index_select(call: OperatorCall) -> Labels:
    num_dims = len(shape_of(call["self"]))
    labels = kept(num_dims, (call["dim"],))
    return Labels([labels, (None,)], [labels])


def outputs_of(node: fx.Node) -> list[torch.Tensor]:
    """Return the meta tensors that represent the outputs of a node."""
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    return [x for x in values if isinstance(x, torch.Tensor)]


FAMILIES: dict[str, Rule] = {
    **VIEWS,
    "aten.linear": _linear,
    "aten.matmul": _matmul,
    "aten.mm": _matmul,
    "aten.bmm": _matmul,
    "aten.einsum": _einsum,
    "aten.conv1d": _convolution,
    "aten.conv2d": _convolution,
    "aten.conv3d": _convolution,
    "aten.softmax": _along("dim"),
    "aten._softmax": _along("dim"),
    "aten.log_softmax": _along("dim"),
    "aten._log_softmax": _along("dim"),
    "aten.cumsum": _along("dim"),
    "aten.cat": _along("dim"),
    "aten.sort": _along("dim"),
    "aten.topk": _along("dim"),
    "aten.gather": _along("dim"),
    "aten.roll": _along("dims"),
    "aten.glu": _glu,
    "aten.prelu": _prelu,
    "aten.flip": lambda call: Labels(
        [kept(len(shape_of(call["self"])), call["dims"])],
        [kept(len(shape_of(call["self"])), call["dims"])],
    ),
    "aten.layer_norm": _layer_norm,
    "aten.rms_norm": _layer_norm,
    "aten.group_norm": _group_norm,
    "aten.batch_norm": _whole,
    **dict.fromkeys(
        (
            *("aten.sum", "aten.mean", "aten.amax", "aten.amin", "aten.argmax", "aten.var"),
            *("aten.std", "aten.any", "aten.all", "aten.max", "aten.min", "aten.logsumexp"),
            "aten.linalg_vector_norm",
        ),
        _reduction,
    ),
    "aten.scaled_dot_product_attention": _attention,
    "aten.embedding": _embedding,
    "aten.index_select": _index_select,
}
