"""Pairing: search of the layers to shard, by the graph.

    column    a linear layer with a whole input, if no value must be gathered later
    row       a linear layer with split inputs
    vocab     an embedding that shares its rows with the last layer, or has many rows

The pass is tried on the graph: if a split value must be gathered, the layers that cause the split
are not sharded in the next trial. Layers with names that differ only in numbers are treated alike.

Source: choice by trial as in Alpa's intra-operator pass (L. Zheng et al., OSDI
2022), here with the one pattern of Megatron-LM.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from torch import fx

from braid.errors import ConfigError
from braid.parallel.tensor_parallel.insertion.calls import OperatorCall, shape_of
from braid.parallel.tensor_parallel.insertion.insert import Insertion
from braid.parallel.tensor_parallel.insertion.records import Conflict, InsertionOptions
from braid.parallel.tensor_parallel.insertion.rules import is_depthwise
from braid.programs.layout import Layout, Mesh

__all__ = ["pair"]

MANY_ROWS = 16_384  # rows of an embedding above which an all_reduce pays off
LARGE_HEAD = 1_024  # outputs above which gathering them at the end pays off
KEEP_SHAPE = {"aten.detach", "aten.to", "aten.clone"}
TURN = {"aten.t", "aten.numpy_T", "aten.transpose", "aten.permute"}


class Pairing(NamedTuple):
    """Result of `pair`: layouts of parameters.

    Attributes:
        layouts: Layout of each sharded parameter, by name.
        whole: Reasons why layers are not sharded, by the pattern of their names.
    """

    layouts: dict[str, Layout]
    whole: dict[str, str]


def pair(graph: fx.Graph, mesh: Mesh, axis: str, options: InsertionOptions) -> Pairing:
    """Find layouts of parameters, such as column then row, that need no gather in the model.

    Args:
        graph: Graph of the whole model; it is not changed.
        mesh: Named axes.
        axis: Axis along which layers are sharded.
        options: Options of sharding.

    Raises:
        ConfigError: No layer can be sharded.
    """
    # `whole` grows in each trial, so the search ends: at worst no layer is sharded. One conflict is
    # taken at a time, since the layers of the first one often cause the later ones.
    whole: dict[str, str] = {}
    while True:
        chooser = _Chooser(mesh, axis, whole, _tied(graph))
        trial = Insertion(_copy(graph), mesh, chooser.layouts, replace(options, strict=False))
        trial.choose = chooser.choose
        trial.run()
        known = (conflict for conflict in trial.conflicts if conflict.origins)
        problem = next(known, None) or chooser.small_head(trial)
        if problem is None:
            break
        for name in problem.origins:
            whole[pattern_of(name)] = problem.reason
    if not chooser.layouts:
        reasons = "; ".join(f"{name}: {why}" for name, why in {**chooser.odd, **whole}.items())
        none = "it has no linear layer, convolution or large embedding of a divisible size"
        msg = f"no layer can be sharded over {mesh.axes[axis]} ranks ({reasons or none})"
        raise ConfigError(msg)
    return Pairing(chooser.layouts, {**chooser.odd, **whole})


def pattern_of(name: str) -> str:
    """Return the name of a parameter with layer numbers replaced by `*`."""
    return re.sub(r"\b\d+\b", "*", name)


class _Chooser:
    """Chooser that decides, when the pass reaches a layer, whether it is sharded."""

    def __init__(self, mesh: Mesh, axis: str, whole: Mapping[str, str], tied: set[str]) -> None:
        self.layouts: dict[str, Layout] = {}
        self._mesh = mesh
        self._axis = axis
        self._size = mesh.axes[axis]
        self._whole = whole
        self._tied = tied
        self._heads: dict[str, int] = {}
        self.odd: dict[str, str] = {}

    def choose(self, insertion: Insertion, call: OperatorCall) -> None:
        weight = call.arguments.get("weight")
        if not isinstance(weight, fx.Node):
            return
        chain = _chain(weight)
        if chain is None or pattern_of(str(chain[-1].target)) in self._whole:
            return
        if str(chain[-1].target) in self.layouts:
            self._set(insertion, chain, None)
            return
        if call.name == "aten.embedding":
            rows = shape_of(weight)[0]
            many = isinstance(rows, int) and rows >= MANY_ROWS
            if (str(chain[-1].target) in self._tied or many) and self._fits(rows):
                self._set(insertion, chain, 0)
        elif call.name in {"aten.linear", "aten.conv2d", "aten.conv1d"}:
            self._linear(insertion, call, chain)

    def _linear(self, insertion: Insertion, call: OperatorCall, chain: list[fx.Node]) -> None:
        dims = insertion.layout(call["input"]).dims
        inner = dims[-1] if call.name == "aten.linear" else dims[1]
        outs, ins = shape_of(call["weight"])[:2]
        if call.arguments.get("groups", 1) != 1:
            if is_depthwise(call) and inner == (self._axis,):
                self._set(insertion, chain, 0)
                self._set_bias(insertion, call, 1)
            return
        if inner == (self._axis,) and self._fits(ins):
            blocks = insertion.layout(call["input"]).blocks
            if not blocks:
                self._set(insertion, chain, 1)
        elif not self._fits(outs):
            valid = [str(n) for n in range(1, 65) if isinstance(outs, int) and outs % n == 0]
            self.odd[pattern_of(str(chain[-1].target))] = (
                f"{outs} outputs do not divide; valid: {', '.join(valid)}"
            )
        elif not any(self._axis in axes for axes in (inner, *dims[:1])):
            blocks_of_outputs = _packed(call.node, self._size)
            self._set(insertion, chain, 0, blocks_of_outputs)
            if isinstance(outs, int):
                self._heads[str(chain[-1].target)] = outs
            self._set_bias(insertion, call, blocks_of_outputs)

    def _set_bias(self, insertion: Insertion, call: OperatorCall, blocks: int) -> None:
        bias = call["bias"]
        if isinstance(bias, fx.Node) and bias.op == "get_attr":
            self._put(insertion, bias, Layout(self._mesh, ((self._axis,),), (), (), (blocks,)))

    def small_head(self, trial: Insertion) -> Conflict | None:
        """Return the conflict of an output in `trial` that is too small to be worth gathering."""
        for node, origins in trial.gathered.items():
            small = frozenset(
                name
                for name in origins
                if self._heads.get(name, LARGE_HEAD) < LARGE_HEAD and name not in self._tied
            )
            if small:
                reason = f"its output is an output of the model, and shorter than {LARGE_HEAD}"
                return Conflict(node, small, reason)
        return None

    def _fits(self, size: object) -> bool:
        return isinstance(size, int) and size % self._size == 0

    def _set(
        self, insertion: Insertion, chain: list[fx.Node], dim: int | None, blocks: int = 1
    ) -> None:
        """Set the layouts of a parameter and its views, and of transposed ones.

        Args:
            insertion: The pass.
            chain: The weight of an operation and the values it is a view of, the parameter last.
            dim: Dim of the weight to split; None if the parameter has its layout already.
            blocks: Number of packed blocks of this dim.
        """
        if dim is None:
            layout = self.layouts[str(chain[-1].target)]
            for node in reversed(chain):
                if OperatorCall(node).name in TURN and node.op == "call_function":
                    layout = _turned(layout)
                insertion.layouts[node] = layout
            return
        num_dims = len(shape_of(chain[0]))
        axes = tuple((self._axis,) if d == dim else () for d in range(num_dims))
        packed = tuple(blocks if d == dim else 1 for d in range(num_dims))
        layout = Layout(self._mesh, axes, (), (), packed)
        for node in chain:
            if node.op == "get_attr":
                self._put(insertion, node, layout)
            else:
                insertion.layouts[node] = layout
                layout = _turned(layout) if OperatorCall(node).name in TURN else layout

    def _put(self, insertion: Insertion, param: fx.Node, layout: Layout) -> None:
        self.layouts[str(param.target)] = layout
        insertion.layouts[param] = layout
        insertion.origins[param] = frozenset({str(param.target)})


def _turned(layout: Layout) -> Layout:
    return Layout(layout.mesh, layout.dims[::-1], (), (), layout.blocks[::-1])


def _chain(weight: fx.Node) -> list[fx.Node] | None:
    """Return a weight and the values it is a view of, the parameter last; None if there is none."""
    chain = [weight]
    while chain[-1].op != "get_attr":
        node = chain[-1]
        if node.op != "call_function" or len(node.all_input_nodes) != 1:
            return None
        name = OperatorCall(node).name
        matrix = len(shape_of(node)) == 2
        if name not in KEEP_SHAPE and not (name in TURN and matrix):
            return None
        chain.append(node.all_input_nodes[0])
    return chain


def _packed(node: fx.Node, size: int) -> int:
    """Return the number of packed matrices of a layer, by the first operation that splits it.

    Args:
        node: Output of the layer.
        size: Number of ranks.
    """
    width = shape_of(node)[-1]
    seen = node
    while len(seen.users) == 1:
        (user,) = seen.users
        if user.op != "call_function":
            break
        name = OperatorCall(user).name
        if name == "aten.glu":
            return (
                2
                if OperatorCall(user)["dim"] % len(shape_of(seen)) == len(shape_of(seen)) - 1
                else 1
            )
        if name in {"aten.split", "aten.chunk", "aten.split_with_sizes"}:
            parts = user.meta["val"]
            dim = OperatorCall(user)["dim"] % len(shape_of(seen))
            lengths = {part.shape[dim] for part in parts}
            last = dim == len(shape_of(seen)) - 1
            return len(parts) if last and len(lengths) == 1 else 1
        if name in {"aten.view", "aten.reshape"}:
            added = shape_of(user)[len(shape_of(seen)) - 1 :]
            lead = added[0] if added else 1
            small = isinstance(lead, int) and lead % size != 0 and len(added) > 2
            whole = isinstance(width, int) and isinstance(lead, int) and width % lead == 0
            return int(lead) if small and whole else 1
        if name not in {"aten.add", "aten.to", *KEEP_SHAPE}:
            break
        seen = user
    return 1


def _tied(graph: fx.Graph) -> set[str]:
    """Return the parameters that an embedding shares with a linear layer."""
    users: dict[str, set[str]] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        call = OperatorCall(node)
        weight = call.arguments.get("weight")
        if isinstance(weight, fx.Node) and (chain := _chain(weight)) is not None:
            users.setdefault(str(chain[-1].target), set()).add(call.name)
    return {name for name, uses in users.items() if {"aten.embedding", "aten.linear"} <= uses}


def _copy(graph: fx.Graph) -> fx.Graph:
    copied = fx.Graph()
    outputs = copied.graph_copy(graph, {})
    copied.output(outputs)
    return copied
