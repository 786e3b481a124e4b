"""Arguments that differ between runs, by the rows of the batch, or by training and evaluation.

A model is run with several numbers of rows, and in both modes. Arguments that differ become
`Scaled` or `ByMode`; `resolved` converts them back to arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from braid.comm.autograd.nested import parts_of, rebuild
from braid.errors import ConfigError
from braid.parallel.graph.captured import BatchDevice, ByMode, CapturedGraph, GraphNode, Scaled

__all__ = ["Situation", "check_rows", "resolved", "with_devices", "with_modes", "with_rows"]

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def with_rows(whole: CapturedGraph, part: CapturedGraph, rows: int) -> CapturedGraph:
    """Replace numbers that depend on the number of rows by `Scaled` placeholders, in a new graph.

    Args:
        whole: Graph of a run.
        part: Graph of a run with one row less.
        rows: Number of rows of `whole`.

    Raises:
        ConfigError: The two runs made different calls, or anything but numbers depends on the rows.
    """
    difference = _difference_of(whole, part)
    if difference:
        msg = f"for one row less than {rows}, {difference}: it cannot be captured"
        raise ConfigError(msg)

    def merged(one: Any, other: Any, node: GraphNode) -> Any:
        if type(one) is int and type(other) is int:
            factor = one - other  # rows differ by one
            return Scaled(factor, one - factor * rows)
        msg = (
            f"{node} at {node.where} has {_describe(one)} for {rows} rows and {other} for one "
            "row less. Outside of submodules, only integers may depend on the batch size: move "
            "this computation into a submodule"
        )
        raise ConfigError(msg)

    return _merged(whole, part, merged)


def with_modes(graph: CapturedGraph, other: CapturedGraph, rows: int) -> CapturedGraph:
    """Replace arguments that differ between training and evaluation by `ByMode` placeholders.

    Args:
        graph: Graph with `Scaled` numbers.
        other: Graph of a run in the other mode, with the same number of rows.
        rows: Number of rows.
    """
    difference = _difference_of(graph, other)
    if difference:
        return dataclasses.replace(graph, other_mode=difference)

    def merged(one: Any, another: Any, _node: GraphNode) -> Any:
        if isinstance(one, Scaled) and one.factor * rows + one.offset == another:
            return one
        return ByMode(one, another) if graph.is_training else ByMode(another, one)

    return _merged(graph, other, merged)


def _difference_of(one: CapturedGraph, other: CapturedGraph) -> str:
    """Return the first difference between the calls of two runs; empty if there is none."""
    for a, b in zip(one.nodes, other.nodes, strict=False):
        if _calls(a) != _calls(b):
            return f"the model calls {b} at {b.where} instead of the {a} of the other run"
    if len(one.nodes) != len(other.nodes):
        return f"the model makes {len(other.nodes)} calls instead of {len(one.nodes)}"
    return "" if one.results == other.results else "the model returns other values"


def with_devices(graph: CapturedGraph, device: torch.device) -> CapturedGraph:
    """Replace the example's device by the batch's device throughout the graph."""

    def walk(tree: Any) -> Any:
        if isinstance(tree, torch.device):
            return BatchDevice() if tree == device else tree
        return _mapped(tree, walk)

    return _with_trees(graph, [walk(node.tree) for node in _ends(graph)])


class Situation(NamedTuple):
    """Rows, mode and device of the current batch, on which arguments in a graph depend."""

    rows: int
    is_training: bool
    device: torch.device


def resolved(tree: Any, now: Situation) -> Any:
    """Return a call's arguments `tree` with all placeholders replaced for the current batch."""
    if isinstance(tree, Scaled):
        return tree.factor * now.rows + tree.offset
    if isinstance(tree, ByMode):
        return resolved(tree.train if now.is_training else tree.eval, now)
    if isinstance(tree, BatchDevice):
        return now.device
    return _mapped(tree, lambda part: resolved(part, now))


def check_rows(graph: CapturedGraph, again: CapturedGraph) -> None:
    """Check that two graphs have the same `factor * rows + offset` wherever numbers depend on rows.

    Raises:
        ConfigError: The graphs differ, so a number does not depend linearly on the rows.
    """
    for one, other in zip(_ends(graph), _ends(again), strict=True):
        if not _alike(one.tree, other.tree):
            msg = (
                f"{one} at {one.where} depends on the number of rows, but not as factor * rows + "
                "offset: move it into a submodule"
            )
            raise ConfigError(msg)


def _ends(graph: CapturedGraph) -> list[GraphNode]:
    """Return the nodes, and a last node with the result as its arguments."""
    end = GraphNode("function", "the result", graph.result_tree, graph.results, None, (), "the end")
    return [*graph.nodes, end]


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, Scaled) or isinstance(other, Scaled):
        return bool(one == other)
    parts, others = _parts(one), _parts(other)
    if parts is None or others is None:
        return True
    return all(_alike(value, others[key]) for key, value in parts.items() if key in others)


def _calls(node: GraphNode) -> tuple[Any, ...]:
    return node.target, node.inputs, node.outputs, node.modes, node.is_checkpointed


def _merged(
    graph: CapturedGraph, other: CapturedGraph, merge: Callable[[Any, Any, GraphNode], Any]
) -> CapturedGraph:
    def walk(one: Any, another: Any, node: GraphNode) -> Any:
        if isinstance(one, Scaled) or (_is_plain(one) and _is_plain(another)):
            same = type(one) is type(another) and one == another
            return one if same else merge(one, another, node)
        parts, others = _parts(one), _parts(another)
        if parts is None and others is None and not _is_plain(one) and not _is_plain(another):
            _check_object(one, another, node)
            return one
        if parts is None or others is None or parts.keys() != others.keys():
            return merge(one, another, node)
        new = {key: walk(value, others[key], node) for key, value in parts.items()}
        return one if all(new[key] is parts[key] for key in parts) else _rebuilt(one, new)

    pairs = zip(_ends(graph), _ends(other), strict=True)
    both = _with_trees(graph, [walk(one.tree, another.tree, one) for one, another in pairs])
    nodes = tuple(
        # dropout in place writes in training only
        one._replace(writes=tuple(dict.fromkeys((*one.writes, *another.writes))))
        for one, another in zip(both.nodes, other.nodes, strict=True)
    )
    return dataclasses.replace(both, nodes=nodes)


def _with_trees(graph: CapturedGraph, trees: Sequence[Any]) -> CapturedGraph:
    *trees, result = trees
    pairs = zip(graph.nodes, trees, strict=True)
    nodes = tuple(node._replace(tree=tree) for node, tree in pairs)
    return dataclasses.replace(graph, nodes=nodes, result_tree=result)


def _mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    parts = _parts(tree)
    if parts is None:
        return tree
    new = {key: change(value) for key, value in parts.items()}
    return tree if all(new[key] is parts[key] for key in parts) else _rebuilt(tree, new)


def _check_object(one: Any, another: Any, node: GraphNode) -> None:
    """Raise if two runs of the model passed different objects, `one` and `another`, to a call.

    The model then creates an object in each run, such as a cache of keys.
    """
    try:
        same = one is another or bool(one == another)
    except Exception:  # noqa: BLE001 - comparison by the user's class
        same = False
    if not same:
        msg = (
            f"{node} at {node.where} gets a {type(one).__name__} that the model creates for each "
            "batch, which capture does not support: pass tensors in lists, dicts or dataclasses "
            "between modules (for models of transformers, use_cache=False)"
        )
        raise ConfigError(msg)


def _is_plain(x: Any) -> bool:
    return isinstance(x, PLAIN)


def _describe(x: Any) -> str:
    return f"the number {x}" if isinstance(x, float) else repr(x)


def _parts(tree: Any) -> dict[Any, Any] | None:
    if isinstance(tree, slice):
        return {"start": tree.start, "stop": tree.stop, "step": tree.step}
    return None if isinstance(tree, Scaled | ByMode | BatchDevice) else parts_of(tree)


def _rebuilt(tree: Any, parts: dict[Any, Any]) -> Any:
    if isinstance(tree, slice):
        return slice(*parts.values())
    # a torch.Size holds numbers only
    return tuple(parts.values()) if isinstance(tree, torch.Size) else rebuild(tree, parts)
