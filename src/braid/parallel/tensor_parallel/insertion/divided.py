"""Forward of a sharded model: runs the model's graph with this rank's parts.

The graph is captured again for another mode of a module, other frozen parameters, dtypes or
buffers, another structure of inputs, and other lengths that an earlier capture has fixed. Captured
graphs are kept.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from braid.comm import Group
from braid.errors import ConfigError
from braid.parallel.tensor_parallel.insertion.annotations import annotated
from braid.parallel.tensor_parallel.insertion.calls import tensor_of
from braid.parallel.tensor_parallel.insertion.capture import (
    ONE_AT_A_TIME,
    Captured,
    capture,
    flat_inputs,
)
from braid.parallel.tensor_parallel.insertion.insert import Insertion
from braid.parallel.tensor_parallel.insertion.moves import Groups, Move, MoveStep
from braid.parallel.tensor_parallel.insertion.records import Scheme
from braid.programs.layout import Mesh
from braid.runtime.torch_internals import own_buffers, own_parameters, pytree

__all__ = ["DividedForward", "groups_along", "insert", "lengths_of"]

Lengths = tuple[tuple[int | None, ...] | None, ...]


class _Graph(NamedTuple):
    """Captured graph with its inputs' lengths.

    Attributes:
        lengths: Length of each dim of each input, None for any length.
        module: The graph.
        out_spec: Structure of its outputs.
    """

    lengths: Lengths
    module: fx.GraphModule
    out_spec: pytree.TreeSpec

    def fits(self, leaves: list[Any]) -> bool:
        return all(
            lengths is None
            or all(n is None or n == length for n, length in zip(lengths, x.shape, strict=True))
            for lengths, x in zip(self.lengths, leaves, strict=True)
        )


class DividedForward:
    """Forward of a sharded model.

    Args:
        model: Model with sharded parameters.
        groups: Function that returns the group of ranks along an axis.
        scheme: Layouts of the parameters, and options of sharding.
        shapes: Whole shapes of sharded parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Groups,
        scheme: Scheme,
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._model = model
        self._groups = groups
        self._scheme = scheme
        self._shapes = shapes
        self._graphs: dict[Any, list[_Graph]] = {}
        self._state = _ModelState(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of the model."""
        leaves, spec = flat_inputs(args, kwargs)
        graphs = self._graphs.get(self._key(leaves, spec), ())
        graph = next((graph for graph in graphs if graph.fits(leaves)), None)
        if graph is None:
            graph = self._capture(args, kwargs)
        outputs = graph.module(*leaves)
        return pytree.tree_unflatten(outputs, graph.out_spec)

    def keep(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        captured: Captured,
        lengths: Lengths,
        insertion: Insertion,
    ) -> _Graph:
        """Complete a rank's graph, and keep it for later inputs of the same structure and mode.

        Args:
            args: Inputs of the model by position.
            kwargs: Inputs by name.
            captured: The graph.
            lengths: Lengths of inputs for which alone the graph is valid.
            insertion: Record of the changes that made it a rank's graph.
        """
        module = captured.module
        for name, part in insertion.parts.items():
            if isinstance(part, MoveStep):
                module.add_submodule(name, Move(part, self._groups(part.axis)))
            else:
                module.add_submodule(name, part(self._groups))
        module.graph.lint()
        module.recompile()
        graph = _Graph(lengths, module, captured.out_spec)
        self._graphs.setdefault(self._key(*flat_inputs(args, kwargs)), []).append(graph)
        return graph

    def _key(self, leaves: list[Any], spec: Any) -> Any:
        return self._state.key(), spec, tuple(map(_kind, leaves)), _autocast(leaves)

    def _capture(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Graph:
        forward = self._model.__dict__.pop("forward", None)
        try:
            with ONE_AT_A_TIME:
                captured = capture(self._model, args, kwargs, self._shapes)
                lengths = lengths_of(captured)
                insertion = insert(captured, self._scheme)
        finally:
            if forward is not None:
                self._model.__dict__["forward"] = forward
        return self.keep(args, kwargs, captured, lengths, insertion)


def insert(captured: Captured, scheme: Scheme) -> Insertion:
    """Change a captured graph into a rank's graph, and return the record of the changes.

    Raises:
        ConfigError: A value cannot be sharded, or no rule is known and `strict` is set.
    """
    graph = captured.module.graph
    insertion = Insertion(graph, scheme.mesh, scheme.layouts, scheme.options)
    if scheme.strategies:
        _, insertion.forced = annotated(graph, scheme.strategies, scheme.mesh.size)
    insertion.run()
    insertion.refuse()
    for name, line in insertion.unknown.items():
        warnings.warn(f"no rule can shard {name} ({line}): its inputs are gathered", stacklevel=3)
    return insertion


def lengths_of(captured: Captured) -> Lengths:
    """Return the lengths of inputs for which alone a captured graph is valid."""
    nodes = captured.module.graph.nodes
    tensors = [tensor_of(node) for node in nodes if node.op == "placeholder"]
    return tuple(None if x is None else _fixed(x) for x in tensors)


def _fixed(x: torch.Tensor) -> tuple[int | None, ...]:
    sizes: tuple[int | torch.SymInt, ...] = tuple(x.shape)
    return tuple(n if isinstance(n, int) else None for n in sizes)


def _kind(leaf: Any) -> Any:
    """Return the properties of an input on which a graph depends; length 1 is a special case."""
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, leaf.device, leaf.requires_grad, tuple(n == 1 for n in leaf.shape)
    return type(leaf), leaf


def _autocast(leaves: list[Any]) -> Any:
    devices = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return tuple(
        (kind, torch.get_autocast_dtype(kind))
        for kind in sorted(devices)
        if torch.is_autocast_enabled(kind)
    )


def groups_along(mesh: Mesh, group: Group) -> Groups:
    """Return a function (axis -> group of ranks along it) for a mesh; a collective."""
    if len(mesh.axes) == 1:
        return lambda _: group
    groups = {axis: group.split(mesh.peers(axis, group.rank)[0]) for axis in mesh.axes}

    def find(axis: str) -> Group:
        along = groups[axis]
        assert along is not None, "every rank is in a group of its peers"
        return along

    return find


class _ModelState:
    """Modules and parameters of a sharded model, on which its graphs depend.

    A graph refers to the parameters. Their values may change in place, and other modes or dtypes
    lead to another graph; but the graph would silently ignore a replaced parameter or module, so
    replacements raise an error.

    Args:
        model: The model, after its parameters were sharded.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [
            (name, module, list(module.children()), list(own_parameters(module).values()))
            for name, module in model.named_modules()
        ]
        self._params = list(model.parameters())

    def key(self) -> Any:
        """Return the state on which a graph depends: modes, frozen parameters, dtypes, buffers.

        Raises:
            ConfigError: A parameter or module has been replaced.
        """
        for name, module, children, params in self._modules:
            if not _same(list(own_parameters(module).values()), params):
                replaced = "its parameters"
            elif not _same(list(module.children()), children):
                replaced = "modules in it"
            else:
                continue
            msg = (
                f"{name or 'the model'} had {replaced} replaced after parallelize, but its graph "
                "still uses the old ones: change parameters in place (such as load_state_dict "
                "without assign=True), or undivide(model, group) first and parallelize again"
            )
            raise ConfigError(msg)
        return (
            tuple(module.training for _, module, _, _ in self._modules),
            tuple((x.requires_grad, x.dtype, x.device) for x in self._params),
            tuple(id(x) for _, module, _, _ in self._modules for x in own_buffers(module).values()),
        )


def _same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))
