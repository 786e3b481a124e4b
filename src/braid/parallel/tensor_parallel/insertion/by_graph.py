"""Sharding of a model by its graph: finds or uses layouts, slices parameters, replaces forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from braid.comm import Group
from braid.parallel.tensor_parallel.insertion.annotations import Strategy, annotated
from braid.parallel.tensor_parallel.insertion.capture import ONE_AT_A_TIME, capture
from braid.parallel.tensor_parallel.insertion.divided import (
    DividedForward,
    groups_along,
    insert,
    lengths_of,
)
from braid.parallel.tensor_parallel.insertion.pairing import pair
from braid.parallel.tensor_parallel.insertion.records import (
    ExplanationRow,
    InsertionOptions,
    Scheme,
)
from braid.parallel.tensor_parallel.linear import slice_param
from braid.parallel.tensor_parallel.slices import Slicing
from braid.parallel.tensor_parallel.whole import changes_of
from braid.programs.layout import Layout, Mesh

__all__ = ["Found", "divide_by_graph"]

AXIS = "tp"


class Found(NamedTuple):
    """Result of sharding a model by its graph.

    Attributes:
        slicings: Slicing of each parameter, by name.
        rows: Rows of the table that explains the sharding.
        whole: Reasons why layers are not sharded, by the pattern of their names.
    """

    slicings: dict[str, Slicing]
    rows: list[ExplanationRow]
    whole: dict[str, str]


def divide_by_graph(
    model: nn.Module,
    group: Group,
    slicings: Mapping[str, Slicing] | None,
    inputs: Any,
    options: InsertionOptions,
    strategies: Mapping[str, Strategy] | None = None,
) -> Found:
    """Shard a model by its graph, in place.

    Args:
        model: Model, equal on all ranks.
        group: Ranks that share the model.
        slicings: Slicing of each parameter, by name; None to find them from the graph.
        inputs: Example of its inputs: a tensor, a tuple by position, or a mapping by name.
        options: Options of sharding.
        strategies: Annotations of operators, by the names of their modules, instead of slicings.

    Raises:
        ConfigError: The model cannot be captured or sharded; it is unchanged.
    """
    args, kwargs = arguments_of(inputs)
    with ONE_AT_A_TIME:
        captured = capture(model, args, kwargs, {})
        lengths = lengths_of(captured)
        graph, names = captured.module.graph, _aliases(model)
        mesh = Mesh({AXIS: group.size})
        layouts: dict[str, Layout] = {}
        whole: dict[str, str] = {}
        if strategies:
            mesh, _ = annotated(graph, strategies, group.size)
        elif slicings is None:
            layouts, whole = pair(graph, mesh, AXIS, options)
        else:
            layouts = {n: _layout(mesh, model.get_parameter(n), s) for n, s in slicings.items()}
        layouts = {other: layout for name, layout in layouts.items() for other in names[name]}
        scheme = Scheme(mesh, layouts, options, strategies or {})
        insertion = insert(captured, scheme)  # raises before anything is changed
    params = dict(model.named_parameters(remove_duplicate=False))
    shapes = {name: tuple(params[name].shape) for name in layouts}
    cut = {name: _slicing(layout) for name, layout in layouts.items()}
    for name, slicing in cut.items():
        slice_param(params[name], slicing, group)
    forward = DividedForward(model, groups_along(mesh, group), scheme, shapes)
    forward.keep(args, kwargs, captured, lengths, insertion)
    changes_of(model)
    model.__dict__["forward"] = forward
    return Found(cut, insertion.rows, whole)


def arguments_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return example inputs as arguments by position and by name."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    return (inputs,), {}


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of the parameter with a given name."""
    same: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        same.setdefault(id(param), []).append(name)
    return {name: names for names in same.values() for name in names}


def _layout(mesh: Mesh, param: torch.Tensor, slicing: Slicing) -> Layout:
    dims = tuple((AXIS,) if dim == slicing.dim else () for dim in range(param.dim()))
    blocks = tuple(slicing.blocks if dim == slicing.dim else 1 for dim in range(param.dim()))
    return Layout(mesh, dims, (), (), blocks)


def _slicing(layout: Layout) -> Slicing:
    dim = next(dim for dim, axes in enumerate(layout.dims) if axes)
    return Slicing(dim, layout.blocks[dim] if layout.blocks else 1)
