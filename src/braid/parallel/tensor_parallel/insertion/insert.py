"""The insertion pass: a layout for each value of a graph, and the collectives between them.

    1. parameters have the layouts of a plan; inputs are whole
    2. operations are visited in order; their rule defines which dims belong together
    3. an input with another layout is moved, and a partial result is reduced immediately
    4. whole values that meet split values become varying: f, with a backward that sums gradients

The graph then computes this rank's parts on plain tensors: it needs no tensor subclass, and takes
no decisions at run time.

Sources: Y. Xu et al., GSPMD, arXiv:2105.04663 (2021); M. Shoeybi et al., Megatron-LM (2019);
V. A. Korthikanti et al. (2022) for sequences.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, cast

import torch
from torch import fx
from torch.nn import functional

from braid.errors import raise_all
from braid.parallel.tensor_parallel.insertion.calls import (
    OperatorCall,
    length_of,
    module_of,
    shape_of,
    source_of,
    tensor_of,
)
from braid.parallel.tensor_parallel.insertion.choice import (
    Chosen,
    choose,
    indivisible,
)
from braid.parallel.tensor_parallel.insertion.labels import Dims, Labels, divide_sizes
from braid.parallel.tensor_parallel.insertion.moves import StepCollective, steps_between
from braid.parallel.tensor_parallel.insertion.records import (
    Conflict,
    ExplanationRow,
    InsertionOptions,
)
from braid.parallel.tensor_parallel.insertion.rules import SHAPES_ONLY, draws, rule_of
from braid.parallel.tensor_parallel.insertion.special_rules import SPECIAL, Part
from braid.parallel.tensor_parallel.insertion.writes import note_write, written_by
from braid.programs.layout import Layout, Mesh

__all__ = ["Insertion"]

ASSERTIONS = ("aten._assert_tensor_metadata", "aten._assert_scalar", "aten._assert_async")
SEQUENCE_DIM = 1
DRAWING = {
    torch.ops.aten.dropout.default: functional.dropout,
    torch.ops.aten.scaled_dot_product_attention.default: functional.scaled_dot_product_attention,
}


class Insertion:
    """Pass that assigns layouts to the values of a graph, and inserts moves between layouts.

    Args:
        graph: Graph of the whole model; it is changed in place.
        mesh: Named axes.
        params: Layouts of sharded parameters, by name.
        options: Options of the pass.

    Attributes:
        layouts: Layout of each value, or a list for nodes with several values.
        parts: Recipes for the modules that the graph calls, by name.
        rows: Rows of the table that explains the sharding.
        conflicts: Sharded values that had to be gathered.
        unknown: Operations without a rule and with split inputs, with their source lines.
        origins: Parameters with shards that cause a value to be split.
        gathered: Outputs of the model that are gathered, with their origins.
        copies: Values that inserted moves have made.
        choose: Called before each operation, to assign layouts to its parameters; None if all
            parameters have layouts.
        forced: Mesh axes that split each label of an annotated operation.
    """

    def __init__(
        self, graph: fx.Graph, mesh: Mesh, params: Mapping[str, Layout], options: InsertionOptions
    ) -> None:
        self.graph = graph
        self.mesh = mesh
        self.options = options
        self.layouts: dict[fx.Node, Layout | list[Layout]] = {}
        self.parts: dict[str, Part] = {}
        self.rows: list[ExplanationRow] = []
        self.conflicts: list[Conflict] = []
        self.unknown: dict[str, str] = {}
        self.origins: dict[fx.Node, frozenset[str]] = {}
        self.gathered: dict[fx.Node, frozenset[str]] = {}
        self.copies: set[fx.Node] = set()
        self.choose: Callable[[Insertion, OperatorCall], None] | None = None
        self.forced: Mapping[fx.Node, Mapping[int, tuple[str, ...]]] = {}
        self._params = params
        self._moved: dict[tuple[fx.Node, str], fx.Node] = {}
        self._has_grad: dict[fx.Node, bool] = {}

    def run(self) -> None:
        """Assign layouts and insert moves for all nodes, in order."""
        for node in list(self.graph.nodes):
            match node.op:
                case "placeholder":
                    self._begin(node, None)
                case "get_attr":
                    self._begin(node, self._params.get(str(node.target)))
                case "output":
                    self._finish(node)
                case "call_module":
                    self.graph.erase_node(node)  # guards of inputs, which the caller checks
                case _:
                    self._visit(node)
        for node in self.graph.nodes:
            if node.target in DRAWING:  # so that modes for keyed random numbers intercept them
                node.target = DRAWING[node.target]

    # one layout -----------------------------------------------------------------------------------

    def layout(self, node: fx.Node) -> Layout:
        """Return the layout of a tensor."""
        layout = self.layouts[node]
        assert isinstance(layout, Layout), f"{node} is one tensor"
        return layout

    def whole(self, num_dims: int) -> Layout:
        """Return the layout of a whole tensor of `num_dims` dims."""
        return Layout(self.mesh, ((),) * num_dims)

    def convert(self, node: fx.Node, target: Layout, reason: str, user: fx.Node) -> fx.Node:
        """Return a node with the value in layout `target`; insert moves before `user` if needed."""
        source = self.layout(node)
        if source == target:
            return node
        if (node, str(target)) in self._moved:
            return self._moved[node, str(target)]
        if _is_gathered(source, target):
            origins = self.origins.get(node, frozenset())
            self.conflicts.append(Conflict(user, origins, reason))
        with self.graph.inserting_before(user):
            moved = self._moves(node, target)
        self._moved[node, str(target)] = moved
        if moved is not node:
            self.copies.add(moved)
        return moved

    def _moves(self, node: fx.Node, target: Layout) -> fx.Node:
        """Insert the moves to a layout at the current position."""
        tensor = tensor_of(node)
        assert tensor is not None, f"{node} is a tensor"
        shape = tuple(length_of(size) for size in tensor.shape)
        has_grad = self._has_grad.get(node, False)
        steps = steps_between(
            shape,
            tensor.element_size(),
            self.layout(node),
            target,
            self.options.costs,
            has_grad=has_grad,
        )
        moved = node
        for step in steps:
            if step.kind == "f" and not has_grad:
                continue
            moved = self.emit(f"{node.name}_{step.kind}", step, (moved,), node)
            self._note(moved, step.kind, target, step.collectives, node)
        self.layouts[moved] = target if moved is not node else self.layouts[node]
        self._carry(moved, (node,))
        return moved

    def replace(
        self,
        call: OperatorCall,
        part: Part,
        args: Sequence[fx.Node],
        layout: Layout,
        collectives: tuple[StepCollective, ...] = (),
    ) -> fx.Node:
        """Replace an operation by a call of the module that `part` describes; return the call."""
        node = call.node
        with self.graph.inserting_before(node):
            new = self.emit(node.name, part, tuple(args), node)
        self.layouts[new] = layout
        self._carry(new, args)
        self._note(new, call.name, layout, collectives, node)
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)
        return new

    def has_grad(self, node: fx.Node) -> bool:
        """Return whether gradients flow back to a value."""
        return self._has_grad.get(node, False)

    def emit(self, name: str, part: Part, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
        """Insert a call of the module that `part` describes; `like` has a value of equal shape."""
        name = f"parts.{name}"
        while name in self.parts:
            name += "_"
        self.parts[name] = part
        node = self.graph.create_node("call_module", name, args)  # created after the pass
        node.meta = dict(like.meta)
        return node

    def _carry(self, node: fx.Node, sources: Sequence[fx.Node]) -> None:
        value = tensor_of(node)
        floats = value is None or value.is_floating_point() or value.is_complex()
        self._has_grad[node] = floats and any(self._has_grad.get(x, False) for x in sources)
        self.origins[node] = frozenset().union(*(self.origins.get(x, ()) for x in sources))

    def _note(
        self,
        node: fx.Node,
        operation: str,
        layout: Layout,
        collectives: tuple[StepCollective, ...] = (),
        origin: fx.Node | None = None,
    ) -> None:
        module = module_of(origin if origin is not None else node)
        self.rows.append(ExplanationRow(node.name, module, operation, layout, collectives))

    # nodes ----------------------------------------------------------------------------------------

    def _begin(self, node: fx.Node, layout: Layout | None) -> None:
        tensor = tensor_of(node)
        if tensor is None:
            return
        self.layouts[node] = self.whole(tensor.dim()) if layout is None else layout
        self._has_grad[node] = tensor.requires_grad
        if layout is not None:
            self.origins[node] = frozenset({str(node.target)})
            self._note(node, "parameter", layout)

    def _finish(self, node: fx.Node) -> None:
        # the model returns whole values; a value that is returned twice is gathered once
        def whole(x: fx.Node) -> fx.Node:
            layout = self.layouts.get(x)
            if not isinstance(layout, Layout) or not self.options.gather_outputs:
                return x
            target = self.whole(len(layout.dims))
            if layout == target or (x, str(target)) in self._moved:
                return self._moved.get((x, str(target)), x)
            self.gathered[x] = self.origins.get(x, frozenset())
            with self.graph.inserting_before(node):
                self._moved[x, str(target)] = self._moves(x, target)
            return self._moved[x, str(target)]

        node.args = fx.map_arg(node.args, whole)

    def _visit(self, node: fx.Node) -> None:
        call = OperatorCall(node)
        if self.choose is not None:
            self.choose(self, call)
        xs = call.tensors()
        # The order matters. Annotations win over rules. An operation on plain values needs no rule,
        # so unknown operations before the first sharded layer cost nothing. An operation without a
        # rule gets whole inputs, which is always right and never fast.
        if call.name in ASSERTIONS and not node.users:
            self.graph.erase_node(node)
        elif node.target is operator.getitem:
            self._item(node)
        elif call.name == "aten.sym_size":
            self._size(node, call)
        elif node in self.forced:
            rule = rule_of(call)
            assert rule is not None, "operations with an annotation have a rule"
            call.blocks = self.layout(xs[0]).blocks
            self._apply(call, xs, rule(call), self.forced[node])
        elif all(self._is_plain(x) for x in xs) or call.name in SHAPES_ONLY:
            self._set_whole(node, xs)
        elif call.name in SPECIAL and SPECIAL[call.name](self, call):
            pass  # replaced by a module
        elif (labels := self._labels(call, xs)) is not None:
            self._apply(call, xs, labels)
        else:
            self.unknown[call.name] = source_of(node)
            self._gather_all(node, xs, f"{call.name} has no rule")
        if written_by(call) is not None:
            note_write(self, OperatorCall(node) if node in self.layouts else call)

    def _labels(self, call: OperatorCall, xs: Sequence[fx.Node]) -> Labels | None:
        """Return the labels of an operation; None if no rule supports these inputs."""
        rule = rule_of(call)
        if rule is None:
            return None
        call.blocks = self.layout(xs[0]).blocks
        labels = rule(call)
        fits = list(map(len, labels.inputs)) == [len(shape_of(x)) for x in xs]
        return labels if fits else None

    def change(self, values: AbstractSet[fx.Node], node: fx.Node) -> None:
        """Record that `node` has changed values in place, so copies in other layouts are stale."""
        for x in values:
            self._has_grad[x] = self._has_grad.get(x, False) or self._has_grad.get(node, False)
            self.origins[x] = self.origins.get(x, frozenset()) | self.origins.get(node, frozenset())
        self._moved = {key: moved for key, moved in self._moved.items() if key[0] not in values}

    def _is_plain(self, x: fx.Node) -> bool:
        layout = self.layout(x)
        return not any(layout.dims) and not layout.varying

    def _set_whole(self, node: fx.Node, xs: Sequence[fx.Node]) -> None:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            self.layouts[node] = self.whole(value.dim())
        elif isinstance(value, list | tuple):
            self.layouts[node] = [
                self.whole(x.dim()) if isinstance(x, torch.Tensor) else self.whole(0) for x in value
            ]
        self._carry(node, xs)
        self.origins.pop(node)

    def _gather_all(self, node: fx.Node, xs: Sequence[fx.Node], reason: str) -> None:
        call, inputs = OperatorCall(node), []
        for x in xs:
            moved = self.convert(x, self.whole(len(self.layout(x).dims)), reason, node)
            if moved is not x and draws(call):  # in the memory order of a whole value
                with self.graph.inserting_before(node):
                    ordered = self.graph.call_function(torch.ops.aten.contiguous.default, (moved,))
                ordered.meta = dict(x.meta)
                moved = ordered
            inputs.append(moved)
        call.replace_tensors(inputs)
        self._set_whole(node, xs)

    def _item(self, node: fx.Node) -> None:
        (source,) = node.all_input_nodes
        layouts = self.layouts.get(source)
        if isinstance(layouts, list):
            self.layouts[node] = layouts[cast("int", node.args[1])]
            self._carry(node, (source,))

    def _size(self, node: fx.Node, call: OperatorCall) -> None:
        """Multiply the sizes of a node, so that they refer to whole values."""
        x, dim = call["self"], call["dim"]
        count = self.count(self.layout(x).dims[dim])
        if count > 1:
            with self.graph.inserting_after(node):
                whole = self.graph.call_function(operator.mul, (node, count))
            whole.meta = dict(node.meta)
            node.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not whole)

    def count(self, axes: Sequence[str]) -> int:
        """Return the number of parts into which some axes split a dim."""
        return math.prod(self.mesh.axes[axis] for axis in axes)

    # rules ----------------------------------------------------------------------------------------

    def _apply(
        self,
        call: OperatorCall,
        xs: Sequence[fx.Node],
        labels: Labels,
        forced: Mapping[int, tuple[str, ...]] | None = None,
    ) -> None:
        """Convert the inputs of an operation to layouts of its labels, and set its outputs'."""
        node = call.node
        chosen: Chosen
        if forced is None:
            written = written_by(call)  # is not moved; the other inputs are
            kept = self.layout if written is None else self._only(written)
            chosen, problems = choose(call, xs, labels, kept, set(self._params))
        else:
            chosen = {label: (axes, 1) for label, axes in forced.items()}
            problems = indivisible(call, xs, labels, forced, self.mesh)
        for x, problem in problems:
            origins = self.origins.get(x, frozenset())
            self.conflicts.append(Conflict(node, origins, problem, refused=True))
        # Each rank sums over its part of a split label, so the result is a partial sum. A bias must
        # then be added after the all_reduce: each rank would add it, and the sum would have it once
        # per rank.
        summed = tuple(axis for label in labels.summed for axis in chosen.get(label, ((), 1))[0])
        bias = None
        if summed and labels.added is not None:
            bias = xs[labels.added]
            call.set("bias", None)
            xs = [x for i, x in enumerate(xs) if i != labels.added]
            labels.inputs.pop(labels.added)
        # Along these axes, ranks compute different parts. A whole input that meets them becomes
        # varying: its gradient is a sum over ranks, which the backward of the move f adds up.
        moving = {axis for axes, _ in chosen.values() for axis in axes}
        moving.update(axis for x in xs for axis in self.layout(x).varying)
        divide_sizes(call, labels, lambda label: self.count(chosen.get(label, ((), 1))[0]))
        reason = f"{call.name} needs its inputs sharded along other dims"
        call.replace_tensors(
            self.convert(
                x, self._target(dims, chosen, moving, self._has_grad.get(x, False)), reason, node
            )
            for x, dims in zip(xs, labels.inputs, strict=True)
        )
        outputs = [
            self._output(dims, chosen, moving, summed, unpacked=labels.unpacked)
            for dims in labels.outputs
        ]
        value = node.meta.get("val")
        self.layouts[node] = outputs[0] if isinstance(value, torch.Tensor) else outputs
        self._carry(node, xs)
        if moving:
            self._note(node, call.name, outputs[0])
        else:
            self.origins.pop(node)
        if summed:
            total = self.reduce(node)
            if bias is not None:
                self._add(total, bias, channels=call.name.startswith("aten.conv"))

    def _only(self, x: fx.Node) -> Callable[[fx.Node], Layout]:
        """Return a function for layouts of values, which treats all but one value as whole."""
        return lambda y: self.layout(y) if y is x else self.whole(len(shape_of(y)))

    def _target(
        self,
        dims: Dims,
        chosen: Chosen,
        moving: set[str],
        has_grad: bool,
    ) -> Layout:
        split = [chosen.get(label, ((), 1)) if label is not None else ((), 1) for label in dims]
        split_axes = {axis for axes, _ in split for axis in axes}
        varying = tuple(moving - split_axes) if has_grad else ()
        blocks = tuple(count for _, count in split)
        return Layout(self.mesh, tuple(axes for axes, _ in split), (), varying, blocks)

    def _output(
        self,
        dims: Dims,
        chosen: Chosen,
        moving: set[str],
        summed: tuple[str, ...],
        *,
        unpacked: bool,
    ) -> Layout:
        layout = self._target(dims, chosen, moving - set(summed), has_grad=True)
        blocks = () if unpacked else layout.blocks
        return Layout(self.mesh, layout.dims, summed, layout.varying, blocks)

    # partial results ------------------------------------------------------------------------------

    def reduce(self, node: fx.Node) -> fx.Node:
        """Sum a partial value right after it is computed, and return the sum."""
        layout = self.layout(node)
        dims = list(layout.dims)
        if self.options.sequence and len(dims) == 3 and not dims[SEQUENCE_DIM]:
            dims[SEQUENCE_DIM] = layout.partial
        target = Layout(self.mesh, tuple(dims), (), layout.varying, layout.blocks)
        users = list(node.users)
        with self.graph.inserting_before(node.next):
            moved = self._moves(node, target)
        self.origins.pop(moved)
        for user in users:
            user.replace_input_with(node, moved)
        return moved

    def _add(self, total: fx.Node, bias: fx.Node, *, channels: bool) -> None:
        """Add a bias to a sum; a convolution's bias is along dim 1."""
        users = list(total.users)
        with self.graph.inserting_before(total.next):
            if channels:
                spatial = [-1, *[1] * (len(shape_of(total)) - 2)]
                view = self.graph.call_function(torch.ops.aten.view.default, (bias, spatial))
                view.meta = {**bias.meta, "val": bias.meta["val"].view(spatial)}
                self._visit(view)
                bias = view
            added = self.graph.call_function(torch.ops.aten.add.Tensor, (total, bias))
        added.meta = dict(total.meta)
        for user in users:
            user.replace_input_with(total, added)
        self._visit(added)

    def refuse(self) -> None:
        """Raise ConfigError with all conflicts that cannot be resolved."""
        problems = [conflict.reason for conflict in self.conflicts if conflict.refused]
        if self.options.strict and self.unknown:
            named = ", ".join(f"{name} ({line})" for name, line in self.unknown.items())
            problems.append(
                f"no rule can shard {named}: pass strict=False to gather the inputs, or "
                "do not shard the layers before them"
            )
        raise_all(problems)


def _is_gathered(source: Layout, target: Layout) -> bool:
    """Return whether a move gathers split dims."""
    return any(
        set(before) - set(after) for before, after in zip(source.dims, target.dims, strict=True)
    )
